"""Where the seconds of simulated workers go, and what a simulated run comes to.

Invariant: every second that a worker is connected is in exactly one account: busy (a result came of it), lost, under
way as a message, or idle for one of three reasons.
"""

from collections import Counter
from dataclasses import dataclass

from hpc_es.records import Commit, EvalId
from hpc_es.store import records as journal


@dataclass(frozen=True)
class Simulated:
    """Shares are of the seconds that workers were connected, as in the tables of a real run."""

    mode: str
    num_workers: int
    population: int
    num_updates: int
    wall_clock_s: float
    """From the first lease to the last commit."""
    total_s: float
    """From the start of the head to its end, with start-up and final evaluation."""
    busy_share: float
    """Updating, perturbing and rolling out, in results that were reported."""
    useful_share: float
    """The same, in accepted results only."""
    waiting_share: float
    """Idle: there is nothing to hand out before others report (the barrier, or the bound on lag), or no more."""
    arena_share: float
    """Idle: a full cohort waits for the head's arena, for an update or a checkpoint."""
    end_share: float
    """Idle after the last commit, while others evaluate the centre and the last checkpoint is written."""
    message_share: float
    """Assignments and results under way, and what is held when the run ends."""
    lost_share: float
    """Spent on evaluations that ended with their worker."""
    lags: dict[int, int]
    """Accepted results by lag."""
    stale: tuple[int, ...]
    """Accepted results with a lag above 0, for each update."""
    num_evaluations: int
    """Results reported, for members and for the centre."""
    num_discarded: int
    """Good results beyond the bound on lag."""
    discarded_share: float
    """Share of the seconds in results for updates that were discarded."""
    num_preemptions: int
    num_lost: int
    """Evaluations that ended with their worker."""
    useful_s: float
    """In accepted results, up to the last commit."""
    num_events: int
    """What the core has handled."""
    compute_s: float
    """What the simulation itself took."""

    @property
    def seconds_per_update(self) -> float:
        return self.wall_clock_s / self.num_updates

    @property
    def bound_s(self) -> float:
        """The wall-clock of the same useful work if no worker ever idled and nothing was wasted."""
        return self.useful_s / self.num_workers

    @property
    def lag_mean(self) -> float:
        return sum(lag * count for lag, count in self.lags.items()) / sum(self.lags.values())

    @property
    def lag_max(self) -> int:
        return max(self.lags)


class Accounts:
    """Seconds of all workers together, from time that passes and from records as they are written."""

    def __init__(self) -> None:
        self.connected = self.holding = self.waiting = self.arena = self.end = 0.0
        self.busy = self.useful = self.lost = 0.0
        self.reported = self.discarded = 0.0
        """In results for updates."""
        self.pending: dict[EvalId, float] = {}
        """Seconds of results for updates that nothing has consumed yet."""
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
                if result.eval_id.purpose != "train":  # of the centre
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
        """An evaluation ended with its worker after so many seconds."""
        self.num_lost += 1
        self.lost += max(seconds, 0.0)

    def simulated(
        self,
        *,
        mode: str,
        num_workers: int,
        population: int,
        now: float,
        num_preemptions: int,
        num_events: int,
        compute_s: float,
    ) -> Simulated:
        connected = max(self.connected, 1e-12)
        return Simulated(
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
