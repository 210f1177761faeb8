"""Write theta as a Hugging Face folder that any other program can load.

Invariant: the tensors keep their canonical names, and manifest.json holds the run's digest and the digest of theta
alone. Both are digests of fp32 values, even if the exported weights are rounded to the base model's types for serving.
The optimiser's state is not exported, because only the run can use it.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from hpc_es.errors import ConfigError
from hpc_es.noise import Array
from hpc_es.params import models
from hpc_es.params.arena import Arena, Dtype
from hpc_es.params.checkpoint import MANIFEST, Manifest, write_manifest, written_whole
from hpc_es.params.weights import Spec, read_config, write

_ROUNDED: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*", "additional_chat_templates")
_REPLACED = ("config.json", "*.safetensors.index.json", "pytorch_model.bin.index.json", MANIFEST, models.MANIFEST)


def export(arena: Arena, base: Path, out: Path, dtype: Literal["float32", "base"] = "float32") -> Manifest:
    """Write theta_version with the config, tokenizer and generation settings of the folder `base`.

    `float32` keeps every bit; `base` rounds each tensor to its type in the base checkpoint.
    Errors: ConfigError when `out` exists and is not empty; StoreError when it cannot be written; ModelError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; remove it or choose another folder")
    config = read_config(base)
    if dtype == "float32":
        _set_dtype(config)
    digests = arena.digest(), arena.theta_digest()
    manifest = Manifest(arena.version, digests[0], arena.base_digest, arena.num_parameters, dtype, digests[1])
    specs = [Spec(n, "F32" if dtype == "float32" else arena.stored_dtype(n), arena.shape(n)) for n in arena.names]
    rounded = {spec.name: _ROUNDED[spec.dtype] for spec in specs}

    def elements(name: str) -> Array:
        return arena.perturbed(name, None, rounded[name])

    with written_whole(out) as temporary:
        for path in _beside_the_weights(base):
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, temporary / path.name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write(temporary / "model.safetensors", specs, elements)
        write_manifest(temporary, manifest)
    return manifest


def _beside_the_weights(base: Path) -> list[Path]:
    found = {path for pattern in _COPIED for path in base.glob(pattern)}
    return sorted(path for path in found if not any(path.match(pattern) for pattern in _REPLACED))


def _set_dtype(config: dict[str, Any]) -> None:
    """Set the dtype under both of the keys in use, also in nested configs, where it would override the outer one."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("torch_dtype", "dtype"):
            if part.get(key) is not None:
                part[key] = "float32"
    if not {"torch_dtype", "dtype"} & config.keys():
        config["torch_dtype"] = "float32"
