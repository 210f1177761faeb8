"""Receives theta by broadcast from the head's arena, for a worker that joins a running run.

Invariant: after a transfer, also a failed one, the engine's arena holds theta of the version that the engine names. A
failure is reported to the head and logged; the next assignment then brings theta by checkpoint and commits.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from threading import Event

from hpc_es.config.schema import TransportConfig
from hpc_es.engine.base import Engine
from hpc_es.errors import DigestMismatch, TransportError
from hpc_es.transport.messages import OpenTransfer
from hpc_es.transport.transfer import Receiving

log = logging.getLogger(__name__)


class Arrival:
    """Runs at most one transfer at a time; a newer call ends the one before it."""

    def __init__(self, engine: Engine, config: TransportConfig, tell: Callable[[OpenTransfer, str], None]) -> None:
        """`tell` is called when a transfer has ended, with the reason of a failure, or with an empty text."""
        self._engine, self._config, self._tell = engine, config, tell
        self._task: asyncio.Task[None] | None = None
        self._stop = Event()

    def begin(self, call: OpenTransfer) -> "asyncio.Task[None]":
        """Begin to receive theta. No evaluation may be running. The task fails only with an error of the engine."""
        self._stop.set()
        self._stop = Event()
        self._task = asyncio.create_task(self._take(call, self._stop, self._task))
        return self._task

    async def settled(self) -> None:
        """Wait until no transfer is running."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def end(self) -> None:
        """End the running transfer after its present step."""
        self._stop.set()
        await self.settled()

    async def _take(self, call: OpenTransfer, stop: Event, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait({before})
        began = time.monotonic()
        timeout_s, interface = self._config.collective_timeout, self._config.interface
        try:
            buckets = Receiving(call, timeout_s=timeout_s, interface=interface, stop=stop)
            await self._engine.receive(call.version, call.digest, buckets)
        except (TransportError, DigestMismatch) as error:
            log.warning("theta_%d did not come by broadcast: %s", call.version, error)
            self._tell(call, str(error))
        else:
            log.info("theta_%d came by broadcast in %.2f s", call.version, time.monotonic() - began)
            self._tell(call, "")
