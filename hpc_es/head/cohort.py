"""What the next update consumes, and what may still be dispatched for it: the schedule's rules on the ledger's facts.

Invariant: asks, and changes nothing. Whatever it answers follows from the configuration and the journal, so a head that
restarts decides alike.
"""

from msgspec import structs

from hpc_es.head.ledger import Ledger
from hpc_es.methods.base import Method
from hpc_es.records import Assignment, Commit, EvalId, Purpose, Result
from hpc_es.staleness import Verdict
from hpc_es.store.history import Evaluation


class Cohort:
    """The cohort that turns theta_version into the next theta."""

    def __init__(self, method: Method, ledger: Ledger) -> None:
        self.method = method
        self.ledger = ledger
        self.schedule = method.schedule()
        self.on_demand = self.schedule.on_demand
        self._planned: tuple[Purpose, ...] = ("centre", "propose", "eval")
        """Purposes of what is planned at a version, rather than when a worker is free."""
        if not self.on_demand:
            self._planned = ("centre", "train", "propose", "eval")

    @property
    def update(self) -> int:
        return self.ledger.version + 1

    # --- dispatch ----------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Assignment, ...]:
        """What is dispatched at this version, whoever is free."""
        return self.method.plan(self.schedule, self.ledger.version, self.ledger.pool)

    def next_planned(self, num_workers: int) -> Evaluation | None:
        """What was planned and is to be handed out next: members first; but where they take several rounds, the last
        round comes after the evaluations of the policy, so that a full cohort need not wait for those to begin."""
        purposes = self._planned
        if not self.on_demand and self.ledger.num_queued(("train",)) <= num_workers < self.schedule.population:
            purposes = ("centre", "propose", "eval", "train")
        return self.ledger.next_queued(purposes)

    def next_member(self) -> Assignment | None:
        """The member to be dispatched on demand. None while a full cohort waits for something else than results: it
        would be stale for no reason."""
        if not self.on_demand or self.room() == 0 or self.is_full():
            return None
        ledger = self.ledger
        return self.method.assign(ledger.version, ledger.num_slots, self.update, ledger.pool)

    def room(self) -> int:
        """How many more members may be dispatched on demand."""
        outstanding = dict(self.ledger.live)  # asked for every member, and adding Counters takes five times as long
        for version, count in self.ledger.waiting.items():
            outstanding[version] = outstanding.get(version, 0) + count
        return self.schedule.room(self.ledger.version, outstanding)

    # --- the commit ----------------------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Whether the results are there, and the schedule lets them be consumed now."""
        ledger = self.ledger
        if ledger.closed or self.update > self.schedule.num_updates or ledger.num_due < self.schedule.population:
            return False
        return self.schedule.may_commit(self.update, ledger.due(), ledger.live)

    def must_wait(self) -> bool:
        """For the digest of this version, for what was planned at it to be leased, or for the centre's fitness."""
        ledger = self.ledger
        if ledger.version not in ledger.digests or ledger.planned < ledger.version:
            return True
        if ledger.num_queued(self._planned):
            return True
        return self.method.needs_centre and any(
            entry.assignment.version not in ledger.centres for entry in self._oldest()
        )

    def ids(self) -> tuple[EvalId, ...]:
        """The evaluations that the full cohort consumes: the N oldest results."""
        return tuple([entry.assignment.eval_id for entry in self._oldest()])

    def closed(self) -> list[tuple[Assignment, Result]]:
        """What the trainer digests."""
        return [_measured(entry) for entry in self.ledger.closed_cohort()]

    def commit(self) -> Commit:
        """The update that the closed cohort makes, or else the full one; its body is the trainer's where one trains."""
        entries = self.ledger.closed_cohort() or self._oldest()
        commit = self.method.commit(self.update, [_measured(entry) for entry in entries], self.ledger.centres)
        pool = self.method.pool_change(self.ledger.pool, self.ledger.proposed)
        return commit if pool is None else structs.replace(commit, pool=pool)

    def stale(self) -> list[Evaluation]:
        """Results that have waited too long, or came too late. Only what is dispatched on demand can be."""
        return self._judged(Verdict.stale) if self.on_demand else []

    def _oldest(self) -> list[Evaluation]:
        return self._judged(Verdict.accept)[: self.schedule.population]

    def _judged(self, verdict: Verdict) -> list[Evaluation]:
        """What waits and is judged so, sorted by (dispatch version, slot). Results of one version that were planned for
        one update fare alike."""
        return self.ledger.waiting_in(
            (meant_for, version)
            for meant_for, version in self.ledger.groups
            if self.schedule.judge(version=version, meant_for=meant_for, update=self.update) is verdict
        )


def _measured(entry: Evaluation) -> tuple[Assignment, Result]:
    assert entry.result is not None
    return entry.assignment, entry.result
