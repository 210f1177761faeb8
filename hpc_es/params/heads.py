"""Check how many tensor-parallel ranks a model's attention can be split over.

Invariant: everything refused here would also be refused by vLLM, but only after loading, and with a less clear message.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_es.errors import ConfigError
from hpc_es.params.weights import text_config

MAX_RANKS = 8
"""Largest number that an error suggests: the GPUs of a typical node."""


def num_heads(described: Mapping[str, Any]) -> int | None:
    """Number of attention heads in a config.json; None if no known key names it."""
    heads = (text_config(dict(described)) or described).get("num_attention_heads")
    return heads if isinstance(heads, int) and heads > 0 else None


def check_ranks(ranks: int, heads: int | None) -> None:
    """Refuse a number of ranks that cannot get equally many attention heads; an unknown number of heads passes.

    Errors: ConfigError.
    """
    if heads is None or heads % ranks == 0:
        return
    whole = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
    raise ConfigError(
        f"engine.tensor_parallel={ranks} does not divide the model's {heads} attention heads, but every rank needs "
        f"the same number: use one of {whole}"
    )


def possible_ranks(heads: int | None, kv_heads: int | None) -> Iterator[int]:
    """Possible numbers of ranks from 2 to MAX_RANKS. Heads that share keys and values stay on one rank, or their keys
    and values are copied to several."""
    for ranks in range(2, MAX_RANKS + 1):
        dealt = heads % ranks == 0 if heads else ranks & (ranks - 1) == 0
        if dealt and (not kv_heads or kv_heads % ranks == 0 or ranks % kv_heads == 0):
            yield ranks
