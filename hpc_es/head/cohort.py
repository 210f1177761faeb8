"""What the next update consumes, and what may still be dispatched for it: applies the schedule to the ledger.

Invariant: nothing here changes the ledger. All results follow from configuration and journal, so a head that restarts
makes the same decisions.
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
        """Purposes of the evaluations that are planned at a version, not when a worker is free."""
        if not self.on_demand:
            self._planned = ("centre", "train", "propose", "eval")

    @property
    def update(self) -> int:
        """Number of the next update."""
        return self.ledger.version + 1

    # --- dispatch ----------------------------------------------------------------------------------------------

    def plan(self) -> tuple[Assignment, ...]:
        """All evaluations to plan at this version, whether or not a worker is free."""
        return self.method.plan(self.schedule, self.ledger.version, self.ledger.pool)

    def next_planned(self, num_workers: int) -> Evaluation | None:
        """The planned evaluation to dispatch next; None if there is none.

        Composed schedules dispatch members first. But if there are more members than workers, the last `num_workers` of
        them come after all other evaluations: a commit must wait until those are leased, so a full cohort would
        otherwise wait for them.
        """
        purposes = self._planned
        if not self.on_demand and self.ledger.num_queued(("train",)) <= num_workers < self.schedule.population:
            purposes = ("centre", "propose", "eval", "train")
        return self.ledger.next_queued(purposes)

    def next_member(self) -> Assignment | None:
        """The next member to dispatch on demand; None if there must be none now.

        No member is dispatched while a full cohort waits to be committed, because it would be stale for no reason.
        """
        if not self.on_demand or self.room() == 0 or self.is_full():
            return None
        ledger = self.ledger
        return self.method.assign(ledger.version, ledger.num_slots, self.update, ledger.pool)

    def room(self) -> int:
        """How many more members may be dispatched on demand."""
        outstanding = dict(self.ledger.live)  # called for every member; adding Counters takes five times as long
        for version, count in self.ledger.waiting.items():
            outstanding[version] = outstanding.get(version, 0) + count
        return self.schedule.room(self.ledger.version, outstanding)

    # --- the commit ----------------------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Whether there are enough results, and the schedule allows the commit now."""
        ledger = self.ledger
        if ledger.closed or self.update > self.schedule.num_updates or ledger.num_due < self.schedule.population:
            return False
        return self.schedule.may_commit(self.update, ledger.due(), ledger.live)

    def must_wait(self) -> bool:
        """Whether a full cohort must not be committed yet.

        It waits for the digest of this version, until everything planned at this version is leased, and for the
        fitness of the centre if the method needs it.
        """
        ledger = self.ledger
        if ledger.version not in ledger.digests or ledger.planned < ledger.version:
            return True
        if ledger.num_queued(self._planned):
            return True
        return self.method.needs_centre and any(
            evaluation.assignment.version not in ledger.centres for evaluation in self._oldest()
        )

    def ids(self) -> tuple[EvalId, ...]:
        """The evaluations that the full cohort consumes: the N oldest results."""
        return tuple([evaluation.assignment.eval_id for evaluation in self._oldest()])

    def closed(self) -> list[tuple[Assignment, Result]]:
        """The closed cohort, from which the trainer makes the next theta."""
        return [_measured(evaluation) for evaluation in self.ledger.closed_cohort()]

    def commit(self) -> Commit:
        """The update from the closed cohort, or from the full one if none is closed.

        If the method trains, the caller still has to set the body.
        """
        evaluations = self.ledger.closed_cohort() or self._oldest()
        commit = self.method.commit(
            self.update, [_measured(evaluation) for evaluation in evaluations], self.ledger.centres
        )
        pool = self.method.pool_change(self.ledger.pool, self.ledger.proposed)
        return commit if pool is None else structs.replace(commit, pool=pool)

    def stale(self) -> list[Evaluation]:
        """Results that are too old to be consumed. They exist only if members are dispatched on demand."""
        return self._judged(Verdict.stale) if self.on_demand else []

    def _oldest(self) -> list[Evaluation]:
        return self._judged(Verdict.accept)[: self.schedule.population]

    def _judged(self, verdict: Verdict) -> list[Evaluation]:
        """Waiting results with this verdict, sorted by (dispatch version, slot).

        One verdict holds for all results of a version that were planned for the same update.
        """
        return self.ledger.waiting_in(
            (meant_for, version)
            for meant_for, version in self.ledger.groups
            if self.schedule.judge(version=version, meant_for=meant_for, update=self.update) is verdict
        )


def _measured(evaluation: Evaluation) -> tuple[Assignment, Result]:
    assert evaluation.result is not None
    return evaluation.assignment, evaluation.result
