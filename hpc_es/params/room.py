"""How the memory of an engine's device is shared between vLLM, which takes its part first, and theta.

Invariant: theta is given room on a device before vLLM starts, or it stays on the host; no engine fails for the lack of
room that nobody asked it to leave.
"""

from typing import Literal

Residence = Literal["auto", "host", "device"]
"""engine.base."""

RESERVE = 2**30
"""Bytes of device memory that copies of theta leave free, for what an engine allocates while it serves."""
LEAVES = 0.5
"""Of the device's memory, for the KV cache and everything else: what `auto` leaves beside theta and weights."""


def gets_room(residence: Residence, theta: float, weights: float, memory: float) -> bool:
    """Whether room for theta is kept on a device. Bytes: of the arena, of the live weights, and of what the devices of
    all ranks have."""
    return residence == "device" or (residence == "auto" and theta + weights <= (1 - LEAVES) * memory)


def share_beside(theta: float, usual: float, memory: float) -> float:
    """Of the device's memory: what vLLM may take, of its usual share, so that theta has room beside it; at least 1 %,
    and vLLM then says itself that it is too little."""
    return max(usual - (theta + RESERVE) / memory, 0.01)
