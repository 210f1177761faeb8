"""One engine in this process that goes to any version of a run and plays any assignment there.

Invariant: what is played is theta_v to the bit: after every change of version the digest of the parameters is compared
with the journal's. The run itself is only read.
"""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from hpc_es import envs, methods
from hpc_es.config import Config, load, refuse_another
from hpc_es.engine import start_generator
from hpc_es.engine.base import Engine, Generator
from hpc_es.errors import ConfigError, DigestMismatch, EngineError, StoreError
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Commit, EvalId, Member, Result
from hpc_es.results import fitness_of
from hpc_es.store.history import History
from hpc_es.store.journal import read_journal
from hpc_es.worker.catch_up import CatchUp
from hpc_es.worker.rollout import Player
from hpc_es.worker.trajectories import Trajectory

Keep = Callable[[Sequence[Trajectory]], None]


@dataclass(frozen=True)
class Recorded:
    """What a run's journal knows: its configuration, its parameters, and what its members scored."""

    paths: RunPaths
    config: Config
    commits: dict[int, Commit]
    digests: dict[int, int]
    members: dict[EvalId, Assignment]
    """Every member that was planned and is not void."""
    results: dict[EvalId, Result]
    """Of these, without their episodes."""

    @classmethod
    def read(cls, root: Path) -> "Recorded":
        """Errors: ConfigError when config.yaml is not what the run began with; StoreError when nothing has run."""
        paths = RunPaths(root)
        config, history = load(paths.config).config, _Fitness()
        for record in read_journal(root):
            with contextlib.suppress(StoreError):  # `hpc-es verify` reports contradictions
                history.apply(record)
        if not history.digests:
            raise StoreError(f"{root} has no journal: it is not the folder of a run that has begun")
        refuse_another(history.config_json, config, paths.config)
        known = {
            eval_id: each
            for eval_id, each in history.evaluations.items()
            if each.assignment.member is not None and each.state != "void"
        }
        return cls(
            paths,
            config,
            history.commits,
            history.digests,
            {eval_id: each.assignment for eval_id, each in known.items()},
            {eval_id: each.result for eval_id, each in known.items() if each.result is not None},
        )

    @classmethod
    def frozen(cls, paths: RunPaths, config: Config) -> "Recorded":
        """A model that never updates; whoever starts its engine fills in the digest of version 0."""
        return cls(paths, config, {}, {}, {}, {})

    def version(self, wanted: int | None) -> int:
        """`wanted`, or the newest version. Errors: ConfigError when the run has no such version."""
        newest = max(self.digests)
        version = newest if wanted is None else wanted
        if version not in self.digests:
            raise ConfigError(f"version {version} does not exist: {self.paths.root} has versions 0 to {newest}")
        return version


class _Fitness(History):
    """A history that remembers the fitness of good results, and not their episodes."""

    def _kept(self, result: Result) -> Result | None:
        return replace(result, episodes=()) if result.error is None else None


class Solo:
    """The engine of one recorded run, or an endpoint; see `start`."""

    def __init__(self, recorded: Recorded, generator: Generator, keep: Keep | None) -> None:
        config = recorded.config
        self._recorded, self.generator = recorded, generator
        self._player = Player(config, generator, lambda kind: envs.make_for(config, kind), keep)
        trains = methods.find(config.method).trains
        self._catch_up: CatchUp | None = None
        if isinstance(generator, Engine):
            self._catch_up = CatchUp(
                generator, recorded.paths, known=recorded.commits, obtain=self._commits, trains=trains
            )
        self._seconds_update = self._seconds_perturb = 0.0

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, recorded: Recorded, keep: Keep | None = None) -> AsyncIterator["Solo"]:
        """The run's own engine, closed at the end; `keep` gets sampled episodes. Errors: ModelError, EngineError."""
        config = recorded.config
        threads = config.engine.threads or len(os.sched_getaffinity(0))
        optimiser = config.es.optimiser.kind
        generator = await start_generator(config.model, config.engine, threads=threads, optimiser=optimiser)
        try:
            yield cls(recorded, generator, keep)
        finally:
            await generator.close()

    @property
    def engine(self) -> Engine:
        """Errors: EngineError for an endpoint, whose weights and log-probabilities are not accessible."""
        if isinstance(self.generator, Engine):
            return self.generator
        raise EngineError(f"the weights behind {self._recorded.config.engine.url} are not accessible")

    async def become(self, version: int, member: Member | None) -> None:
        """Perturb theta_version by a member; None: the centre. An endpoint is always the centre of version 0.

        Errors: DigestMismatch, EngineError.
        """
        if self._catch_up is None and (version, member) == (0, None):
            return
        engine, began = self.engine, time.monotonic()
        await self._go_to(version)
        moved = time.monotonic()
        await engine.perturb(member)
        self._seconds_update, self._seconds_perturb = moved - began, time.monotonic() - moved

    async def play(self, assignment: Assignment) -> Result:
        """Play an assignment's tasks as what `become` made of the engine. Errors: EnvError, EngineError."""
        began = time.monotonic()
        episodes = await self._player.play(assignment)
        return Result(
            eval_id=assignment.eval_id,
            fitness=fitness_of(episodes),
            episodes=episodes,
            digest=self.generator.info.base_digest if self._catch_up is None else self.engine.digest,
            seconds_update=self._seconds_update,
            seconds_perturb=self._seconds_perturb,
            seconds_rollout=time.monotonic() - began,
        )

    async def _go_to(self, version: int) -> None:
        assert self._catch_up is not None, "an engine has one"
        await self._catch_up.go_to(version)
        engine, recorded = self.engine, self._recorded
        if engine.digest != recorded.digests[version]:
            raise DigestMismatch(
                f"theta_{version} was rebuilt with digest {engine.digest:016x}, the journal has "
                f"{recorded.digests[version]:016x}: `hpc-es verify {recorded.paths.root}` shows where the bits part"
            )

    async def _commits(self, versions: range) -> list[Commit]:
        return [self._recorded.commits[version] for version in versions]
