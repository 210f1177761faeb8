"""Write the base model of the ES lab as a model folder: the same bytes for the same arguments, on every machine.

It is a neural probabilistic language model (Bengio et al., 2003) over ASCII: position-dependent embeddings of the last
WINDOW characters are added, and one hidden layer gives the logits of the next character. It is scaled so that weights
and logits are of order 1 for every width (the NTK parametrisation), so one sigma suits every size.
`hpc_es.engine.lab` computes it.
"""

import json
from pathlib import Path

import numpy as np

from hpc_es.noise import Array
from hpc_es.params.weights import Spec, write

MODEL_TYPE = "hpc_es_lab"
WINDOW, VOCABULARY = 8, 128
EMBEDDING, HIDDEN_BIAS, READOUT, READOUT_BIAS = "embedding.weight", "hidden.bias", "readout.weight", "readout.bias"

LAB_MODELS = {"lab-10k": 8, "lab-100k": 86, "lab-1m": 867}
"""Hidden units of each lab model; the names give the number of parameters."""


def lab_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by canonical name; 1,153 parameters per hidden unit, and 128 more."""
    return {
        EMBEDDING: (WINDOW, VOCABULARY, hidden),
        HIDDEN_BIAS: (hidden,),
        READOUT: (VOCABULARY, hidden),
        READOUT_BIAS: (VOCABULARY,),
    }


def write_lab_model(folder: str | Path, hidden: int, *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (float32, weights standard normal, biases zero); return `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": MODEL_TYPE, "hidden_size": hidden, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generator = np.random.default_rng(seed)

    def elements(name: str) -> Array:
        shape = shapes[name]
        if name in (HIDDEN_BIAS, READOUT_BIAS):
            return np.zeros(shape, np.float32)
        return generator.standard_normal(shape).astype(np.float32)

    shapes = lab_shapes(hidden)
    write(folder / "model.safetensors", [Spec(name, "F32", shape) for name, shape in shapes.items()], elements)
    return folder
