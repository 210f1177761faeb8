"""Allows many requests or one change of the weights at a time, never both.

Invariant: no change begins while a request is running, and no request begins during a change. Both raise an error
instead of waiting: callers end all episodes before they change weights, so an overlap is a programming error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hpc_es.errors import EngineError

T = TypeVar("T")


class Gate:
    """Used in one event loop. Requests are allowed once weights have been written, until theta changes."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._change: str | None = None
        self._written = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of one generation. Errors: EngineError while weights change, or before any are written."""
        if self._change:
            raise EngineError(f"a request came during {self._change}; wait for it to end")
        if not self._written:
            raise EngineError("theta has changed and no member was written since; call perturb first")
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    @contextmanager
    def change(self, what: str, *, writes: bool) -> Iterator[None]:
        """Context of one change. `writes`: afterwards the live weights fit theta_v; if not, requests stay refused.

        Errors: EngineError while a request is in flight or another change is under way.
        """
        if self._num_requests:
            raise EngineError(
                f"{what} with {self._num_requests} requests in flight; let them finish or cancel them first"
            )
        if self._change:
            raise EngineError(f"{what} during {self._change}; one at a time")
        self._change, self._written = what, False
        try:
            yield
            self._written = writes
        finally:
            self._change = None

    @property
    def is_written(self) -> bool:
        """Whether the live weights are those of a member of the present theta."""
        return self._written


async def to_the_end(work: Awaitable[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Await `work`. If the caller is cancelled, call `on_cancel` and still wait, so that nothing is left half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({task})
        raise
