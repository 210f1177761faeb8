"""Copies and kernels that run side by side on a device: one stream of work in, one that computes, one out.

Invariant: work on one lane runs in the order in which it was submitted; across lanes it runs after what it names in
`after`, and in any order otherwise. Whoever submits declares every dependence; tests run the work in the orders that
this allows, so that a missing one shows.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

Lane = Literal["in", "compute", "out"]
LANES: tuple[Lane, ...] = ("in", "compute", "out")
Event = Any
"""That a piece of work is done."""


class Streams(Protocol):
    """Entered once per pass: what was submitted before, to the device's current stream, is done by then as far as the
    lanes can tell; on leaving, the host has waited for all of it."""

    def submit(self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """Queue work; `after` names events of this pass."""

    def __enter__(self) -> "Streams": ...

    def __exit__(self, *error: object) -> None: ...


def streams_on(device: torch.device) -> Streams:
    """CUDA streams, or on a CPU the plain order."""
    return CudaStreams(device) if device.type == "cuda" else InOrder()


class InOrder:
    """Does everything at once, as it comes."""

    def submit(self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        work()

    def __enter__(self) -> "InOrder":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class CudaStreams:
    """One CUDA stream per lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in LANES}

    def submit(self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        stream = self._streams[lane]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
        return stream.record_event()

    def __enter__(self) -> "CudaStreams":
        before = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(before)
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.synchronize()
