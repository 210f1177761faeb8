"""Evaluate versions of a finished or running run, on its own tasks or on others, greedily or with repeats.

Invariants: the evaluated parameters are theta_v to the bit (see solo.py); all versions play the same tasks with the
same sampling seeds. The run folder only gains a journal below evals/, to which every batch is written as soon as it has
been played, so that a stopped evaluation can resume.
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
"""A function that writes a record durably."""

RUN = "run"
"""Name of the source for the run's own evaluations."""
WORKER = "hpc-es eval"
PROGRESS_S = 15.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Evaluation:
    """Where to find the results of an evaluation: the rows of `read(root)` with this source."""

    root: Path
    source: str
    versions: tuple[int, ...]
    """The evaluated versions, in the requested order."""
    config: Config


def evaluate(
    root: Path,
    versions: str = "last",
    request: EvalRequest | None = None,
    *,
    name: str | None = None,
    base: Path | None = None,
    say: Say = print,
) -> Evaluation:
    """Play evaluation tasks with some versions of a run (see `chosen_versions`), and record them as evals/NAME.hpcj.

    With the `name` of a stopped evaluation, resume it. `base` is the base model if it has moved.
    Errors: ConfigError for a version, task or number that does not exist, and for the name of a different evaluation;
    ModelError, DigestMismatch, EngineError, EnvError, StoreError.
    """
    recorded, request = Recorded.read(root), request or EvalRequest()
    chosen = chosen_versions(recorded, versions)
    config = of_run(recorded.config, request, base)
    if config.engine.kind != "endpoint":
        check_model(Path(config.model.path), config.engine)
    _refuse_changed_tasks(recorded.paths, config)
    name = _fresh_name(config, request) if name is None else checked_name(name, "--name")
    if name == RUN:
        raise ConfigError(f"--name {RUN} is reserved for the run's own evaluations: choose another name")
    first = started(config, recorded.digests[0])
    with modes.within(root), contextlib.closing(EvalJournal.open(recorded.paths, name, first, warn=say)) as later:
        refuse_another_evaluation(later.earlier[0], config, later.path)
        settle_tasks(recorded.paths.later_eval_tasks(name), config, has_begun=True)
        left = remaining_batches(config, chosen, later.earlier)
        announce(config, left, f"{later.path}: if it is stopped, the same command with --name {name} resumes it", say)
        if left:
            keep = TrajectoryFile(recorded.paths.later_eval_trajectories(name), WORKER).append
            asyncio.run(_evaluate(replace(recorded, config=config), left, later.append, keep, say))
    return Evaluation(root, name, chosen, config)


def chosen_versions(recorded: Recorded, text: str) -> tuple[int, ...]:
    """Parse versions: `all` (theta_0 to the newest), or a list of numbers, `last` and ranges such as `0:100:10` (0 to
    100, every 10th). The order is kept.

    Errors: ConfigError for any other text, and for a version that the run does not have.
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
            raise ConfigError(f"--versions {part!r} names no version: FROM:TO:STEP needs FROM <= TO and STEP >= 1")
        recorded.version(first), recorded.version(last)
        chosen.update(dict.fromkeys(range(first, last + 1, step)))
    return tuple(chosen)


# --- shared by evaluations of runs and of models ------------------------------------------------------------------


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
class Remaining:
    """The batches of one version that remain to be played."""

    version: int
    plan: tuple[Assignment, ...]
    """All batches of the version, including those already played."""
    batches: tuple[Assignment, ...]
    is_planned: bool
    """Whether the plan is already in the journal."""


def remaining_batches(config: Config, versions: Sequence[int], earlier: Iterable[journal.AnyRecord]) -> list[Remaining]:
    """The versions, in ascending order, that the records of an earlier attempt do not complete."""
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
            found.append(Remaining(version, plan, batches, version in planned))
    return found


def announce(config: Config, left: Sequence[Remaining], where: str, say: Say) -> None:
    """Report how much remains to be played, and warn if repeats are pointless."""
    repeats = config.eval.repeats
    if not left:
        say("everything requested is already recorded")
        return
    if repeats > 1 and config.sampling.temperature == 0:
        say("note: greedy answers are not random, so repeats differ only by effects of batching")
    episodes = sum(len(assignment.tasks) for each in left for assignment in each.batches)
    times = f" x {repeats} repeats" if repeats > 1 else ""
    versions = "1 version" if len(left) == 1 else f"{len(left)} versions"
    say(f"{episodes} episodes to play: {versions}, {config.eval.num_tasks} tasks{times} of {config.task.env}")
    say(where)


async def play(solo: Solo, config: Config, left: Sequence[Remaining], write: Write, say: Say, clock: Clock) -> None:
    """Play the remaining batches version by version, and write each result as soon as it is known."""
    progress = _Progress(left, say)
    for each in left:
        if not each.is_planned:
            write(journal.Planned(clock(), each.version, each.plan))
        await solo.become(each.version, None)
        await _play_batches(solo, config, each, write, progress, clock)


async def _play_batches(
    solo: Solo, config: Config, left: Remaining, write: Write, progress: "_Progress", clock: Clock
) -> None:
    """Play as many batches at once as engine.max_concurrent allows, because waiting after each would idle the
    engine."""
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
    finally:  # parameters may change only after all episodes have ended
        for batch in running:
            batch.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Progress:
    """Prints a line of progress from time to time."""

    def __init__(self, left: Sequence[Remaining], say: Say) -> None:
        self._say, self._done, self._said = say, 0, time.monotonic()
        self._total = sum(len(assignment.tasks) for each in left for assignment in each.batches)

    def count(self, result: Result) -> None:
        self._done += len(result.episodes)
        if time.monotonic() - self._said > PROGRESS_S:
            self._said = time.monotonic()
            self._say(f"{self._done} of {self._total} episodes (theta_{result.eval_id.version})")


def refuse_another_evaluation(first: journal.AnyRecord, config: Config, path: Path) -> None:
    """Refuse to resume a journal that began with another configuration. Errors: ConfigError."""
    assert isinstance(first, journal.Started), "a journal begins with Started"
    harmful, _ = compare(from_record(first.config_json), config)
    if harmful:
        raise ConfigError(f"{path} is a different evaluation: {'; '.join(map(str, harmful))}; choose another --name")


# --- evaluations of a run -----------------------------------------------------------------------------------------


def _refuse_changed_tasks(paths: RunPaths, config: Config) -> None:
    """Refuse the run's own tasks if they have changed since the run began. Errors: ConfigError; StoreError."""
    own, now = read_tasks(paths.tasks), eval_tasks(config)
    if own is None or (own.env, own.options) != (now.env, now.options):
        return
    for number, (before, after) in enumerate(zip(own.tasks, now.tasks, strict=False)):
        if before != after:
            raise ConfigError(
                f"task {number} of {config.task.env} was {before.id!r} when the run began and is {after.id!r} now, or "
                f"its facts have changed ({paths.tasks}): restore the task's data, because otherwise the evaluations "
                "of this run would not be comparable"
            )


def _fresh_name(config: Config, request: EvalRequest) -> str:
    what = request.task.stem if request.task else config.task.env
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return f"{re.sub('[^A-Za-z0-9_-]+', '-', what).strip('-_')}-{began}-{os.getpid()}"


async def _evaluate(recorded: Recorded, left: Sequence[Remaining], write: Write, keep: Keep, say: Say) -> None:
    async with Solo.start(recorded, keep) as solo:
        await play(solo, recorded.config, left, write, say, Clock())
