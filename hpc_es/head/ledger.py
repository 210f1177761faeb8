"""The head's view of a run's history: queues and counts, for everything that the head has to decide.

Invariant: the head changes this state only by appending a record and applying it, so a head that restarts and
reads the same records holds the same state. Every question costs little, however many evaluations there are: counts
are kept, not computed.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from hpc_es.errors import StoreError
from hpc_es.records import Assignment, Commit, EvalId, Purpose, Result
from hpc_es.store import records as journal
from hpc_es.store.history import ENDED, Evaluation, History, State, place_in_line, why_void


@dataclass
class Ledger(History):
    """The history of a run, with queues and counts. Results are dropped once they have counted."""

    num_slots: int = 0
    """Number of members planned at `planned`, without replacements."""
    failures_in_a_row: int = 0
    nulls_in_a_row: int = 0
    fitness: float | None = None
    """Mean fitness of the last cohort."""
    live: Counter[int] = field(default_factory=Counter)
    """Members that are planned or leased, by dispatch version."""
    waiting: Counter[int] = field(default_factory=Counter)
    """Members that are reported or closed and not yet accepted, by dispatch version."""
    num_due: int = 0
    """How many good results of members wait for the next update, or were planned for an earlier one."""
    groups: dict[tuple[int, int], set[EvalId]] = field(default_factory=dict)
    """Members with good results that wait, by (the update that they were planned for, dispatch version)."""
    _num_planned: Counter[Purpose] = field(default_factory=Counter)
    """Evaluations that no worker has, by purpose."""
    _queues: dict[Purpose, list[tuple[tuple[int, int, int], EvalId]]] = field(
        default_factory=lambda: {purpose: [] for purpose in get_args(Purpose)}, compare=False
    )
    """Heaps of (place in line, evaluation); evaluations that are no longer planned are skipped when they come up."""

    # --- questions -----------------------------------------------------------------------------------------

    def next_queued(self, purposes: Iterable[Purpose]) -> Evaluation | None:
        """The evaluation to dispatch next: by purpose, in this order; oldest version first, then by slot."""
        for purpose in purposes:
            queue = self._queues[purpose]
            while queue:
                evaluation = self.evaluations[queue[0][1]]
                if evaluation.state == "planned":
                    return evaluation
                heapq.heappop(queue)
        return None

    def num_queued(self, purposes: Iterable[Purpose]) -> int:
        return sum(self._num_planned[purpose] for purpose in purposes)

    def queued_members(self) -> list[Evaluation]:
        """Members that no worker holds."""
        ids = sorted({eval_id for _, eval_id in self._queues["train"]}) if self._num_planned["train"] else []
        return [evaluation for eval_id in ids if (evaluation := self.evaluations[eval_id]).state == "planned"]

    def due(self) -> Counter[int]:
        """Members that wait for the next update or were planned for an earlier one: counts by dispatch version."""
        counts = Counter[int]()
        for (meant_for, version), ids in self.groups.items():
            if meant_for <= self.version + 1:
                counts[version] += len(ids)
        return counts

    def waiting_in(self, groups: Iterable[tuple[int, int]]) -> list[Evaluation]:
        """Waiting members of these groups, sorted by (dispatch version, slot)."""
        return [
            self.evaluations[eval_id] for eval_id in sorted(name for group in groups for name in self.groups[group])
        ]

    def reported_at(self, version: int) -> list[Evaluation]:
        """Results measured at `version` that have not been counted yet."""
        members = (ids for (_, measured_at), ids in self.groups.items() if measured_at == version)
        waiting = set[EvalId]().union(*members, self._open.get(version, ()))
        evaluations = [self.evaluations[eval_id] for eval_id in sorted(waiting)]
        return [evaluation for evaluation in evaluations if evaluation.state == "reported"]

    def closed_cohort(self) -> list[Evaluation]:
        """The cohort that the trainer digests, in order."""
        return [self.evaluations[eval_id] for eval_id in self.closed]

    def evals_open(self) -> bool:
        return any(self._open.values())

    def contradictions(self) -> list[tuple[Evaluation, str]]:
        """Waiting results that are impossible for their assignments, with the reason.

        Heads of the first release recorded everything that a worker reported.
        """
        return [(evaluation, why) for evaluation in self.evaluations.values() if (why := why_void(evaluation))]

    def validate(self) -> None:
        """Compare queues and counts with the evaluations. Costs time; for tests, after each event.

        Errors: StoreError that names what differs.
        """
        live, waiting, queued = Counter[int](), Counter[int](), Counter[Purpose]()
        groups: dict[tuple[int, int], set[EvalId]] = {}
        for eval_id, evaluation in self.evaluations.items():
            purpose, version = evaluation.assignment.purpose, evaluation.assignment.version
            queued[purpose] += evaluation.state == "planned"
            if purpose != "train":
                continue
            live[version] += evaluation.state in ("planned", "leased")
            waiting[version] += evaluation.state in ("reported", "closed")
            if evaluation.state == "reported" and evaluation.result is not None:
                groups.setdefault((evaluation.assignment.update, version), set()).add(eval_id)
            if evaluation.state in ENDED and evaluation.result is not None:
                raise StoreError(f"evaluation {eval_id} is {evaluation.state}, but its result is still kept")
        num_due = sum(len(ids) for (update, _), ids in groups.items() if update <= self.version + 1)
        for name, found, right in (
            ("live", self.live, +live),  # + drops the zeros
            ("waiting", self.waiting, +waiting),
            ("planned", +self._num_planned, +queued),
            ("groups", self.groups, groups),
            ("num_due", self.num_due, num_due),
        ):
            if found != right:
                raise StoreError(f"the ledger's {name} is {found}, but its evaluations say {right}")
        for purpose, queue in self._queues.items():
            in_line = {eval_id for _, eval_id in queue}
            for eval_id, evaluation in self.evaluations.items():
                if evaluation.state == "planned" and eval_id.purpose == purpose and eval_id not in in_line:
                    raise StoreError(f"evaluation {eval_id} is planned, but in no queue")

    # --- the fold ------------------------------------------------------------------------------------------

    def apply(self, record: journal.Record) -> None:
        """Apply one record. Errors: StoreError when it contradicts an earlier one."""
        if isinstance(record, journal.Planned) and record.version > self.planned:
            self.num_slots = 0
        if isinstance(record, journal.Started):
            self.failures_in_a_row = 0
        super().apply(record)

    def _plan(self, assignment: Assignment) -> None:
        super()._plan(assignment)
        evaluation = self.evaluations[assignment.eval_id]
        self._count(evaluation, +1)
        self._enqueue(evaluation)
        if assignment.purpose == "train" and assignment.version == self.planned:
            self.num_slots = max(self.num_slots, assignment.eval_id.slot + 1)

    def _move(self, evaluation: Evaluation, state: State) -> None:
        self._count(evaluation, -1)
        super()._move(evaluation, state)
        if state in ENDED:
            evaluation.result = None
        self._count(evaluation, +1)
        if state == "planned":
            self._enqueue(evaluation)

    def _enqueue(self, evaluation: Evaluation) -> None:
        eval_id = evaluation.assignment.eval_id
        heapq.heappush(self._queues[eval_id.purpose], (place_in_line(eval_id), eval_id))  # type: ignore[index]

    def _count(self, evaluation: Evaluation, change: int) -> None:
        """Add an evaluation to the counts of its state, or take it away from them."""
        assignment, state = evaluation.assignment, evaluation.state
        if state == "planned":
            self._num_planned[assignment.purpose] += change
        if assignment.purpose != "train":
            return
        if state in ("planned", "leased"):
            self._change(self.live, assignment.version, change)
        elif state in ("reported", "closed"):
            self._change(self.waiting, assignment.version, change)
        if state == "reported" and evaluation.result is not None:
            self._group(assignment, change)

    def _group(self, assignment: Assignment, change: int) -> None:
        """Add a waiting member to its group, or take it away."""
        key = assignment.update, assignment.version
        members = self.groups.setdefault(key, set())
        members.symmetric_difference_update({assignment.eval_id})
        if not members:
            del self.groups[key]
        if assignment.update <= self.version + 1:
            self.num_due += change

    @staticmethod
    def _change(counts: Counter[int], version: int, change: int) -> None:
        counts[version] += change
        if not counts[version]:
            del counts[version]

    def _kept(self, result: Result) -> Result | None:
        return result if result.error is None else None

    def _report(self, evaluation: Evaluation, worker: str, result: Result) -> None:
        super()._report(evaluation, worker, result)
        self.failures_in_a_row = 0 if result.error is None else self.failures_in_a_row + 1

    def _advance(self, commit: Commit) -> None:
        super()._advance(commit)
        self.nulls_in_a_row = self.nulls_in_a_row + 1 if commit.null else 0
        self.fitness = sum(each.fitness for each in commit.consumed) / len(commit.consumed) if commit.consumed else None
        self.num_due += sum(len(ids) for (update, _), ids in self.groups.items() if update == commit.version + 1)
