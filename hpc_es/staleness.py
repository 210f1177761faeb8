"""Which evaluations to dispatch at a version, and which results may enter a cohort.

Invariant: an evaluation is counted at most once, and never if its lag at the commit is above the schedule's bound.
Pure: no clock, no I/O. Source: bounded-staleness asynchronous ES (Hoy et al., 2026); design, section 6.

There are two families. Composed schedules fix the number of results of each lag in every cohort beforehand; an
evaluation is dispatched for one update, and its result waits for that update. The natural schedule consumes results in
the order in which they arrive, if their lag is within the bound.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hpc_es.config import es as settings
from hpc_es.config.schema import Config


class Verdict(Enum):
    """Whether a result may enter a cohort."""

    accept = "accept"
    early = "early"
    """The result was planned for a later update and is kept for it."""
    stale = "stale"
    """The result is too old and is discarded."""


@dataclass(frozen=True)
class Dispatch:
    """One evaluation to dispatch: its slot within the plan of its version, and the update that it is planned for."""

    slot: int
    update: int


class Schedule(Protocol):
    """The contract of a schedule. The mappings below are numbers of evaluations by dispatch version."""

    @property
    def population(self) -> int:
        """Number of members of a cohort, N."""

    @property
    def num_updates(self) -> int: ...

    @property
    def max_lag(self) -> int:
        """Largest lag of a result in a cohort."""

    @property
    def on_demand(self) -> bool:
        """Whether members are dispatched at the newest version when a worker is free, and lost ones not repeated."""

    def plan(self, version: int) -> list[Dispatch]:
        """All members to plan at `version`, whether or not workers are free; none for an on-demand schedule."""

    def room(self, version: int, outstanding: Mapping[int, int]) -> int:
        """How many more members may be dispatched on demand. `outstanding`: those running or not yet consumed."""

    def judge(self, *, version: int, meant_for: int, update: int) -> Verdict:
        """Whether a result of dispatch version `version`, planned for `meant_for`, may enter the cohort of `update`."""

    def may_commit(self, update: int, waiting: Mapping[int, int], live: Mapping[int, int]) -> bool:
        """Whether to consume the N oldest results now. waiting: results for this update; live: running members."""


@dataclass(frozen=True)
class Composed(ABC):
    """A schedule that fixes the composition of every cohort beforehand."""

    population: int
    num_updates: int

    on_demand = False

    @abstractmethod
    def wanted(self, update: int) -> Mapping[int, int]:
        """Intended number of results by lag in the cohort of `update`; the rest up to N is fresh."""

    @property
    @abstractmethod
    def max_lag(self) -> int:
        """Largest lag in any cohort."""

    def composition(self, update: int) -> dict[int, int]:
        """Actual number of results by lag in the cohort of `update`: early updates have no versions for large lags."""
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
    """N fresh evaluations for each update, which waits for all of them."""

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
    """A given number of results for each lag; the numbers sum to N."""

    counts: Mapping[int, int]

    @property
    def max_lag(self) -> int:
        return max(self.counts)

    def wanted(self, update: int) -> Mapping[int, int]:
        return self.counts


@dataclass(frozen=True)
class Staircase(Composed):
    """All results of a cohort have the same lag, which changes at given updates.

    `steps` are (first update, lag) in order, the first one for update 1. With `isolated`, only the first update of a
    step is stale; the others are fresh.
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
    """Consume results in the order in which they arrive, up to a lag of `max_lag`.

    With G <= N workers, at most G - 1 results of a cohort are stale. `hold`: delay a commit if it would make a running
    evaluation too stale to be consumed. As the oldest results are consumed first, a commit is possible exactly if for
    every later update u at most N * (number of updates until u) results must be consumed by then. Without `hold`,
    results that are too stale are discarded.
    """

    population: int
    num_updates: int
    max_lag: int
    hold: bool = False

    on_demand = True

    def plan(self, version: int) -> list[Dispatch]:
        return []

    def room(self, version: int, outstanding: Mapping[int, int]) -> int:
        """At most N evaluations are outstanding for each update that could still consume a result of this version."""
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
    """The schedule of a configuration; `population`: number of evaluations that one update consumes."""
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
    """Lag at update `update`: versions between dispatch and theta_{update-1}; 0 is fresh."""
    return update - 1 - version
