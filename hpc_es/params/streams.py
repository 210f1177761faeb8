"""Lanes for copies and kernels that overlap on a device: one for copies in, one for kernels, one for copies out.

Invariant: work on one lane runs in the order of submission; work on different lanes runs in any order, except that it
starts after the events in its `after`. The caller must therefore declare every dependency. Tests run the work in all
permitted orders, so that a missing dependency shows.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

Lane = Literal["in", "compute", "out"]
LANES: tuple[Lane, ...] = ("in", "compute", "out")
Event = Any
"""Signals that a piece of work has finished."""


class Streams(Protocol):
    """A context entered once per pass. On entry, the lanes wait for earlier work on the device's current stream; on
    exit, the host waits for all lanes."""

    def submit(self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """Queue work that starts after the given events of this pass."""

    def __enter__(self) -> "Streams": ...

    def __exit__(self, *error: object) -> None: ...


def streams_on(device: torch.device) -> Streams:
    """CUDA streams on a GPU; on a CPU, work runs in order of submission."""
    return CudaStreams(device) if device.type == "cuda" else InOrder()


class InOrder:
    """Runs each piece of work immediately when it is submitted."""

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
