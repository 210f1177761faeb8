"""Rebuild theta from the base model and the journal, and check everything that the run claims about itself.

Invariant: nothing is believed that can be computed again. Digests come from a theta rebuilt here, fitness from the
recorded episodes, utilities and coefficients from the fitness, members from the run seed. What does not fit becomes a
problem in the report.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpc_es import methods
from hpc_es.config.load import from_record, load, refuse_another, refuse_evaluation_of_another
from hpc_es.config.schema import Config
from hpc_es.envs.manifest import read_tasks
from hpc_es.errors import ConfigError, StoreError, VerifyError
from hpc_es.methods.base import Cohort, Method
from hpc_es.params import Arena, checkpoint
from hpc_es.params.rebuild import bring_to
from hpc_es.paths import RunPaths
from hpc_es.records import Commit, EvalId, Result, Weights
from hpc_es.staleness import Composed
from hpc_es.store import records as journal
from hpc_es.store.frames import END_MARK_BYTES
from hpc_es.store.hdf5_tables import hdf5_end, why_damaged
from hpc_es.store.history import History, why_void
from hpc_es.store.journal import read_journal, warn_python
from hpc_es.store.later import read_later

COMMITS_PER_PASS = 32
"""Versions applied in one pass over theta; every one of them gets its digest."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class VersionLine:
    """Digests and checks of theta_version."""

    version: int
    digest: int
    """Digest of theta as rebuilt here."""
    recorded: int | None
    """What the run recorded; None when it ended before that."""
    update_norm: float
    num_members: int
    fitness: float | None
    """Mean of the cohort whose update made this version; None for theta_0."""
    null: bool = False
    proven: bool = True
    """Whether theta was rebuilt here; False where a trainer made it."""

    @property
    def ok(self) -> bool:
        return self.recorded is None or self.digest == self.recorded


@dataclass(frozen=True)
class VerifyReport:
    versions: list[VersionLine]
    num_results: int
    """Evaluations that were reported."""
    num_counted: int
    """Evaluations that an update consumed."""
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


class AuditedHistory(History):
    """The history of a run with everything that contradicts itself in it."""

    def __init__(self, records: Iterable[journal.AnyRecord]) -> None:
        """Errors: VerifyError when there are no records, or when the first is not the start of a head."""
        super().__init__()
        self.problems: list[str] = []
        for record in records:
            if not self.config_json and not isinstance(record, journal.Started):
                raise VerifyError("the journal does not begin with the start of a head")
            try:
                self.apply(record)
            except StoreError as error:
                self.problems.append(str(error))
        if not self.config_json:
            raise VerifyError("there are no records")

    @cached_property
    def config(self) -> Config:
        """The configuration that the run began with."""
        return from_record(self.config_json)

    @cached_property
    def method(self) -> Method:
        return methods.make(self.config)

    @property
    def results(self) -> dict[EvalId, Result]:
        """Every result that was reported."""
        return {eval_id: each.result for eval_id, each in self.evaluations.items() if each.result is not None}


def verify(run: Path, *, model: Path | None = None, say: Say = lambda text: None) -> VerifyReport:
    """Check a run folder from its base model on. `model` names the base where it has moved.

    Errors: StoreError or JournalDamaged when the journal cannot be read, ModelError when the base cannot.
    """
    written = RunPaths(run).written_checkpoints()  # before the journal: a run that goes on may write newer ones
    history = _read(run)
    arena = load_base(history, model)
    report = check(history, arena, say=say)
    report.problems.extend(_check_config(RunPaths(run), history))
    report.problems.extend(_check_tasks(RunPaths(run)))
    report.problems.extend(_check_tables(RunPaths(run), history))
    report.problems.extend(_check_later_evals(RunPaths(run), history, report.versions))
    if arena.base_digest == history.base_digest:
        report.problems.extend(_check_checkpoints(history, arena, written))
    return report


