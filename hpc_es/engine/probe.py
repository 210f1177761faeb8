"""Proofs that noise reaches the live model, shared by the engines.

Two kinds: the logits of a perturbed member must differ from the centre's, which must come back to the bit; and the
live parameters must have the same fingerprints before and after they are written again from the arena.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from hpc_es.engine.base import Engine
from hpc_es.errors import EngineError
from hpc_es.es.records import Member

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = Member(seed=0x5EED0F9E0BE5, sign=1, sigma=1e-2)
"""Strong enough to show in bfloat16."""
_CHUNK = 1 << 22


async def prove_noise_reaches(engine: Engine) -> None:
    """Centre, one member, centre again: the logits must differ, then return to the same bits. Leaves the centre."""
    prompt = _probe_prompt(engine.tokenizer)
    await engine.perturb(None)
    centre = await engine.logits(prompt)
    await engine.perturb(PROBE)
    perturbed = await engine.logits(prompt)
    await engine.perturb(None)
    again = await engine.logits(prompt)
    if not all(map(math.isfinite, centre)):
        raise EngineError("the base model's logits are not finite; is model.dtype right for this checkpoint?")
    if perturbed == centre:
        raise EngineError("the logits of a perturbed member equal the centre's: noise does not reach the live model")
    if again != centre:
        worst = max(abs(a - b) for a, b in zip(again, centre, strict=True))
        raise EngineError(f"the centre's logits did not return to the same bits after a member (off by {worst:.3g})")


def _probe_prompt(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    return list(tokenizer.encode("1 + 1 ="))[:8]


def fingerprint(parameter: torch.Tensor) -> int:
    """64-bit checksum of a parameter's bits that depends on their order; computed where the parameter lives."""
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[parameter.element_size()]
    bits = parameter.detach().contiguous().view(width).flatten()
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        factor = torch.arange(2 * start + 1, 2 * (start + part.numel()) + 1, 2, device=part.device)
        total += int((part * factor).sum())
    return total % 2**64


def fingerprints(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: fingerprint(parameter) for name, parameter in parameters}


def differing(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Names whose fingerprints differ, in order."""
    return [name for name in before if before[name] != after.get(name)]


def poison(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill with NaN, so that an element which the next write leaves out shows in its fingerprint."""
    for _, parameter in parameters:
        parameter.detach().fill_(math.nan)
