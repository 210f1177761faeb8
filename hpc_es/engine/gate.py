"""Many requests, or one change of the weights: never both.

Invariant: while a request is inside, no change enters, and the other way round. Refusing beats waiting: whoever
changes weights has drained its episodes first, so a request that is still there is a mistake worth hearing about.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hpc_es.errors import EngineError

T = TypeVar("T")


class Gate:
    """Lives in one event loop. Opens once weights stand in the live model; a new theta closes it."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._change: str | None = None
        self._written = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around one generation. Errors: EngineError while weights change, or before any were written for theta_v."""
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
        """Around one change. `writes`: it ends with weights that fit theta_v; requests stay shut out otherwise.

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
        """Whether the live weights are those of a member around the present theta."""
        return self._written


async def to_the_end(work: Awaitable[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Await `work`; a cancelled caller calls `on_cancel` and still waits for its end, so that nothing is half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({task})
        raise
