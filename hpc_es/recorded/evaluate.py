"""Evaluate versions of a run afterwards: on its own tasks or on others, greedily or with repeats.

Invariants: what is evaluated is theta_v to the bit (see solo.py); all versions play the same tasks with the same
sampling seeds; the run folder only gains a journal below evals/, which has every batch as soon as it is played, so that
an evaluation that was stopped goes on where it stopped.
"""

import asyncio
import contextlib
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_es import methods, modes
from hpc_es.config import Config, compare, from_record
from hpc_es.envs.manifest import eval_tasks, read_tasks, settle_tasks
from hpc_es.errors import ConfigError
from hpc_es.launch.prepare import check_model
from hpc_es.methods.evaluation import plan_evaluation
from hpc_es.paths import RunPaths
from hpc_es.recorded.eval_config import EvalRequest, checked_name, of_run
from hpc_es.recorded.solo import Keep, Recorded, Solo
from hpc_es.records import Assignment, EvalId, Result
from hpc_es.store import records as journal
from hpc_es.store.clock import Clock
from hpc_es.store.later import EvalJournal
from hpc_es.version import __version__
from hpc_es.worker.trajectories import TrajectoryFile

Say = Callable[[str], None]
Write = Callable[[journal.AnyRecord], None]
"""Makes a record durable."""

RUN = "run"
"""The source of what a run folder's own journal has."""
WORKER = "hpc-es eval"
PROGRESS_S = 15.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Evaluation:
    """Where to find what was played: rows of `read(root)` with this source."""

    root: Path
    source: str
    versions: tuple[int, ...]
    """In the order in which they were asked for."""
    config: Config


def evaluate(
    root: Path,
    versions: str = "last",
    asked: EvalRequest | None = None,
    *,
    name: str | None = None,
    base: Path | None = None,
    say: Say = print,
) -> Evaluation:
    """Play evaluation tasks with some versions of a run (see `chosen_versions`), and record them as evals/NAME.hpcj.

    With the `name` of an evaluation that was stopped, go on with it. `base`: the base model, where it has moved.
    Errors: ConfigError for a version, task or number that does not exist, and for a name that something else was
    evaluated under; ModelError, DigestMismatch, EngineError, EnvError, StoreError.
    """
    recorded, asked = Recorded.read(root), asked or EvalRequest()
    chosen = chosen_versions(recorded, versions)
    config = of_run(recorded.config, asked, base)
    if config.engine.kind != "endpoint":
        check_model(Path(config.model.path), config.engine)
    _refuse_changed_tasks(recorded.paths, config)
    name = _fresh_name(config, asked) if name is None else checked_name(name, "--name")
    if name == RUN:
        raise ConfigError(f"--name {RUN} stands for what the run itself measured: choose another one")
    first = started(config, recorded.digests[0])
    with modes.within(root), contextlib.closing(EvalJournal.open(recorded.paths, name, first, warn=say)) as later:
        refuse_another_evaluation(later.earlier[0], config, later.path)
        settle_tasks(recorded.paths.later_eval_tasks(name), config, has_begun=True)
        left = what_is_left(config, chosen, later.earlier)
        announce(config, left, f"{later.path}: if it is stopped, the same command with --name {name} resumes it", say)
        if left:
            keep = TrajectoryFile(recorded.paths.later_eval_trajectories(name), WORKER).append
            asyncio.run(_evaluate(replace(recorded, config=config), left, later.append, keep, say))
    return Evaluation(root, name, chosen, config)


def chosen_versions(recorded: Recorded, text: str) -> tuple[int, ...]:
    """`all` (from theta_0 to the newest), or `0,10,last`, `0:100:10` (from 0 to 100, every 10th), in any mixture.

    In the order given. Errors: ConfigError for what is none of these, and for a version that the run does not have.
    """
    newest = recorded.version(None)
    if text == "all":
        return tuple(range(newest + 1))
    chosen = dict[int, None]()
    for part in re.sub(r"\blast\b", str(newest), text).split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?::([0-9]{1,18})(?::([0-9]{1,18}))?)?\s*", part)
        if match is None:
            raise ConfigError(f"--versions {text!r} must be `all`, or numbers and `last`, like 0,10,last or 0:100:10")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step == 0 or last < first:
            raise ConfigError(f"--versions {part!r} names no version: FROM:TO:STEP goes upwards, by at least 1")
        recorded.version(first), recorded.version(last)
        chosen.update(dict.fromkeys(range(first, last + 1, step)))
    return tuple(chosen)


# --- what evaluations of runs and of models have in common --------------------------------------------------------


def started(config: Config, base_digest: int, generation: int = 0, predecessor_bytes: int = 0) -> journal.Started:
    """The first record of an evaluation."""
    return journal.Started(
        time=Clock()(),
        schema_version=journal.SCHEMA_VERSION,
        run_id=config.run.name,
        generation=generation,
        predecessor_bytes=predecessor_bytes,
        config_json=config.model_dump_json(),
        base_digest=base_digest,
        versions={"hpc_es": __version__, "python": platform.python_version()},
        host=socket.gethostname(),
    )