def replay(run: Path, version: int | None = None, *, model: Path | None = None) -> Arena:
    """theta_version (default: the last) from the nearest checkpoint, or the base, and the journal.

    Errors: as verify; ConfigError when the run has no such version; VerifyError when theta has another digest than the
    run had.
    """
    history = _read(run)
    last = history.version
    version = last if version is None else version
    if not 0 <= version <= last:
        raise ConfigError(f"{run} has no version {version}; it has 0 to {last}")
    arena = load_base(history, model)
    if arena.base_digest != history.base_digest:
        raise VerifyError(_wrong_base(arena.base_digest, history.base_digest))
    bring_to(version, arena, RunPaths(run), history.commits, history.digests)
    return arena


def _read(run: Path) -> AuditedHistory:
    """The history of a run folder. Errors: as verify; VerifyError with what is there when nothing was recorded."""
    records = read_journal(run)
    first = next(records, None)
    if first is not None:
        return AuditedHistory(itertools.chain([first], records))
    segments = [f"{path.name} ({path.stat().st_size} bytes)" for _, path in RunPaths(run).segments()]
    what = f"no valid record in {', '.join(segments)}" if segments else "no journal"
    raise VerifyError(f"{run} has {what}: nothing has run here, or its journal is lost")


def load_base(history: AuditedHistory, model: Path | None = None) -> Arena:
    """theta_0 of the run's base model."""
    settings, optimiser = history.config.model, history.config.es.optimiser.kind
    return Arena.from_pretrained(model or settings.path, settings.include, settings.exclude, optimiser=optimiser)


def check(history: AuditedHistory, arena: Arena, *, say: Say = lambda text: None) -> VerifyReport:
    """Check a history against an arena that holds theta_0; the arena ends at the last version."""
    problems = list(history.problems)
    if arena.base_digest != history.base_digest:
        problems.append(_wrong_base(arena.base_digest, history.base_digest))
    counted: dict[EvalId, int] = {}
    for expected, commit in enumerate(history.commits.values(), start=1):
        if commit.version != expected:
            problems.append(f"update {expected} is missing: the journal continues with {commit.version}")
            return VerifyReport([], len(history.results), len(counted), problems)
        problems += _check_members(history, commit, counted)
        problems += _check_lags(history, commit)
        problems += _check_scalars(history, commit)
    versions = _rebuild(history, arena, say)
    problems += [
        f"theta_{line.version}: digest {line.digest:016x}, the run recorded {line.recorded:016x}"
        for line in versions
        if not line.ok
    ]
    problems += _check_results(history, {line.version: line.digest for line in versions})
    return VerifyReport(versions, len(history.results), len(counted), problems)


def _check_members(history: AuditedHistory, commit: Commit, counted: dict[EvalId, int]) -> list[str]:
    """Each member is an evaluation that was planned, reported, not void, not counted before, and the same member."""
    problems = []
    order = [(each.eval_id.version, each.eval_id.slot) for each in commit.consumed]
    if order != sorted(order):
        problems.append(f"update {commit.version}: members are not sorted by (dispatch version, slot)")
    for each in commit.consumed:
        where = f"update {commit.version}, evaluation {each.eval_id}"
        if each.eval_id in counted:
            problems.append(f"{where}: already counted in update {counted[each.eval_id]}")
        counted[each.eval_id] = commit.version
        evaluation = history.evaluations.get(each.eval_id)
        if evaluation is None or evaluation.assignment.purpose != "train":
            problems.append(f"{where}: never planned as a candidate")
            continue
        if evaluation.state in ("void", "discarded"):
            problems.append(f"{where}: {evaluation.state}")
        result = evaluation.result
        if result is None or result.error is not None:
            problems.append(f"{where}: no result was reported")
        elif result.fitness != each.fitness:
            problems.append(f"{where}: fitness {each.fitness}, but {result.fitness} was reported")
        problems += [f"{where}: {text}" for text in history.method.faults_in_assignment(evaluation.assignment)]
    return problems


