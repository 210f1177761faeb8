"""Small safetensors checkpoints for tests that need tensors but no language model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpc_es.params.weights import Spec, write

SHAPES = {
    "model.norm.weight": (41,),
    "model.embed_tokens.weight": (97, 40),
    "model.layers.0.q_proj.weight": (40, 40),
    "model.layers.0.k_proj.weight": (40, 40),
    "model.layers.0.q_proj.bias": (3,),
}


def values(shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def save(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]], file: str = "model.safetensors") -> None:
    """float32 as F32, float16 as F16, uint16 as BF16."""
    types = {"f": "F32", "e": "F16", "H": "BF16"}
    specs = [Spec(name, types[tensor.dtype.char], tensor.shape) for name, tensor in tensors.items()]
    write(folder / file, specs, lambda name: tensors[name])


def make(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, values() if tensors is None else tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder
