"""Evaluate a model that does not come from a run: a model folder, or an endpoint with OpenAI's chat API.

Invariant: the result is the folder of a run that stays at version 0, so that every tool that reads runs can read it. As
in a run, every batch is written to the journal as soon as it has been played.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from hpc_es.config import Config, compare, load, save
from hpc_es.envs.manifest import settle_tasks
from hpc_es.errors import ConfigError, LaunchError
from hpc_es.launch.prepare import began_config, check_model, launcher_lock
from hpc_es.paths import RunPaths
from hpc_es.recorded.eval_config import EvalRequest, Frozen, of_model
from hpc_es.recorded.evaluate import RUN, WORKER, Evaluation, Remaining, Say, announce, play, remaining_batches, started
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.store import records as journal
from hpc_es.store.clock import Clock
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter, read_journal
from hpc_es.worker.trajectories import TrajectoryFile


def evaluate_model(frozen: Frozen, out: Path, request: EvalRequest, *, say: Say = print) -> Evaluation:
    """Play the tasks of a file with a frozen model, and record them in the run folder `out`.

    If `out` holds the same evaluation, stopped halfway, it is resumed. Errors: ConfigError, also when `out` holds
    anything else; ModelError, EngineError, EnvError, StoreError.
    """
    config, paths = of_model(frozen, out, request), RunPaths(out)
    if frozen.url is None:
        check_model(Path(frozen.model), config.engine)
    _refuse_something_else(paths, config)
    with launcher_lock(config):
        earlier = list(read_journal(out, warn=say))
        try:
            save(config, paths.config)
        except OSError as error:
            raise LaunchError(f"{out} cannot be written: {error}") from None
        settle_tasks(paths.tasks, config, has_begun=bool(earlier))
        left = remaining_batches(config, (0,), earlier)
        announce(config, left, f"{out}: if it is stopped, the same command resumes it", say)
        if left:
            asyncio.run(_evaluate(Recorded.frozen(paths, config), left, say))
            rebuild(out, warn=say)
    return Evaluation(out, RUN, (0,), config)


def _refuse_something_else(paths: RunPaths, config: Config) -> None:
    """Refuse a folder that holds anything but this evaluation. Errors: ConfigError."""
    if not paths.root.exists():
        return
    if not paths.config.is_file():
        if not paths.root.is_dir() or any(path != paths.launcher_lock for path in paths.root.iterdir()):
            raise ConfigError(f"{paths.root} already exists and is not an evaluation: choose another --out")
        return
    harmful, _ = compare(began_config(paths) or load(paths.config).config, config)
    if harmful:
        raise ConfigError(
            f"{paths.root} is a different evaluation or a run: {'; '.join(map(str, harmful))}; choose another --name "
            "or --out"
        )


def _refuse_another_model(paths: RunPaths, digest: int) -> None:
    """Refuse a folder whose evaluation began with other parameters. Errors: ConfigError."""
    first = next(read_journal(paths.root), None)
    if isinstance(first, journal.Started) and first.base_digest != digest:
        raise ConfigError(
            f"{paths.root} began with other parameters (digest {first.base_digest:016x}, now {digest:016x}): restore "
            "the model, or choose another --out"
        )


async def _evaluate(recorded: Recorded, left: Sequence[Remaining], say: Say) -> None:
    config, clock = recorded.config, Clock()
    keep = TrajectoryFile(recorded.paths.trajectory_file("hpc-es-eval"), WORKER).append
    async with Solo.start(recorded, keep) as solo:
        info = solo.generator.info
        _refuse_another_model(recorded.paths, info.base_digest)
        recorded.digests[0] = info.base_digest
        writer = JournalWriter.create(
            recorded.paths, lambda generation, sealed: started(config, info.base_digest, generation, sealed)
        )

        def write(record: journal.AnyRecord) -> None:
            writer.append(record)
            writer.sync()

        try:
            write(journal.Joined(clock(), WORKER, WORKER, socket.gethostname(), os.getpid(), dict(info.facts)))
            await play(solo, config, left, write, say, clock)
            write(journal.Stopped(clock(), "all tasks are played", True))
        finally:
            writer.close()
