"""Brings an engine's arena to another version: from a checkpoint, or by the commits that it has missed.

Invariant: the bits of theta_v do not depend on the way. A cost model chooses the fastest way (see
hpc_es.params.catch_up); it learns from every load and every update of this engine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hpc_es.engine.base import Engine
from hpc_es.errors import StoreError
from hpc_es.params import checkpoint
from hpc_es.params.catch_up import Measured, ways, work
from hpc_es.paths import RunPaths
from hpc_es.records import Commit

log = logging.getLogger(__name__)

FETCH_RETRY_S = 5.0
PATIENCE_S = 60.0
"""Seconds to wait for the checkpoint of a version that a trainer made."""

Obtain = Callable[[range], Awaitable[Sequence[Commit]]]
"""Returns the commits of these versions, and waits for them as long as necessary."""


class Pending:
    """Commits that have arrived and are not applied yet. Missing ones are requested from the head."""

    def __init__(self, engine: Engine, fetch: Callable[[int, int], None]) -> None:
        """`fetch` asks the head for the commits first ... last; those that arrive are passed to `keep`."""
        self.commits: dict[int, Commit] = {}
        self._engine, self._fetch = engine, fetch
        self._came = asyncio.Event()

    def keep(self, commits: Iterable[Commit]) -> None:
        """Add commits that have arrived, and drop those that the arena has applied."""
        for applied in [version for version in self.commits if version <= self._engine.version]:
            del self.commits[applied]
        self.commits.update((commit.version, commit) for commit in commits if commit.version > self._engine.version)
        self._came.set()

    async def obtain(self, wanted: range) -> list[Commit]:
        """Wait for the commits of these versions, and return them. The head may send them in several messages."""
        while (missing := next((version for version in wanted if version not in self.commits), None)) is not None:
            self._came.clear()
            self._fetch(missing, wanted[-1])
            try:
                await asyncio.wait_for(self._came.wait(), FETCH_RETRY_S)
            except TimeoutError:
                log.warning("still waiting for the commits up to version %d", wanted[-1])
        return [self.commits[version] for version in wanted]


class CatchUp:
    """Takes one engine from version to version in the fastest way."""

    def __init__(
        self,
        engine: Engine,
        paths: RunPaths,
        *,
        known: Mapping[int, Commit],
        obtain: Obtain,
        usual_work: float = 0.0,
        trains: bool = False,
    ) -> None:
        """`known`: commits that have arrived already; any other is assumed to be `usual_work`. `trains`: every version
        is a checkpoint that a trainer wrote."""
        self._engine, self._paths = engine, paths
        self._known, self._obtain, self._usual_work = known, obtain, usual_work
        self._trains = trains
        self._measured = Measured(engine.info.seconds_to_load)

    async def go_to(self, version: int) -> None:
        """Bring the arena to `version`. If a checkpoint is damaged or was removed, the next best way is taken.

        Errors: ModelError when the base model has changed.
        """
        if self._trains:
            await self._go_to_trained(version)
            return
        here = self._engine.version
        folders: dict[int, Path | None] = {0: None, **dict(checkpoint.starts(self._paths, version))}
        if max(folders) <= here <= version:
            await self._apply(range(here + 1, version + 1))
        else:
            await self._choose(here, version, folders)

    async def _go_to_trained(self, version: int) -> None:
        """Load the checkpoint of a version. Errors: StoreError when it is missing or damaged."""
        if version == self._engine.version:
            return
        folder = self._paths.checkpoint(version) if version else None
        deadline = time.monotonic() + PATIENCE_S
        while folder is not None and not folder.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # the head moves it there just after it has announced the commit
        if not await self._load(folder):
            raise StoreError(f"theta_{version} cannot be loaded from {folder}, and only a trainer could make it again")

    async def _choose(self, here: int, version: int, folders: dict[int, Path | None]) -> None:
        """Try the ways to `version`, fastest first. `folders`: what can be loaded, by version; None: the base model."""
        began, start = time.monotonic(), here if here <= version else None
        while True:
            best, *others = ways(start, version, folders, self._work_of, self._measured.costs)
            rest = ", ".join(map(str, others)) or "nothing"
            log.info("theta_%d to theta_%d: %s (other ways: %s)", here, version, best, rest)
            if best.load is None:
                self._measured.load_not_chosen()
                break
            if await self._load(folders.pop(best.load)):
                break
            start = None  # after a failed load, the arena has no valid version
        await self._apply(best.commits)
        log.info("theta_%d reached after %.2g s", version, time.monotonic() - began)

    def _work_of(self, version: int) -> float:
        commit = self._known.get(version)
        return self._usual_work if commit is None else work(commit)

    async def _load(self, folder: Path | None) -> bool:
        """Load a checkpoint, or the base model (None). Returns False if it is damaged or was removed meanwhile."""
        began = time.monotonic()
        try:
            await self._engine.load(folder)
        except StoreError as error:
            checkpoint.pass_over(error)
            return False
        self._measured.loaded(time.monotonic() - began)
        return True

    async def _apply(self, versions: range) -> None:
        if not versions:
            return
        commits = await self._obtain(versions)
        began = time.monotonic()
        await self._engine.update(commits)
        self._measured.applied(sum(map(work, commits)), time.monotonic() - began)
