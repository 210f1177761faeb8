"""Which evaluations to dispatch at a version, and which results may enter a cohort.

Invariant: an evaluation is counted at most once, and never with a lag above the schedule's bound.
Pure: no clock, no I/O. Source: bounded-staleness asynchronous ES (Hoy et al., 2026); design, section 6.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hpc_es.es.records import Assignment


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
    def plan(self, version: int) -> list[Dispatch]:
        """What to dispatch at `version`."""

    def judge(self, assignment: Assignment, *, update: int) -> Verdict:
        """Whether a result of `assignment` may enter the cohort of `update`."""


@dataclass(frozen=True)
class Sync:
    """N fresh evaluations for each update, and a barrier."""

    population: int
    num_updates: int

    def plan(self, version: int) -> list[Dispatch]:
        if version >= self.num_updates:
            return []
        return [Dispatch(slot, version + 1) for slot in range(self.population)]

    def judge(self, assignment: Assignment, *, update: int) -> Verdict:
        if assignment.update > update:
            return Verdict.early
        return Verdict.accept if lag(assignment.version, update) == 0 else Verdict.stale


def lag(version: int, update: int) -> int:
    """Versions between dispatch and the parameters that update `update` starts from; 0 is fresh."""
    return update - 1 - version
