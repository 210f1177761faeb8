"""The shape of a model as a plan needs it: the number of parameters, and the size of a token in the KV cache.

It is read from the model's folder if that is on this machine (headers only, no torch), else taken from given numbers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_es.config.schema import ModelConfig
from hpc_es.errors import ConfigError
from hpc_es.params.heads import num_heads
from hpc_es.params.layout import lay_out
from hpc_es.params.weights import read_config, text_config


@dataclass(frozen=True)
class Shape:
    parameters: float
    """Parameters of the checkpoint, P."""
    trained: float
    """Parameters in the scope of model.include and model.exclude."""
    active: float
    """Parameters that one token passes through, which determine the FLOPs."""
    kv_elements: int | None
    """Values per token in the KV cache, over all layers; None without a config.json."""
    kv_heads: int | None
    """Number of key-value heads. The cache is split over at most this many ranks; further ranks hold copies."""
    source: str
    heads: int | None = None
    """Attention heads, of which all tensor-parallel ranks get the same number; None without a config.json."""
    other_model: str = ""
    """The model that the KV cache and heads come from, if P was given instead of read from it."""


def shape_of(
    model: ModelConfig, *, parameters: float | None = None, active: float | None = None, described: Path | None = None
) -> Shape:
    """The shape of a model. `parameters` and `active` override what is read; `described` is a config.json, or a folder
    with one, to use instead of model.path.

    Errors: ConfigError when P is neither given nor readable; ModelError for an unusable folder.
    """
    folder = Path(model.path)
    config = _config(described) if described else read_config(folder) if (folder / "config.json").is_file() else None
    if parameters is not None:
        trained, source = parameters, "given"
    elif folder.is_dir():
        slots = lay_out(folder, model.include, model.exclude)
        parameters = sum(slot.stored.size for slot in slots)
        trained, source = sum(slot.stored.size for slot in slots if slot.trained), f"of {folder}"
    else:
        raise ConfigError(
            f"model.path={folder} is not on this machine: give its number of parameters, e.g. --parameters 4.5e9, and "
            "for its KV cache the config.json, --model-config FILE"
        )
    if active is not None and active > parameters:
        raise ConfigError(f"--active-parameters {active:g} must be at most the {parameters:g} of the whole model")
    kv_elements, kv_heads = _kv(config) if config else (None, None)
    return Shape(
        parameters,
        trained,
        active or parameters,
        kv_elements,
        kv_heads,
        source,
        heads=num_heads(config) if config else None,
        other_model=str(folder) if config and source == "given" and not described else "",
    )


def _config(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return read_config(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model-config {path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model-config {path}: must hold a JSON object, like a Hugging Face config.json")
    return config


def _kv(config: dict[str, Any]) -> tuple[int | None, int | None]:
    """Values per token in the KV cache and number of key-value heads, over all layers that attend to all tokens.

    Layers with a bounded state (linear attention, Mamba) count as zero, and sliding windows are ignored.
    """
    config = text_config(config) or config
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or config["hidden_size"] // heads)
        kinds = [str(kind) for kind in config.get("layer_types") or ()]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None, None
    attending = sum(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds) or layers
    return 2 * attending * kv_heads * width, kv_heads
