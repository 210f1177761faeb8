"""How many tensor-parallel ranks a model's attention can be cut over.

Invariant: what is refused here, vLLM refuses too, after it has loaded for a while and in words of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_es.errors import ConfigError
from hpc_es.params.weights import text_config

MOST_RANKS = 8
"""Offered as a remedy: the GPUs of a usual node."""


def num_heads(described: Mapping[str, Any]) -> int | None:
    """Attention heads in a config.json; None if it has no key of the usual name."""
    heads = (text_config(dict(described)) or described).get("num_attention_heads")
    return heads if isinstance(heads, int) and heads > 0 else None


def check_ranks(ranks: int, heads: int | None) -> None:
    """Errors: ConfigError where attention heads cannot be dealt out evenly. Heads that are not known pass."""
    if heads is None or heads % ranks == 0:
        return
    whole = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
    raise ConfigError(
        f"engine.tensor_parallel={ranks} does not divide the model's {heads} attention heads, and each rank gets "
        f"equally many: take one of {whole}"
    )


def possible_ranks(heads: int | None, kv_heads: int | None) -> Iterator[int]:
    """Above 1, at most MOST_RANKS. Heads that share keys and values stay together, or their keys are copied."""
    for ranks in range(2, MOST_RANKS + 1):
        dealt = heads % ranks == 0 if heads else ranks & (ranks - 1) == 0
        if dealt and (not kv_heads or kv_heads % ranks == 0 or ranks % kv_heads == 0):
            yield ranks
