"""The result of a simulated run, and the tally of worker seconds that it is computed from.

Invariant: every second of a connected worker counts exactly once: as busy (it led to a result), as lost, as waiting for
a message, or as idle for one of three reasons.
"""

from collections import Counter
from dataclasses import dataclass

from hpc_es.records import Commit, EvalId
from hpc_es.store import records as journal


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulated run. Shares are fractions of the seconds that workers were connected, as in the tables of a
    real run."""

    mode: str
    num_workers: int
    population: int
    num_updates: int
    wall_clock_s: float
    """Seconds from the first lease to the last commit."""
    total_s: float
    """Seconds from the start of the head to its end, including start-up and final evaluation."""
    busy_share: float
    """Share spent on updating, perturbing and rolling out for results that were reported."""
    useful_share: float
    """Share spent on accepted results."""
    waiting_share: float
    """Share spent idle because no work can be assigned until others report (the barrier, or the bound on lag)."""
    arena_share: float
    """Share spent idle while a full cohort waits for the head's arena, for an update or a checkpoint."""
    end_share: float
    """Share spent idle after the last commit, while others evaluate the centre and the last checkpoint is written."""
    message_share: float
    """Share spent waiting for assignments and results in transit, and on work that is unfinished when the run ends."""
    lost_share: float
    """Share spent on evaluations that were lost with their worker."""
    lags: dict[int, int]
    """Number of accepted results by lag."""
    stale: tuple[int, ...]
    """Number of accepted results with a lag above 0, for each update."""
    num_evaluations: int
    """Number of reported results, for members and for the centre."""
    num_discarded: int
    """Number of results discarded because of the bound on lag."""
    discarded_share: float
    """Share of the seconds spent on members' results that were discarded."""
    num_preemptions: int
    num_lost: int
    """Number of evaluations that were lost with their worker."""
    useful_s: float
    """Seconds spent on accepted results, up to the last commit."""
    num_events: int
    """Number of events that the core handled."""
    compute_s: float
    """Seconds that the simulation itself took."""

    @property
    def seconds_per_update(self) -> float:
        return self.wall_clock_s / self.num_updates

    @property
    def bound_s(self) -> float:
        """Wall-clock time of the same useful work if no worker ever idled and nothing was wasted."""
        return self.useful_s / self.num_workers

    @property
    def lag_mean(self) -> float:
        return sum(lag * count for lag, count in self.lags.items()) / sum(self.lags.values())

    @property
    def lag_max(self) -> int:
        return max(self.lags)


class SecondsTally:
    """Sums the seconds of all workers by use, from the passing of time and from the records that the head writes."""

    def __init__(self) -> None:
        self.connected = self.holding = self.waiting = self.arena = self.end = 0.0
        self.busy = self.useful = self.lost = 0.0
        self.reported = self.discarded = 0.0
        """Seconds spent on members' results."""
        self.pending: dict[EvalId, float] = {}
        """Seconds spent on each member's result that no update has consumed yet."""
        self.lags: Counter[int] = Counter()
        self.stale: list[int] = []
        self.num_evaluations = self.num_discarded = self.num_lost = 0
        self.first_lease: float | None = None
        self.last_commit = 0.0
        self.useful_at_commit = 0.0

    def add(self, record: journal.AnyRecord) -> None:
        match record:
            case journal.Leased(time=now) if self.first_lease is None:
                self.first_lease = now
            case journal.Reported(result=result):
                seconds = result.seconds_update + result.seconds_perturb + result.seconds_rollout
                self.num_evaluations += 1
                self.busy += seconds
                if result.eval_id.purpose != "train":  # an evaluation of the centre
                    self.useful += seconds
                else:
                    self.reported += seconds
                    self.pending[result.eval_id] = seconds
            case journal.Discarded(eval_id=eval_id):
                self.num_discarded += 1
                self.discarded += self.pending.pop(eval_id)
            case journal.Committed(time=now, commit=commit):
                self._commit(now, commit)

    def _commit(self, now: float, commit: Commit) -> None:
        lags = Counter(commit.lags)
        self.lags += lags
        self.stale.append(len(commit.consumed) - lags[0])
        self.useful += sum(self.pending.pop(each.eval_id) for each in commit.consumed)
        self.last_commit, self.useful_at_commit = now, self.useful

    def lose(self, seconds: float) -> None:
        """Record an evaluation that was lost with its worker after this many seconds."""
        self.num_lost += 1
        self.lost += max(seconds, 0.0)

    def result(
        self,
        *,
        mode: str,
        num_workers: int,
        population: int,
        now: float,
        num_preemptions: int,
        num_events: int,
        compute_s: float,
    ) -> SimulationResult:
        connected = max(self.connected, 1e-12)
        return SimulationResult(
            mode=mode,
            num_workers=num_workers,
            population=population,
            num_updates=len(self.stale),
            wall_clock_s=self.last_commit - (self.first_lease or 0.0),
            total_s=now,
            busy_share=self.busy / connected,
            useful_share=self.useful / connected,
            waiting_share=self.waiting / connected,
            arena_share=self.arena / connected,
            end_share=self.end / connected,
            message_share=max(self.holding - self.busy - self.lost, 0.0) / connected,
            lost_share=self.lost / connected,
            lags=dict(sorted(self.lags.items())),
            stale=tuple(self.stale),
            num_evaluations=self.num_evaluations,
            num_discarded=self.num_discarded,
            discarded_share=self.discarded / max(self.reported, 1e-12),
            num_preemptions=num_preemptions,
            num_lost=self.num_lost,
            useful_s=self.useful_at_commit,
            num_events=num_events,
            compute_s=compute_s,
        )
