"""The part that engines share whose model lives in this process: arena and live weights behind a gate, in one thread.

Invariant: passes over the arena run in that thread and with no request in flight; the digest is of the theta that the
last pass read. The arena alone keeps the version.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.engine.base import Engine
from hpc_es.engine.gate import Gate, to_the_end
from hpc_es.errors import EngineError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.params.arena import Arena
from hpc_es.params.rebuild import receive
from hpc_es.records import Commit, Member

T = TypeVar("T")


class Live(ABC):
    """The arena and the live model that is written from it."""

    def __init__(self, config: ModelConfig, optimiser: Kind) -> None:
        self.arena = Arena.from_pretrained(config.path, config.include, config.exclude, optimiser=optimiser)
        self.digest = self.arena.base_digest

    @abstractmethod
    def write(self, member: Member | None) -> None:
        """Write a member, or the centre (None), into the live model's own storage."""

    @abstractmethod
    def differing(self, member: Member | None) -> list[str]:
        """Write the member again; return the names of the parameters that this changed."""

    def load(self, checkpoint: Path | None) -> None:
        self.arena.reload(checkpoint)
        self.digest = self.arena.digest()

    def receive(self, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
        try:
            receive(self.arena, version, digest, buckets)
        finally:
            self.digest = digest if self.arena.version == version else self.arena.base_digest

    def update(self, commits: Sequence[Commit]) -> None:
        self.digest = self.arena.apply(commits).digest


LiveT = TypeVar("LiveT", bound=Live)


class InProcessEngine(Engine, Generic[LiveT]):
    """See the base class."""

    def __init__(
        self, live: LiveT, thread: ThreadPoolExecutor, model: ModelConfig, engine: EngineConfig, traces: bool = False
    ) -> None:
        self._live = live
        self._thread = thread
        self._config = model
        self._engine = engine
        self._traces = traces
        self._gate = Gate()
        self._member: Member | None = None

    @property
    def version(self) -> int:
        return self._live.arena.version

    @property
    def digest(self) -> int:
        return self._live.digest

    async def load(self, checkpoint: Path | None) -> None:
        with self._gate.change("load", writes=False):
            await self._run(self._live.load, checkpoint)

    async def update(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        with self._gate.change("update", writes=False):
            await self._run(self._live.update, commits)

    async def receive(self, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
        with self._gate.change("receive", writes=False):
            await self._run(self._live.receive, version, digest, buckets)

    async def perturb(self, member: Member | None) -> None:
        with self._gate.change("perturb", writes=True):
            await self._run(self._live.write, member)
            self._member = member

    async def probe(self) -> None:
        if not self._gate.is_written:
            await self.perturb(None)
        with self._gate.change("probe", writes=True):
            names = await self._run(self._live.differing, self._member)
        if names:
            raise EngineError(f"live parameter {names[0]} ({len(names)} in all) differs from the arena")

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        del self._live

    async def _run(self, work: Callable[..., T], *args: Any, on_cancel: Callable[[], object] = lambda: None) -> T:
        """Run `work` in the engine's thread."""
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._thread, work, *args), on_cancel)
