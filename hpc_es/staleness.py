"""Which evaluations to dispatch at a version, and which results may enter a cohort.

Invariant: an evaluation is counted at most once, and never with a lag above the schedule's bound, counted at the
commit. Pure: no clock, no I/O. Source: bounded-staleness asynchronous ES (Hoy et al., 2026); design, section 6.

Two families. Composed schedules know every cohort beforehand: a number of results of each lag; an evaluation is
dispatched for one update and waits for it. The natural schedule takes what comes, as long as it is within the bound.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hpc_es.config import es as settings
from hpc_es.config.schema import Config


class Verdict(Enum):
    accept = "accept"
    early = "early"
    """For a later update; kept until then."""
    stale = "stale"


@dataclass(frozen=True)
class Dispatch:
    """One evaluation to be dispatched: slot within the plan of its version, and the update it is meant for."""

    slot: int
    update: int


class Schedule(Protocol):
    """`counts` below are numbers of evaluations by dispatch version."""

    @property
    def population(self) -> int:
        """Members of a cohort, N."""

    @property
    def num_updates(self) -> int: ...

    @property
    def max_lag(self) -> int:
        """The bound."""

    @property
    def on_demand(self) -> bool:
        """Members are dispatched as workers become free, at the newest version, and a lost one is not made again."""

    def plan(self, version: int) -> list[Dispatch]:
        """Members that are to be dispatched at `version`, whoever is free."""

    def room(self, version: int, outstanding: Mapping[int, int]) -> int:
        """How many more members may be dispatched on demand. `outstanding`: counts in flight or not yet consumed."""

    def judge(self, *, version: int, meant_for: int, update: int) -> Verdict:
        """Whether a result measured around theta_version for update `meant_for` may enter the cohort of `update`."""

    def may_commit(self, update: int, waiting: Mapping[int, int], live: Mapping[int, int]) -> bool:
        """Whether to take the N oldest results now. Counts that wait for this update, and that are being made."""


@dataclass(frozen=True)
class Composed(ABC):
    """Every cohort has a composition that is known beforehand."""

    population: int
    num_updates: int

    on_demand = False

    @abstractmethod
    def wanted(self, update: int) -> Mapping[int, int]:
        """Results by lag that the cohort of `update` asks for; what is missing to N is fresh."""

    @property
    @abstractmethod
    def max_lag(self) -> int:
        """The largest lag that any cohort asks for."""

    def composition(self, update: int) -> dict[int, int]:
        """Results by lag in the cohort of `update`: a lag class is used as soon as that old a version exists."""
        stale = {lag: count for lag, count in self.wanted(update).items() if 0 < lag < update and count}
        fresh = self.population - sum(stale.values())
        return dict(sorted({**({0: fresh} if fresh else {}), **stale}.items()))

    def plan(self, version: int) -> list[Dispatch]:
        last = min(self.num_updates, version + 1 + self.max_lag)
        meant_for = [
            update
            for update in range(version + 1, last + 1)
            for _ in range(self.composition(update).get(lag(version, update), 0))
        ]
        return [Dispatch(slot, update) for slot, update in enumerate(meant_for)]

    def room(self, version: int, outstanding: Mapping[int, int]) -> int:
        return 0

    def judge(self, *, version: int, meant_for: int, update: int) -> Verdict:
        if meant_for > update:
            return Verdict.early
        return Verdict.accept if meant_for == update else Verdict.stale

    def may_commit(self, update: int, waiting: Mapping[int, int], live: Mapping[int, int]) -> bool:
        return sum(waiting.values()) >= self.population


@dataclass(frozen=True)
class Sync(Composed):
    """N fresh evaluations for each update, and a barrier."""

    @property
    def max_lag(self) -> int:
        return 0

    def wanted(self, update: int) -> Mapping[int, int]:
        return {}


@dataclass(frozen=True)
class Controlled(Composed):
    """floor(share * N + 0.5) results of exactly one lag, the rest fresh."""

    lag: int
    share: float

    @property
    def max_lag(self) -> int:
        return self.lag

    def wanted(self, update: int) -> Mapping[int, int]:
        return {self.lag: int(self.share * self.population + 0.5)}


@dataclass(frozen=True)
class Tail(Composed):
    """Given numbers of results by lag; they sum to N."""

    counts: Mapping[int, int]

    @property
    def max_lag(self) -> int:
        return max(self.counts)

    def wanted(self, update: int) -> Mapping[int, int]:
        return self.counts


@dataclass(frozen=True)
class Staircase(Composed):
    """Whole cohorts of one lag, which climbs: `steps` are (from update, lag), in order, the first from update 1.

    With `isolated`, only the update at which a step begins is stale; those between are fresh.
    """

    steps: tuple[tuple[int, int], ...]
    isolated: bool = False

    @property
    def max_lag(self) -> int:
        return max(lag for _, lag in self.steps)

    def wanted(self, update: int) -> Mapping[int, int]:
        begin, lag = max(step for step in self.steps if step[0] <= update)
        return {lag: self.population} if update == begin or not self.isolated else {}


@dataclass(frozen=True)
class Natural:
    """Whatever comes in first, up to a lag of `max_lag`: with G <= N workers, at most G - 1 results a cohort are stale.

    `hold`: no commit after which something that is being made could no longer be consumed within the bound. With the
    oldest results going first, that is so exactly if for every later update u no more results than N * (number of
    updates until u) must be consumed by then. Otherwise what comes too late is dropped.
    """

    population: int
    num_updates: int
    max_lag: int
    hold: bool = False

    on_demand = True

    def plan(self, version: int) -> list[Dispatch]:
        return []

    def room(self, version: int, outstanding: Mapping[int, int]) -> int:
        """At most N evaluations for each of the updates that could still consume a result of this version."""
        num_consumers = min(self.max_lag + 1, self.num_updates - version)
        usable = sum(count for v, count in outstanding.items() if lag(v, version + 1) <= self.max_lag)
        return max(self.population * num_consumers - usable, 0)

    def judge(self, *, version: int, meant_for: int, update: int) -> Verdict:
        return Verdict.accept if lag(version, update) <= self.max_lag else Verdict.stale

    def may_commit(self, update: int, waiting: Mapping[int, int], live: Mapping[int, int]) -> bool:
        if sum(waiting.values()) < self.population:
            return False
        return not self.hold or self._all_in_time(update, waiting, live)

    def _all_in_time(self, update: int, waiting: Mapping[int, int], live: Mapping[int, int]) -> bool:
        taken, due = self.population, 0
        for version in sorted({*waiting, *live}):
            going = min(waiting.get(version, 0), taken)
            taken -= going
            due += waiting.get(version, 0) - going + live.get(version, 0)
            last_chance = version + 1 + self.max_lag
            if due > self.population * max(last_chance - update, 0):
                return False
        return True


def schedule_of(config: Config, population: int) -> Schedule:
    """The schedule that a run's configuration asks for; `population`: evaluations that one update consumes."""
    num_updates = config.run.num_updates
    match config.staleness:
        case settings.Natural(max_lag=max_lag, overdue=overdue):
            return Natural(population, num_updates, max_lag, hold=overdue == "hold")
        case settings.Controlled(lag=lag, share=share):
            return Controlled(population, num_updates, lag, share)
        case settings.Tail(counts=counts):
            return Tail(population, num_updates, counts)
        case settings.Staircase(steps=steps, isolated=isolated):
            return Staircase(population, num_updates, steps, isolated)
        case settings.Sync():
            return Sync(population, num_updates)


def lag(version: int, update: int) -> int:
    """Versions between dispatch and the parameters that update `update` starts from; 0 is fresh."""
    return update - 1 - version
