"""State of a run: the fold of its journal.

The head's ledger, verify, replay, evaluations and forks of a finished run are views of it; only the rows of run.h5 are
written by a fold of their own (projection.py), with the same words. No clock, no I/O beyond `History.read`. `apply`
raises at a record that contradicts an earlier one. A reader that only looks for faults may note the error and go on
with the next record.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpc_es.errors import StoreError
from hpc_es.records import Assignment, Commit, Context, EvalId, PoolChange, Result, Weights
from hpc_es.results import why_unbelievable
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal

State = Literal["planned", "leased", "reported", "closed", "accepted", "void", "discarded"]
"""State of an evaluation, in run.h5, too.

planned: no worker has it. leased: a worker has it. reported: its result waits. closed: handed to the trainer with its
cohort, and not committed yet (run.h5 has it as reported). accepted: consumed by an update, or complete, for an
evaluation that no update consumes. void: a fault, which never counts. discarded: a good result beyond the bound on
lag."""

ENDED: tuple[State, ...] = ("accepted", "void", "discarded")


@dataclass(slots=True)
class Evaluation:
    """One planned evaluation and its state."""

    assignment: Assignment
    state: State = "planned"
    worker: str | None = None
    """The worker that holds the lease, or that reported."""
    leased_at: float = 0.0
    attempts: int = 0
    result: Result | None = None
    """The last result that was reported, also one with an error."""


def why_void(evaluation: Evaluation) -> str | None:
    """Why the result must not count; None without a result, or for a possible one."""
    return None if evaluation.result is None else why_unbelievable(evaluation.assignment, evaluation.result)


@dataclass
class History:
    """What the records applied so far say. `version` is the newest policy version."""

    version: int = 0
    config_json: str = ""
    """The configuration that the run began with."""
    run_ids: set[str] = field(default_factory=set)
    """More than one if the run was renamed."""
    began: float = math.inf
    """Time when the first head began."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """Commit by the version that it makes."""
    digests: dict[int, int] = field(default_factory=dict)
    """Digest of theta by version, as recorded."""
    evaluations: dict[EvalId, Evaluation] = field(default_factory=dict)
    checkpoint: int = 0
    """Version of the newest checkpoint; the base model is checkpoint 0."""
    planned: int = -1
    """The newest version for which evaluations have been planned."""
    centres: dict[int, float] = field(default_factory=dict)
    """Fitness of the unperturbed centre on the members' batch, by version."""
    eval_fitness: dict[int, float] = field(default_factory=dict)
    """Mean reward on the evaluation tasks by version, once all batches are complete."""
    closed: tuple[EvalId, ...] = ()
    """The cohort that the trainer digests, in order; empty if there is none."""
    contexts: dict[str, Context] = field(default_factory=dict)
    """Every context that was ever proposed, by id."""
    proposed: list[Context] = field(default_factory=list)
    """Contexts proposed since the last commit."""
    pool: dict[str, Context] = field(default_factory=dict)
    """Contexts in use, by id."""
    dismissed: set[str] = field(default_factory=set)
    """Workers that were dismissed and have not left yet."""
    finished: bool = False
    _open: dict[int, set[EvalId]] = field(default_factory=dict)
    """Evaluations by version that no update consumes and that have not ended: of the centre, on evaluation tasks,
    proposals."""

    @classmethod
    def read(cls, folder: Path) -> "History":
        """The history of a run folder. Errors: StoreError for damage, contradictions, or a folder without records."""
        history = cls()
        for record in read_journal(folder):
            history.apply(record)
        if 0 not in history.digests:
            raise StoreError(f"{folder} has no journal: it is not the folder of a run that has begun")
        return history

    @property
    def base_digest(self) -> int:
        """Digest of theta_0."""
        return self.digests[0]

    def apply(self, record: journal.Record) -> None:
        """Apply one record. Errors: StoreError when it contradicts an earlier one."""
        match record:
            case journal.Started():
                self._start(record)
            case journal.Planned(version=version, assignments=assignments):
                self.planned = max(self.planned, version)
                for assignment in assignments:
                    self._plan(assignment)
            case journal.Dismissed(worker=worker):
                self.dismissed.add(worker)
            case journal.Left(worker=worker):
                self.dismissed.discard(worker)
            case journal.Leased(eval_id=eval_id, worker=worker, attempt=attempt, time=time):
                evaluation = self._evaluation(eval_id)
                self._move(evaluation, "leased")
                evaluation.worker, evaluation.attempts, evaluation.leased_at = worker, attempt, time
            case journal.Unleased(eval_id=eval_id):
                self._release(self._evaluation(eval_id))
            case journal.Reported(worker=worker, result=result):
                self._report(self._evaluation(result.eval_id), worker, result)
            case journal.Voided(eval_id=eval_id):
                self._move(self._evaluation(eval_id), "void")
            case journal.Discarded(eval_id=eval_id):
                self._move(self._evaluation(eval_id), "discarded")
            case journal.Closed(update=update, evaluations=evaluations):
                self._close(update, evaluations)
            case journal.Proposed(context=context):
                self._propose(context)
            case journal.Committed(commit=commit):
                self._commit(commit)
            case journal.Digested(version=version, digest=digest):
                if version > self.version:
                    raise StoreError(f"the journal has a digest of theta_{version}, but no commit that made it")
                self._set_digest(version, digest)
                self._finish_centres(version)
            case journal.Checkpointed(version=version):
                self.checkpoint = max(self.checkpoint, version)
            case journal.Stopped(finished=finished):
                self.finished = finished

    def _evaluation(self, eval_id: EvalId) -> Evaluation:
        try:
            return self.evaluations[eval_id]
        except KeyError:
            raise StoreError(f"the journal speaks of evaluation {eval_id}, which was never planned") from None

    def _start(self, record: journal.Started) -> None:
        self.config_json = self.config_json or record.config_json
        self.run_ids.add(record.run_id)
        self.began = min(self.began, record.time)
        for evaluation in [each for each in self.evaluations.values() if each.state == "leased"]:
            self._release(evaluation)
        if self.digests.setdefault(0, record.base_digest) != record.base_digest:
            raise StoreError(
                f"generation {record.generation} began on another base model: theta_0 has digest "
                f"{record.base_digest:016x}, and {self.base_digest:016x} before"
            )

    def _set_digest(self, version: int, digest: int) -> None:
        if self.digests.setdefault(version, digest) != digest:
            raise StoreError(f"theta_{version} has two digests: {self.digests[version]:016x} and {digest:016x}")

    def _plan(self, assignment: Assignment) -> None:
        if assignment.eval_id in self.evaluations:
            raise StoreError(f"evaluation {assignment.eval_id} was planned twice")
        self.evaluations[assignment.eval_id] = Evaluation(assignment)
        if assignment.purpose != "train":
            self._open.setdefault(assignment.version, set()).add(assignment.eval_id)

    def _move(self, evaluation: Evaluation, state: State) -> None:
        """Change the state of an evaluation; every change goes through here."""
        evaluation.state = state
        if state in ENDED:
            version = evaluation.assignment.version
            open_ids = self._open.get(version, set())
            open_ids.discard(evaluation.assignment.eval_id)
            if not open_ids:
                self._open.pop(version, None)

    def _release(self, evaluation: Evaluation) -> None:
        evaluation.worker = None
        self._move(evaluation, "planned")

    def _report(self, evaluation: Evaluation, worker: str, result: Result) -> None:
        if evaluation.state not in ("planned", "leased"):
            raise StoreError(f"evaluation {result.eval_id} was reported twice: it was {evaluation.state} already")
        evaluation.worker, evaluation.result = worker, self._kept(result)
        self._move(evaluation, "reported")
        if result.error is None and evaluation.assignment.purpose in ("centre", "eval"):
            self._finish_centres(evaluation.assignment.version)

    def _kept(self, result: Result) -> Result | None:
        """The part of a result that is remembered; a view that needs less overrides this."""
        return result

    def _finish_centres(self, version: int) -> None:
        """Accept the complete evaluations of the centre at a version that were measured at the recorded digest."""
        if version not in self.digests:
            return
        ids = sorted(self._open.get(version, ()), key=place_in_line)
        for purpose in ("centre", "eval"):
            group = [self.evaluations[eval_id] for eval_id in ids if eval_id.purpose == purpose]
            results = [each.result for each in group if each.result is not None and each.result.error is None]
            if not group or len(results) < len(group) or any(map(why_void, group)):
                continue
            if any(result.digest != self.digests[version] for result in results):
                continue
            if purpose == "centre":
                self.centres[version] = results[0].fitness
            else:
                rewards = [episode.reward for result in results for episode in result.episodes]
                self.eval_fitness[version] = sum(rewards) / len(rewards) if rewards else math.nan
            for evaluation in group:
                self._move(evaluation, "accepted")

    def _close(self, update: int, evaluations: tuple[EvalId, ...]) -> None:
        if update != self.version + 1 or self.closed:
            raise StoreError(f"a cohort is closed for update {update}, but the run is at version {self.version}")
        for eval_id in evaluations:
            evaluation = self._evaluation(eval_id)
            if evaluation.state != "reported":
                raise StoreError(f"update {update} closes evaluation {eval_id}, which is {evaluation.state}")
            self._move(evaluation, "closed")
        self.closed = evaluations

    def _propose(self, context: Context) -> None:
        self.proposed.append(context)
        self.contexts[context.id] = context
        if context.proposed_by is not None:
            evaluation = self._evaluation(context.proposed_by)
            if evaluation.state != "reported":
                raise StoreError(
                    f"a context was proposed by evaluation {context.proposed_by}, which is {evaluation.state}"
                )
            self._move(evaluation, "accepted")

    def _commit(self, commit: Commit) -> None:
        before, closed = self.version, self.closed
        self.commits[commit.version] = commit
        try:
            if commit.version != before + 1:
                raise StoreError(f"commit {commit.version} follows commit {before}: an update is missing")
            if not commit.consumed:
                raise StoreError(f"commit {commit.version} consumes nothing")
            if closed and closed != tuple(each.eval_id for each in commit.consumed):
                raise StoreError(f"commit {commit.version} consumes other evaluations than were closed for it")
            self._consume(commit, "closed" if closed else "reported")
        finally:  # a reader that goes on after a contradiction is at the next version all the same
            self.closed = ()
            self._advance(commit)

    def _consume(self, commit: Commit, state: State) -> None:
        for each in commit.consumed:
            evaluation = self._evaluation(each.eval_id)
            if evaluation.state != state:
                raise StoreError(
                    f"commit {commit.version} counts evaluation {each.eval_id}, which is {evaluation.state}"
                )
            self._move(evaluation, "accepted")

    def _advance(self, commit: Commit) -> None:
        """Go to the version that a commit makes."""
        self.version = commit.version
        if isinstance(commit.body, Weights):  # its checkpoint is on disk, or there would be no commit
            self._set_digest(commit.version, commit.body.digest)
            self.checkpoint = commit.version
        self._change_pool(commit.pool)

    def _change_pool(self, change: PoolChange | None) -> None:
        self.proposed = []
        if change is None:
            return
        for name in change.added:
            if name not in self.contexts:
                raise StoreError(f"a commit adds the context {name}, which nobody proposed")
            self.pool[name] = self.contexts[name]
        for name in change.removed:
            self.pool.pop(name, None)


def place_in_line(eval_id: EvalId) -> tuple[int, int, int]:
    """Oldest version first, then by slot; the last batch of evaluation tasks first, as the first release did."""
    slot = -eval_id.slot if eval_id.purpose == "eval" else eval_id.slot
    return eval_id.version, slot, eval_id.replacement
