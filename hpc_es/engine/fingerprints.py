"""Fingerprints of live torch parameters, to prove that engines write them completely (probe.py has another proof).

The live parameters must have the same fingerprints before and after they are written again from the arena.
"""

import math
from collections.abc import Iterable, Mapping

import torch

_CPU_CHUNK = 1 << 15
"""Elements at a time, whose 64-bit copies stay in a core's cache: ten times as fast as large chunks."""
_DEVICE_CHUNK = 1 << 22
"""Every chunk is a few launches."""


def fingerprint(parameter: torch.Tensor) -> int:
    """64-bit checksum of a parameter's bits that depends on their order; computed where the parameter lives."""
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[parameter.element_size()]
    bits = parameter.detach().contiguous().view(width).flatten()
    total, chunk = 0, _CPU_CHUNK if bits.device.type == "cpu" else _DEVICE_CHUNK
    for start in range(0, bits.numel(), chunk):
        part = bits[start : start + chunk].to(torch.int64)
        factor = torch.arange(2 * start + 1, 2 * (start + part.numel()) + 1, 2, device=part.device)
        total += int((part * factor).sum())
    return total % 2**64


def fingerprints(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: fingerprint(parameter) for name, parameter in parameters}


def differing(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Names whose fingerprints differ, in order."""
    return [name for name in before if before[name] != after.get(name)]


def poison(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill with NaN, so that an element that the next write leaves out changes the fingerprint."""
    for _, parameter in parameters:
        parameter.detach().fill_(math.nan)
