"""State of a run: a fold over its journal records.

Invariant: the head changes this state only by appending a record and applying it, so a head that restarts and
reads the same records holds the same state. No clock, no I/O. Every question costs little, however many evaluations
there are: counts are kept, not computed.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from hpc_es.errors import StoreError
from hpc_es.records import Assignment, Commit, Context, EvalId, PoolChange, Purpose, Result, Weights
from hpc_es.results import why_unbelievable
from hpc_es.store import records as journal

EntryState = Literal["queued", "leased", "reported", "closed", "counted", "void", "discarded"]
"""closed: handed to the trainer with its cohort, and not committed yet."""


@dataclass(slots=True)
class Entry:
    """One planned evaluation and its state."""

    assignment: Assignment
    state: EntryState = "queued"
    worker: str | None = None
    """The worker that holds the lease, or that reported."""
    leased_at: float = 0.0
    attempts: int = 0
    result: Result | None = None
    """Dropped once counted: the commit has what matters."""


def why_void(entry: Entry) -> str | None:
    """Why the waiting result must not count."""
    return None if entry.result is None else why_unbelievable(entry.assignment, entry.result)


@dataclass
class Ledger:
    """Entries by id; commits and digests by version. `version` is the newest policy version."""

    version: int = 0
    began: float = math.inf
    """Time when the first head began."""
    commits: dict[int, Commit] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    entries: dict[EvalId, Entry] = field(default_factory=dict)
    checkpoint: int = 0
    """The newest checkpoint; the base model is checkpoint 0."""
    planned: int = -1
    """The newest version for which evaluations have been planned."""
    num_slots: int = 0
    """Members planned at `planned`, replacements apart."""
    failures_in_a_row: int = 0
    nulls_in_a_row: int = 0
    fitness: float | None = None
    """Mean fitness of the last cohort."""
    eval_fitness: dict[int, float] = field(default_factory=dict)
    """Mean reward on the evaluation tasks, by version, once all batches are in."""
    centres: dict[int, float] = field(default_factory=dict)
    """Fitness of the unperturbed centre on the members' batch, by version."""
    closed: tuple[EvalId, ...] = ()
    """The cohort that the trainer digests, in order; empty while there is none."""
    contexts: dict[str, Context] = field(default_factory=dict)
    """Every context that was ever proposed, by id."""
    proposed: list[Context] = field(default_factory=list)
    """Contexts proposed since the last commit."""
    finished: bool = False
    dismissed: set[str] = field(default_factory=set)
    """Workers that were dismissed and have not left yet."""
    live: Counter[int] = field(default_factory=Counter)
    """Members that are queued or leased, by dispatch version."""
    waiting: Counter[int] = field(default_factory=Counter)
    """Members that are reported or closed and not yet counted, by dispatch version."""
    num_due: int = 0
    """How many of these wait for the next update, or were planned for an earlier one."""
    groups: dict[tuple[int, int], set[EvalId]] = field(default_factory=dict)
    """The same members by (the update that they were planned for, dispatch version)."""
    pool: dict[str, Context] = field(default_factory=dict)
    """Contexts in use, by id."""
    _queued: Counter[Purpose] = field(default_factory=Counter)
    _queues: dict[Purpose, list[tuple[tuple[int, int, int], EvalId]]] = field(
        default_factory=lambda: {purpose: [] for purpose in get_args(Purpose)}, compare=False
    )
    """Heaps of (place in line, evaluation); entries that are no longer queued are skipped when they come up."""
    _other_ids: dict[int, set[EvalId]] = field(default_factory=dict)
    """Unfinished evaluations that no update consumes, by version: of the centre, on evaluation tasks, proposals."""

    # --- questions -----------------------------------------------------------------------------------------

    def next_queued(self, purposes: Iterable[Purpose]) -> Entry | None:
        """The evaluation to dispatch next: by purpose, in this order; oldest version first, then by slot."""
        for purpose in purposes:
            queue = self._queues[purpose]
            while queue:
                entry = self.entries[queue[0][1]]
                if entry.state == "queued":
                    return entry
                heapq.heappop(queue)
        return None

    def num_queued(self, purposes: Iterable[Purpose]) -> int:
        return sum(self._queued[purpose] for purpose in purposes)

    def queued_members(self) -> list[Entry]:
        """Members that no worker holds."""
        ids = sorted({eval_id for _, eval_id in self._queues["train"]}) if self._queued["train"] else []
        return [entry for eval_id in ids if (entry := self.entries[eval_id]).state == "queued"]

    def due(self) -> Counter[int]:
        """Members that wait for the next update or were planned for an earlier one: counts by dispatch version."""
        counts = Counter[int]()
        for (meant_for, version), ids in self.groups.items():
            if meant_for <= self.version + 1:
                counts[version] += len(ids)
        return counts

    def waiting_in(self, groups: Iterable[tuple[int, int]]) -> list[Entry]:
        """Waiting members of these groups, sorted by (dispatch version, slot)."""
        return [self.entries[eval_id] for eval_id in sorted(name for group in groups for name in self.groups[group])]

    def reported_at(self, version: int) -> list[Entry]:
        """Results measured at `version` that have not been counted yet."""
        members = (ids for (_, measured_at), ids in self.groups.items() if measured_at == version)
        waiting = set[EvalId]().union(*members, self._other_ids.get(version, ()))
        entries = [self.entries[eval_id] for eval_id in sorted(waiting)]
        return [entry for entry in entries if entry.state == "reported"]

    def closed_cohort(self) -> list[Entry]:
        """The cohort that the trainer digests, in order."""
        return [self.entries[eval_id] for eval_id in self.closed]

    def evals_open(self) -> bool:
        return any(self._other_ids.values())

    def contradictions(self) -> list[tuple[Entry, str]]:
        """Waiting results that are impossible for their assignments, with the reason: heads of the first release
        recorded everything that a worker reported."""
        return [(entry, why) for entry in self.entries.values() if (why := why_void(entry))]

    def validate(self) -> None:
        """Compare everything that is kept beside the entries with the entries. Costs time; for tests, after each event.

        Errors: StoreError that names what differs.
        """
        live, waiting, queued = Counter[int](), Counter[int](), Counter[Purpose]()
        groups: dict[tuple[int, int], set[EvalId]] = {}
        for eval_id, entry in self.entries.items():
            purpose, version = entry.assignment.purpose, entry.assignment.version
            queued[purpose] += entry.state == "queued"
            if purpose != "train":
                continue
            live[version] += entry.state in ("queued", "leased")
            waiting[version] += entry.state in ("reported", "closed")
            if entry.state == "reported" and entry.result is not None:
                groups.setdefault((entry.assignment.update, version), set()).add(eval_id)
            if (entry.state in ("counted", "void", "discarded")) and entry.result is not None:
                raise StoreError(f"evaluation {eval_id} is {entry.state}, but its result is still kept")
        num_due = sum(len(ids) for (update, _), ids in groups.items() if update <= self.version + 1)
        kept = {"live": +live, "waiting": +waiting, "queued": +queued, "groups": groups, "num_due": num_due}
        for name, right in kept.items():
            found = getattr(self, name if hasattr(self, name) else f"_{name}")
            if found != right and +Counter(found if isinstance(found, Counter) else {}) != right:
                raise StoreError(f"the ledger's {name} is {found}, but its entries say {right}")
        for purpose, queue in self._queues.items():
            in_line = {eval_id for _, eval_id in queue}
            for eval_id, entry in self.entries.items():
                if entry.state == "queued" and eval_id.purpose == purpose and eval_id not in in_line:
                    raise StoreError(f"evaluation {eval_id} is queued, but in no queue")

    # --- the fold ------------------------------------------------------------------------------------------

    def apply(self, record: journal.Record) -> None:
        """Apply one record. Errors: StoreError when it contradicts an earlier one."""
        match record:
            case journal.Started(base_digest=digest, time=time):
                self._set_digest(0, digest)
                self.began = min(self.began, time)
                self.failures_in_a_row = 0
                for entry in [entry for entry in self.entries.values() if entry.state == "leased"]:
                    self._release(entry)
            case journal.Planned(version=version, assignments=assignments):
                if version > self.planned:
                    self.planned, self.num_slots = version, 0
                for assignment in assignments:
                    self._plan(assignment)
            case journal.Dismissed(worker=worker):
                self.dismissed.add(worker)
            case journal.Left(worker=worker):
                self.dismissed.discard(worker)
            case journal.Leased(eval_id=eval_id, worker=worker, attempt=attempt, time=time):
                entry = self._entry(eval_id)
                self._move(entry, "leased")
                entry.worker, entry.attempts, entry.leased_at = worker, attempt, time
            case journal.Unleased(eval_id=eval_id):
                self._release(self._entry(eval_id))
            case journal.Reported(worker=worker, result=result):
                self._report(self._entry(result.eval_id), worker, result)
            case journal.Voided(eval_id=eval_id):
                self._drop(self._entry(eval_id), "void")
            case journal.Discarded(eval_id=eval_id):
                self._drop(self._entry(eval_id), "discarded")
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

    def _entry(self, eval_id: EvalId) -> Entry:
        try:
            return self.entries[eval_id]
        except KeyError:
            raise StoreError(f"the journal speaks of evaluation {eval_id}, which was never planned") from None

    def _set_digest(self, version: int, digest: int) -> None:
        if self.digests.setdefault(version, digest) != digest:
            raise StoreError(f"theta_{version} has two digests: {self.digests[version]:016x} and {digest:016x}")

    def _plan(self, assignment: Assignment) -> None:
        if assignment.eval_id in self.entries:
            raise StoreError(f"evaluation {assignment.eval_id} was planned twice")
        entry = Entry(assignment)
        self.entries[assignment.eval_id] = entry
        self._count(entry, +1)
        self._enqueue(entry)
        if assignment.purpose != "train":
            self._other_ids.setdefault(assignment.version, set()).add(assignment.eval_id)
        elif assignment.version == self.planned:
            self.num_slots = max(self.num_slots, assignment.eval_id.slot + 1)

    def _enqueue(self, entry: Entry) -> None:
        assignment = entry.assignment
        heapq.heappush(self._queues[assignment.purpose], (_place_in_line(assignment.eval_id), assignment.eval_id))

    def _move(self, entry: Entry, state: EntryState) -> None:
        self._count(entry, -1)
        entry.state = state
        self._count(entry, +1)

    def _count(self, entry: Entry, change: int) -> None:
        """Keep the counts of entries by state."""
        purpose, version = entry.assignment.purpose, entry.assignment.version
        if entry.state == "queued":
            self._queued[purpose] += change
        if purpose != "train":
            return
        if entry.state in ("queued", "leased"):
            self._change(self.live, version, change)
        elif entry.state in ("reported", "closed"):
            self._change(self.waiting, version, change)

    @staticmethod
    def _change(counts: Counter[int], version: int, change: int) -> None:
        counts[version] += change
        if not counts[version]:
            del counts[version]

    def _release(self, entry: Entry) -> None:
        self._move(entry, "queued")
        entry.worker = None
        self._enqueue(entry)

    def _report(self, entry: Entry, worker: str, result: Result) -> None:
        if entry.state not in ("queued", "leased"):
            raise StoreError(f"evaluation {result.eval_id} was reported when it was {entry.state} already")
        self._move(entry, "reported")
        entry.worker = worker
        if result.error is not None:
            self.failures_in_a_row += 1
            return
        entry.result = result
        self.failures_in_a_row = 0
        assignment = entry.assignment
        if assignment.purpose == "propose":
            return  # until its context is recorded
        if assignment.purpose == "train":
            self.groups.setdefault((assignment.update, assignment.version), set()).add(assignment.eval_id)
            self.num_due += assignment.update <= self.version + 1
        else:
            self._finish_centres(assignment.version)

    def _finish_centres(self, version: int) -> None:
        """Close the complete evaluations of the centre at a version that were measured around the head's digest."""
        if version not in self.digests:
            return
        ids = sorted(self._other_ids.get(version, ()), key=_place_in_line)
        for purpose in ("centre", "eval"):
            group = [self.entries[eval_id] for eval_id in ids if eval_id.purpose == purpose]
            results = [entry.result for entry in group if entry.result is not None]
            if not group or len(results) < len(group) or any(map(why_void, group)):
                continue
            if any(result.digest != self.digests[version] for result in results):
                continue
            if purpose == "centre":
                self.centres[version] = results[0].fitness
            else:
                rewards = [episode.reward for result in results for episode in result.episodes]
                self.eval_fitness[version] = sum(rewards) / len(rewards) if rewards else math.nan
            for entry in group:
                self._count_in(entry)
                self._other_ids[version].discard(entry.assignment.eval_id)
        if not self._other_ids.get(version, True):
            del self._other_ids[version]

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

    def _end_other(self, done: EvalId) -> None:
        """Note that an evaluation which no update consumes has come to its end."""
        open_ids = self._other_ids.get(done.version, set())
        open_ids.discard(done)
        if not open_ids:
            self._other_ids.pop(done.version, None)

    def _drop(self, entry: Entry, state: EntryState) -> None:
        self._move(entry, state)
        entry.result = None
        self._forget(entry)
        self._other_ids.get(entry.assignment.version, set()).discard(entry.assignment.eval_id)

    def _forget(self, entry: Entry) -> None:
        """Remove a member from the waiting ones."""
        group = (entry.assignment.update, entry.assignment.version)
        waiting = self.groups.get(group, set())
        if entry.assignment.eval_id not in waiting:
            return
        waiting.remove(entry.assignment.eval_id)
        self.num_due -= entry.assignment.update <= self.version + 1
        if not waiting:
            del self.groups[group]

    def _count_in(self, entry: Entry) -> None:
        self._move(entry, "counted")
        entry.result = None

    def _close(self, update: int, evaluations: tuple[EvalId, ...]) -> None:
        if update != self.version + 1 or self.closed:
            raise StoreError(f"a cohort is closed for update {update}, but the run is at version {self.version}")
        for eval_id in evaluations:
            entry = self._entry(eval_id)
            if entry.state != "reported":
                raise StoreError(f"update {update} closes evaluation {eval_id}, which is {entry.state}")
            self._forget(entry)
            self._move(entry, "closed")
        self.closed = evaluations

    def _propose(self, context: Context) -> None:
        self.proposed.append(context)
        self.contexts[context.id] = context
        if context.proposed_by is not None:
            entry = self._entry(context.proposed_by)
            if entry.state != "reported":
                raise StoreError(f"a context was proposed by evaluation {context.proposed_by}, which is {entry.state}")
            self._count_in(entry)
            self._end_other(context.proposed_by)

    def _commit(self, commit: Commit) -> None:
        if commit.version != self.version + 1:
            raise StoreError(f"commit {commit.version} follows commit {self.version}")
        if not commit.consumed:
            raise StoreError(f"commit {commit.version} consumes nothing")
        self.commits[commit.version] = commit
        self.nulls_in_a_row = self.nulls_in_a_row + 1 if commit.null else 0
        self.fitness = sum(each.fitness for each in commit.consumed) / len(commit.consumed)
        for each in commit.consumed:
            entry = self._entry(each.eval_id)
            if entry.state != ("closed" if self.closed else "reported"):
                raise StoreError(f"commit {commit.version} counts evaluation {each.eval_id}, which is {entry.state}")
            self._count_in(entry)
            self._forget(entry)
        if self.closed != (consumed := tuple(each.eval_id for each in commit.consumed)) and self.closed:
            raise StoreError(f"commit {commit.version} counts {consumed}, but {self.closed} were closed for it")
        self.closed = ()
        if isinstance(commit.body, Weights):  # its checkpoint is on disk, or there would be no commit
            self._set_digest(commit.version, commit.body.digest)
            self.checkpoint = commit.version
        self._change_pool(commit.pool)
        self.version = commit.version
        self.num_due += sum(len(ids) for (update, _), ids in self.groups.items() if update == commit.version + 1)


def _place_in_line(eval_id: EvalId) -> tuple[int, int, int]:
    """Oldest version first, then by slot; the last batch of evaluation tasks first, as the first release did."""
    slot = -eval_id.slot if eval_id.purpose == "eval" else eval_id.slot
    return eval_id.version, slot, eval_id.replacement
