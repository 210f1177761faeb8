"""How a worker's arena comes to another version: from a checkpoint, or by the commits that it has missed.

Invariant: the bits of theta_v do not depend on the way.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from hpc_es.engine.base import Engine
from hpc_es.errors import StoreError
from hpc_es.es.records import Commit
from hpc_es.params import checkpoint
from hpc_es.paths import RunPaths

log = logging.getLogger(__name__)

FETCH_RETRY_S = 5.0
CHECKPOINT_WORTH = 2
"""Commits that a checkpoint must save before it is loaded: reading one costs about as much as replaying two members."""


class CatchUp:
    """The commits that an engine's arena has not applied yet, and its way to the version that an assignment needs."""

    def __init__(self, engine: Engine, paths: RunPaths, fetch: Callable[[int, int], None]) -> None:
        """`fetch` asks the head for the commits first ... last, which come by `keep`, or never."""
        self.engine, self.paths, self._fetch = engine, paths, fetch
        self.commits: dict[int, Commit] = {}
        self._came = asyncio.Event()

    def keep(self, commits: Iterable[Commit]) -> None:
        """Commits have come; those that the arena has applied are dropped."""
        self.commits.update((commit.version, commit) for commit in commits if commit.version > self.engine.version)
        self._came.set()

    async def go_to(self, version: int) -> None:
        """Bring the arena to `version`: from the newest checkpoint where that saves work, then by commits."""
        starts = checkpoint.starts(self.paths, version)
        newest = starts[0][0] if starts else 0
        if self.engine.version > version or newest - self.engine.version >= CHECKPOINT_WORTH:
            await self._load(version)
        wanted = range(self.engine.version + 1, version + 1)
        while any(v not in self.commits for v in wanted):
            self._came.clear()
            self._fetch(wanted.start, version)
            try:
                await asyncio.wait_for(self._came.wait(), FETCH_RETRY_S)
            except TimeoutError:
                log.warning("still waiting for the commits up to version %d", version)
        if wanted:
            await self.engine.update([self.commits[v] for v in wanted])
        self.commits = {v: commit for v, commit in self.commits.items() if v > version}

    async def _load(self, version: int) -> None:
        """Arena := the newest intact checkpoint at or before `version`, else the base model."""
        for _, folder in checkpoint.starts(self.paths, version):
            try:
                await self.engine.load(folder)
            except StoreError as error:  # damaged, or pruned while it was being read
                checkpoint.pass_over(error)
            else:
                return
        await self.engine.load(None)
