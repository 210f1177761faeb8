"""Evaluate any version of a run afterwards, on the run's own evaluation tasks, with the run's own engine.

Invariant: what is evaluated is theta_v to the bit (see solo.py). The run folder only gains a journal of its own below
evals/.
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
from hpc_es.config import Config
from hpc_es.errors import ConfigError
from hpc_es.es.population import eval_sampling_seed
from hpc_es.es.records import Assignment, Episode, EvalId, Result
from hpc_es.launch.solo import Recorded, Solo
from hpc_es.store import records as journal
from hpc_es.store.hdf5 import write_eval_journal


@dataclass(frozen=True)
class Evaluation:
    version: int
    name: str
    """Of its journal in RUN/evals, and the `source` of its rows."""
    episodes: tuple[Episode, ...]


def evaluate(
    root: Path, *, version: int | None = None, num_tasks: int | None = None, say: Callable[[str], None] = print
) -> Evaluation:
    """Play the evaluation tasks with theta_version (default: the newest) and record the episodes.

    num_tasks: default eval.num_tasks of the run. Errors: ConfigError for a version or number that does not exist,
    DigestMismatch, EngineError, EnvError.
    """
    recorded = Recorded.read(root)
    config, version = recorded.config, recorded.version(version)
    tasks = _tasks(config, num_tasks)
    began = time.time()
    say(f"evaluating theta_{version} on {len(tasks)} tasks")
    assignment = Assignment(EvalId(version, -1), 0, "eval", None, tasks, eval_sampling_seed(config.run.seed))
    result = asyncio.run(_measure(recorded, assignment))
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
    write_eval_journal(recorded.paths, name, [started, journal.Planned(began, version, (assignment,)), reported])
    return Evaluation(version, name, result.episodes)


def _tasks(config: Config, num_tasks: int | None) -> tuple[int, ...]:
    env = envs.make_for(config, "eval")
    available = env.num_tasks
    env.close()
    wanted = num_tasks or config.eval.num_tasks or available
    if not 1 <= wanted <= available:
        raise ConfigError(f"{wanted} evaluation tasks are asked for, {config.task.env} has 1 to {available}")
    return tuple(range(wanted))


async def _measure(recorded: Recorded, assignment: Assignment) -> Result:
    async with Solo.start(recorded) as solo:
        await solo.become(assignment.version, None)
        return await solo.play(assignment)