@dataclass(frozen=True)
class Left:
    """What is left to play of one version."""

    version: int
    plan: tuple[Assignment, ...]
    """Everything, also what is done."""
    batches: tuple[Assignment, ...]
    is_planned: bool
    """The plan is in the journal already."""


def what_is_left(config: Config, versions: Sequence[int], earlier: Iterable[journal.AnyRecord]) -> list[Left]:
    """Of these versions, in ascending order, those that an earlier writer of the journal did not come to the end of."""
    planned, done = set[int](), set[EvalId]()
    for record in earlier:
        if isinstance(record, journal.Planned):
            planned.add(record.version)
        elif isinstance(record, journal.Reported):
            done.add(record.result.eval_id)
    found, eval_batch = [], methods.make(config).eval_batch
    for version in sorted(versions):
        plan = tuple(plan_evaluation(config, eval_batch, config.eval.num_tasks, version))
        if batches := tuple(assignment for assignment in plan if assignment.eval_id not in done):
            found.append(Left(version, plan, batches, version in planned))
    return found


def announce(config: Config, left: Sequence[Left], where: str, say: Say) -> None:
    """How much there is to do, and what it will be worth."""
    repeats = config.eval.repeats
    if not left:
        say("everything that is asked for is recorded already")
        return
    if repeats > 1 and config.sampling.temperature == 0:
        say("note: greedy answers have no chance in them, so that repeats only show what batching changes")
    episodes = sum(len(assignment.tasks) for each in left for assignment in each.batches)
    times = f" x {repeats} repeats" if repeats > 1 else ""
    versions = "1 version" if len(left) == 1 else f"{len(left)} versions"
    say(f"{episodes} episodes to play: {versions}, {config.eval.num_tasks} tasks{times} of {config.task.env}")
    say(where)


async def play(solo: Solo, config: Config, left: Sequence[Left], write: Write, say: Say, clock: Clock) -> None:
    """Play what is left, version by version, and write every batch as soon as it is there."""
    progress = _Progress(left, say)
    for each in left:
        if not each.is_planned:
            write(journal.Planned(clock(), each.version, each.plan))
        await solo.become(each.version, None)
        await _play_batches(solo, config, each, write, progress, clock)


async def _play_batches(
    solo: Solo, config: Config, left: Left, write: Write, progress: "_Progress", clock: Clock
) -> None:
    """As many batches at once as engine.max_concurrent has room for: a barrier after each would idle the engine."""
    largest = max(len(assignment.tasks) for assignment in left.batches)
    slots = asyncio.Semaphore(max(1, config.engine.max_concurrent // largest))

    async def one(assignment: Assignment) -> None:
        async with slots:
            began = clock()
            result = await solo.play(assignment)
        ended = clock()
        write(journal.Reported(ended, WORKER, result, began, ended, 1))
        progress.count(result)

    running = [asyncio.ensure_future(one(assignment)) for assignment in left.batches]
    try:
        await asyncio.gather(*running)
    finally:  # parameters may only change again when no episode is left in flight
        for batch in running:
            batch.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Progress:
    """A line now and then."""

    def __init__(self, left: Sequence[Left], say: Say) -> None:
        self._say, self._done, self._said = say, 0, time.monotonic()
        self._total = sum(len(assignment.tasks) for each in left for assignment in each.batches)

    def count(self, result: Result) -> None:
        self._done += len(result.episodes)
        if time.monotonic() - self._said > PROGRESS_S:
            self._said = time.monotonic()
            self._say(f"{self._done} of {self._total} episodes (theta_{result.eval_id.version})")


def refuse_another_evaluation(first: journal.AnyRecord, config: Config, path: Path) -> None:
    """Errors: ConfigError when a journal that is to go on began with another configuration."""
    assert isinstance(first, journal.Started), "a journal begins with Started"
    harmful, _ = compare(from_record(first.config_json), config)
    if harmful:
        raise ConfigError(
            f"{path} is an evaluation of something else: {'; '.join(map(str, harmful))}; give this one another name"
        )


# --- of a run -----------------------------------------------------------------------------------------------------


def _refuse_changed_tasks(paths: RunPaths, config: Config) -> None:
    """Errors: ConfigError when these are the run's own tasks and have become others since it began; StoreError."""
    own, now = read_tasks(paths.tasks), eval_tasks(config)
    if own is None or (own.env, own.options) != (now.env, now.options):
        return
    for number, (before, after) in enumerate(zip(own.tasks, now.tasks, strict=False)):
        if before != after:
            raise ConfigError(
                f"task {number} of {config.task.env} was {before.id!r} when the run began and is {after.id!r} now, or "
                f"what is known of it has changed ({paths.tasks}): bring the task's data back, or the evaluations of "
                "this run would not compare"
            )


def _fresh_name(config: Config, asked: EvalRequest) -> str:
    what = asked.task.stem if asked.task else config.task.env
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return f"{re.sub('[^A-Za-z0-9_-]+', '-', what).strip('-_')}-{began}-{os.getpid()}"


async def _evaluate(recorded: Recorded, left: Sequence[Left], write: Write, keep: Keep, say: Say) -> None:
    async with Solo.start(recorded, keep) as solo:
        await play(solo, recorded.config, left, write, say, Clock())
