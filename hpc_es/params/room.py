"""Divide the memory of an engine's device between theta and vLLM, which allocates its part first.

Invariant: room for theta is set aside before vLLM starts, or theta stays on the host, so that an engine never runs out
of memory because of theta.
"""

from typing import Literal

Residence = Literal["auto", "host", "device"]
"""Values of engine.base: where theta is kept."""

RESERVE = 2**30
"""Bytes of device memory that copies of theta leave free for the engine's allocations while it serves."""
FREE_SHARE = 0.5
"""Share of the device's memory that `auto` leaves to the KV cache and everything else beside theta and weights."""


def gets_room(residence: Residence, theta: float, weights: float, memory: float) -> bool:
    """Whether theta gets room on the device; arguments in bytes: the arena, the live weights, and the total memory of
    all ranks' devices."""
    return residence == "device" or (residence == "auto" and theta + weights <= (1 - FREE_SHARE) * memory)


def share_beside(theta: float, usual: float, memory: float) -> float:
    """Share of the device's memory that vLLM may take so that theta fits beside it, given vLLM's `usual` share.

    It is at least 1 %; if that is too little, vLLM itself reports it.
    """
    return max(usual - (theta + RESERVE) / memory, 0.01)