def _check_lags(history: AuditedHistory, commit: Commit) -> list[str]:
    """The cohort is full, within the bound on lag, and of the composition that the schedule states."""
    where, method, schedule = f"update {commit.version}", history.method, history.method.schedule()
    if len(commit.consumed) != method.cohort_size:
        return [f"{where}: {len(commit.consumed)} members, {method.cohort_key} is {method.cohort_size}"]
    lags = Counter(commit.lags)
    if isinstance(schedule, Composed):
        stated = schedule.composition(commit.version)
        return (
            []
            if lags == stated
            else [f"{where}: members by lag {dict(sorted(lags.items()))}, the schedule states {stated}"]
        )
    return [
        f"{where}: {count} members of lag {behind}, staleness.max_lag is {schedule.max_lag}"
        for behind, count in sorted(lags.items())
        if not 0 <= behind <= schedule.max_lag
    ]


def _check_scalars(history: AuditedHistory, commit: Commit) -> list[str]:
    """The body, and whatever else an update consists of, from the recorded results."""
    where, cohort = f"update {commit.version}", cohort_of(history, commit)
    if len(cohort) < len(commit.consumed):
        return []  # the missing ones are reported already
    try:
        faults = history.method.faults_in_commit(commit, cohort, history.centres)
    except VerifyError as error:
        return [f"{where}: {error}"]
    return [f"{where}, {fault}" for fault in faults]


def cohort_of(history: AuditedHistory, commit: Commit) -> Cohort:
    """The consumed evaluations of a commit that the journal has, with their results."""
    found = [history.evaluations.get(each.eval_id) for each in commit.consumed]
    return [(each.assignment, each.result) for each in found if each is not None and each.result is not None]


def _rebuild(history: AuditedHistory, arena: Arena, say: Say) -> list[VersionLine]:
    all_commits = list(history.commits.values())
    if any(isinstance(commit.body, Weights) for commit in all_commits):
        return _claimed(history, arena)
    versions = [VersionLine(0, arena.digest(), history.digests.get(0, history.base_digest), 0.0, 0, None)]
    for begin in range(0, len(all_commits), COMMITS_PER_PASS):
        commits = all_commits[begin : begin + COMMITS_PER_PASS]
        report = arena.apply(commits)
        for commit, digest, norm in zip(commits, report.digests, report.update_norms, strict=True):
            count = len(commit.consumed)
            fitness = sum(each.fitness for each in commit.consumed) / count if count else None
            recorded = history.digests.get(commit.version)
            versions.append(VersionLine(commit.version, digest, recorded, norm, count, fitness, commit.null))
        say(f"rebuilt theta_{arena.version} of {len(all_commits)}")
    return versions


def _claimed(history: AuditedHistory, arena: Arena) -> list[VersionLine]:
    """The versions of a run whose commits are a trainer's weights: they cannot be computed again. What can be proven of
    them is proven elsewhere: the digests of the checkpoints that were kept, and the schedule."""
    lines = [VersionLine(0, arena.digest(), history.digests.get(0, history.base_digest), 0.0, 0, None)]
    for commit in history.commits.values():
        digest, count = history.digests[commit.version], len(commit.consumed)
        norm = commit.body.update_norm if isinstance(commit.body, Weights) else 0.0
        fitness = sum(each.fitness for each in commit.consumed) / count
        lines.append(VersionLine(commit.version, digest, digest, norm, count, fitness, commit.null, proven=False))
    return lines


def _check_results(history: AuditedHistory, digests: dict[int, int]) -> list[str]:
    """Every result that was not voided can have come of its assignment, and was measured around the theta that its
    version names."""
    problems = []
    for eval_id, evaluation in history.evaluations.items():
        result = evaluation.result
        if result is None or result.error is not None or evaluation.state == "void":
            continue
        if (why := why_void(evaluation)) is not None:
            problems.append(f"evaluation {eval_id}: its result does not fit together: {why}")
        digest = digests.get(eval_id.version, result.digest)
        if digest != result.digest:
            problems.append(_wrong_digest(result, digest))
    return problems


