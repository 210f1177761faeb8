"""What is true of a run: a fold over its journal records.

Invariant: the head changes this state only by appending a record and applying it, so a head that restarts and
reads the same records holds the same state. No clock, no I/O.
"""

import heapq
from dataclasses import dataclass, field
from typing import Literal

from hpc_es.es.records import Assignment, Commit, EvalId, Result
from hpc_es.store import records as journal

EntryState = Literal["queued", "leased", "reported", "counted", "void"]


@dataclass
class Entry:
    """One planned evaluation and how far it has come."""

    assignment: Assignment
    state: EntryState = "queued"
    worker: str | None = None
    """Who holds the lease, or who reported."""
    leased_at: float = 0.0
    attempts: int = 0
    result: Result | None = None
    """Dropped once counted: the commit has what matters."""


@dataclass
class Ledger:
    """Entries by id; commits and digests by version. `version` is the newest policy version."""

    version: int = 0
    commits: dict[int, Commit] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    entries: dict[EvalId, Entry] = field(default_factory=dict)
    checkpoint: int = 0
    """The newest checkpoint; the base model is checkpoint 0."""
    planned: int = -1
    """The newest version for which evaluations have been planned."""
    failures_in_a_row: int = 0
    nulls_in_a_row: int = 0
    fitness: float | None = None
    """Mean fitness of the last cohort."""
    eval_fitness: dict[int, float] = field(default_factory=dict)
    """Mean reward on the evaluation tasks, by version, once all batches are in."""
    finished: bool = False
    num_queued: int = 0
    num_leased: int = 0
    _queue: list[tuple[bool, EvalId]] = field(default_factory=list)
    _reported: dict[int, set[EvalId]] = field(default_factory=dict)
    """Training results that wait for their update."""
    _evals: dict[int, set[EvalId]] = field(default_factory=dict)
    """Unfinished evaluations of the centre, by version."""

    # --- questions -----------------------------------------------------------------------------------------

    def next_queued(self) -> Entry | None:
        """The evaluation to dispatch next: training before evaluation, oldest version first, then by slot."""
        while self._queue:
            entry = self.entries[self._queue[0][1]]
            if entry.state == "queued":
                return entry
            heapq.heappop(self._queue)
        return None

    def reported_for(self, update: int) -> list[Entry]:
        """Results that wait for `update`, sorted by (dispatch version, slot)."""
        return [self.entries[eval_id] for eval_id in sorted(self._reported.get(update, ()))]

    def reported_at(self, version: int) -> list[Entry]:
        """Results measured at `version` that nothing has counted yet."""
        waiting = set[EvalId]().union(*self._reported.values(), self._evals.get(version, ()))
        entries = [self.entries[eval_id] for eval_id in sorted(waiting) if eval_id.version == version]
        return [entry for entry in entries if entry.state == "reported"]

    def evals_open(self) -> bool:
        return any(self._evals.values())

    # --- the fold ------------------------------------------------------------------------------------------

    def apply(self, record: journal.Record) -> None:
        match record:
            case journal.Started(base_digest=digest):
                self.digests[0] = digest
                self.failures_in_a_row = 0
                for entry in [entry for entry in self.entries.values() if entry.state == "leased"]:
                    self._release(entry)
            case journal.Planned(version=version, assignments=assignments):
                self.planned = max(self.planned, version)
                for assignment in assignments:
                    self._plan(assignment)
            case journal.Leased(eval_id=eval_id, worker=worker, attempt=attempt, time=time):
                entry = self.entries[eval_id]
                self._move(entry, "leased")
                entry.worker, entry.attempts, entry.leased_at = worker, attempt, time
            case journal.Unleased(eval_id=eval_id):
                self._release(self.entries[eval_id])
            case journal.Reported(worker=worker, result=result):
                self._report(self.entries[result.eval_id], worker, result)
            case journal.Voided(eval_id=eval_id):
                self._void(self.entries[eval_id])
            case journal.Committed(commit=commit):
                self._commit(commit)
            case journal.Digested(version=version, digest=digest):
                self.digests[version] = digest
                self._finish_eval(version)
            case journal.Checkpointed(version=version):
                self.checkpoint = max(self.checkpoint, version)
            case journal.Stopped(finished=finished):
                self.finished = finished

    def _plan(self, assignment: Assignment) -> None:
        entry = Entry(assignment)
        self.entries[assignment.eval_id] = entry
        self.num_queued += 1
        self._enqueue(entry)
        if assignment.kind == "eval":
            self._evals.setdefault(assignment.version, set()).add(assignment.eval_id)

    def _enqueue(self, entry: Entry) -> None:
        assignment = entry.assignment
        heapq.heappush(self._queue, (assignment.kind == "eval", assignment.eval_id))

    def _move(self, entry: Entry, state: EntryState) -> None:
        self.num_queued += (state == "queued") - (entry.state == "queued")
        self.num_leased += (state == "leased") - (entry.state == "leased")
        entry.state = state

    def _release(self, entry: Entry) -> None:
        self._move(entry, "queued")
        entry.worker = None
        self._enqueue(entry)

    def _report(self, entry: Entry, worker: str, result: Result) -> None:
        self._move(entry, "reported")
        entry.worker = worker
        if result.error is not None:
            self.failures_in_a_row += 1
            return
        entry.result = result
        self.failures_in_a_row = 0
        assignment = entry.assignment
        if assignment.kind == "train":
            self._reported.setdefault(assignment.update, set()).add(assignment.eval_id)
        else:
            self._finish_eval(assignment.version)

    def _finish_eval(self, version: int) -> None:
        """Close an evaluation of theta_version once every batch is in, from the parameters that the head has."""
        entries = [self.entries[eval_id] for eval_id in sorted(self._evals.get(version, ()))]
        results = [entry.result for entry in entries if entry.result is not None]
        if not entries or len(results) < len(entries):
            return
        if any(result.digest != self.digests.get(version) for result in results):
            return
        rewards = [episode.reward for result in results for episode in result.episodes]
        self.eval_fitness[version] = sum(rewards) / len(rewards)
        for entry in entries:
            self._move(entry, "counted")
            entry.result = None
        del self._evals[version]

    def _void(self, entry: Entry) -> None:
        self._move(entry, "void")
        entry.result = None
        self._reported.get(entry.assignment.update, set()).discard(entry.assignment.eval_id)
        self._evals.get(entry.assignment.version, set()).discard(entry.assignment.eval_id)

    def _commit(self, commit: Commit) -> None:
        self.version = commit.version
        self.commits[commit.version] = commit
        self.nulls_in_a_row = self.nulls_in_a_row + 1 if commit.null else 0
        self.fitness = sum(member.fitness for member in commit.members) / len(commit.members)
        for member in commit.members:
            entry = self.entries[member.eval_id]
            self._move(entry, "counted")
            entry.result = None
            self._reported[entry.assignment.update].discard(member.eval_id)
