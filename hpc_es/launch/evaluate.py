"""Evaluate any version of a run afterwards, on the run's own evaluation tasks, with the run's own engine.

Invariant: what is evaluated is theta_v to the bit: the digest of the rebuilt parameters is compared with the journal's
before the first episode. The run folder only gains a journal of its own below evals/.
"""

import asyncio
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_es import __version__, envs
from hpc_es.config import Config, load, refuse_another
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.errors import ConfigError, DigestMismatch, StoreError
from hpc_es.es.records import Commit, Episode, EvalId, Result
from hpc_es.head.planning import assign
from hpc_es.paths import RunPaths
from hpc_es.store import records as journal
from hpc_es.store.hdf5 import write_eval_journal
from hpc_es.store.journal import read_journal
from hpc_es.worker.rollout import Player


@dataclass(frozen=True)
class Evaluation:
    version: int
    name: str
    """Of its journal in RUN/evals, and the `source` of its rows."""
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class _Recorded:
    """What the journal knows of the parameters."""

    config_json: str
    commits: dict[int, Commit]
    digests: dict[int, int]

    @classmethod
    def read(cls, root: Path) -> "_Recorded":
        config_json, commits, digests = "", {}, {}
        for record in read_journal(root):
            match record:
                case journal.Started(base_digest=digest):
                    digests[0], config_json = digest, config_json or record.config_json
                case journal.Committed(commit=commit):
                    commits[commit.version] = commit
                case journal.Digested(version=version, digest=digest):
                    digests[version] = digest
        if not digests:
            raise StoreError(f"{root} has no journal: it is not the folder of a run that has begun")
        return cls(config_json, commits, digests)


def evaluate(
    root: Path, *, version: int | None = None, num_tasks: int | None = None, say: Callable[[str], None] = print
) -> Evaluation:
    """Play the evaluation tasks with theta_version (default: the newest) and record the episodes.

    num_tasks: default eval.num_tasks of the run. Errors: ConfigError for a version or number that does not exist,
    DigestMismatch, EngineError, EnvError.
    """
    paths = RunPaths(root)
    config = load(paths.config).config
    recorded = _Recorded.read(root)
    refuse_another(recorded.config_json, config, paths.config)
    version = max(recorded.digests) if version is None else version
    if version not in recorded.digests:
        raise ConfigError(f"version {version} does not exist: {root} has versions 0 to {max(recorded.digests)}")
    tasks = _tasks(config, num_tasks)
    began = time.time()
    say(f"evaluating theta_{version} on {len(tasks)} tasks")
    assignment = assign(config, EvalId(version, -1), 0, "eval", tasks)
    result = asyncio.run(_measure(paths, config, recorded, assignment))
    name = f"v{version:08d}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(began))}-{os.getpid()}"
    started = journal.Started(
        time=began,
        schema_version=journal.SCHEMA_VERSION,
        run_id=config.run.name,
        generation=0,
        predecessor_bytes=0,
        config_json=config.model_dump_json(),
        base_digest=recorded.digests[0],
        versions={"hpc_es": __version__, "python": platform.python_version()},
        host=socket.gethostname(),
    )
    ended = time.time()
    reported = journal.Reported(ended, "hpc-es eval", result, ended - result.seconds_rollout, ended, 1)
    write_eval_journal(paths, name, [started, journal.Planned(began, version, (assignment,)), reported])
    return Evaluation(version, name, result.episodes)


def _tasks(config: Config, num_tasks: int | None) -> tuple[int, ...]:
    env = envs.make_for(config, "eval")
    available = env.num_tasks
    env.close()
    wanted = num_tasks or config.eval.num_tasks or available
    if not 1 <= wanted <= available:
        raise ConfigError(f"{wanted} evaluation tasks are asked for, {config.task.env} has 1 to {available}")
    return tuple(range(wanted))


async def _measure(paths: RunPaths, config: Config, recorded: _Recorded, assignment: journal.Assignment) -> Result:
    threads = config.engine.threads or len(os.sched_getaffinity(0))
    engine = await start_engine(config.model, config.engine, threads=threads)
    try:
        updated = time.monotonic()
        await _go_to(engine, paths, recorded, assignment.version)
        perturbed = time.monotonic()
        await engine.perturb(None)
        began = time.monotonic()
        player = Player(config, engine, lambda kind: envs.make_for(config, kind))
        episodes = await player.play(assignment)
        return Result(
            eval_id=assignment.eval_id,
            fitness=sum(episode.reward for episode in episodes) / len(episodes),
            episodes=episodes,
            digest=engine.digest,
            seconds_update=perturbed - updated,
            seconds_perturb=began - perturbed,
            seconds_rollout=time.monotonic() - began,
        )
    finally:
        await engine.close()


async def _go_to(engine: Engine, paths: RunPaths, recorded: _Recorded, version: int) -> None:
    folders = [(written, folder) for written, folder in paths.written_checkpoints() if written <= version]
    if folders:
        await engine.load(folders[-1][1])
    await engine.update([recorded.commits[v] for v in range(engine.version + 1, version + 1)])
    if engine.digest != recorded.digests[version]:
        raise DigestMismatch(
            f"theta_{version} was rebuilt with digest {engine.digest:016x}, the journal has "
            f"{recorded.digests[version]:016x}: `hpc-es verify {paths.root}` shows where the bits part"
        )