def _check_checkpoints(history: AuditedHistory, arena: Arena, written: list[tuple[int, Path]]) -> list[str]:
    """Every checkpoint is intact, and of a version that the journal has. The arena ends at any version."""
    problems = []
    for _, folder in written:
        try:
            checkpoint.refuse_another(folder, history.digests)
            arena.reload(folder)
        except StoreError as error:
            if folder.exists():  # a run that goes on removes old ones
                problems.append(str(error))
    return problems


def _check_config(paths: RunPaths, history: AuditedHistory) -> list[str]:
    """The journal is that of this run folder: config.yaml, where there is one, computes the same."""
    if not paths.config.exists():
        return []
    try:
        refuse_another(history.config_json, load(paths.config).config, paths.config)
    except ConfigError as error:
        return [str(error)]
    return []


def _check_tasks(paths: RunPaths) -> list[str]:
    """What is written of the evaluation tasks, of the run and of later evaluations, is what was written."""
    problems = []
    for path in (paths.tasks, *(paths.later_eval_tasks(later.stem) for later in paths.later_evals())):
        try:
            read_tasks(path)
        except StoreError as error:
            problems.append(str(error))
    return problems


def _check_tables(paths: RunPaths, history: AuditedHistory) -> list[str]:
    """run.h5, where there is one, holds what was written, and is of this run."""
    if not os.path.lexists(paths.hdf5):
        return []
    remedy = f"remove it, and `hpc-es run {paths.root}` builds it from the journal"
    if (damage := why_damaged(paths.hdf5)) is not None:
        return [f"{damage}; {remedy}"]
    end = hdf5_end(paths.hdf5)
    if end is None:
        warn_python(f"{paths.hdf5} was left in the middle of a write, so nothing in it was checked; {remedy}")
    elif end.run_id not in history.run_ids:
        return [f"{paths.hdf5} is of another run, {end.run_id!r}; {remedy}"]
    return []


def _check_later_evals(paths: RunPaths, history: AuditedHistory, versions: list[VersionLine]) -> list[str]:
    """Every evaluation that was made afterwards is of this run, and saw the theta that its version names."""
    digests = {line.version: line.digest for line in versions}
    merged = end.later_evals if (end := hdf5_end(paths.hdf5)) else {}
    problems = []
    for path in paths.later_evals():
        if path.stat().st_size < merged.get(path.stem, 0) - END_MARK_BYTES:
            problems.append(f"{path} had {merged[path.stem]} bytes when {paths.hdf5} was written: its end is lost")
        try:
            for record in read_later(path):
                if isinstance(record, journal.Started):
                    if record.base_digest != history.base_digest:
                        problems.append(f"{path}: {_wrong_base(record.base_digest, history.base_digest)}")
                    refuse_evaluation_of_another(history.config_json, record.config_json)
                if isinstance(record, journal.Reported) and record.result.error is None:
                    result = record.result
                    expected = digests.get(result.eval_id.version)
                    if expected is None:
                        problems.append(f"{path}: the run has no version {result.eval_id.version}")
                    elif expected != result.digest:
                        problems.append(f"{path}: {_wrong_digest(result, expected)}")
        except (ConfigError, StoreError) as error:
            problems.append(f"{path}: {error}")
    return problems


def _wrong_digest(result: Result, digest: int) -> str:
    version = result.eval_id.version
    return f"evaluation {result.eval_id} saw digest {result.digest:016x}, theta_{version} has {digest:016x}"


def _wrong_base(found: int, recorded: int) -> str:
    return f"the base model has digest {found:016x}, the run began on {recorded:016x}; use the model it began with"
