"""Find the cheapest way to another version: a checkpoint to start from, if any, and the commits to apply.

Invariant: the choice affects only the time taken; theta_v has the same bits whichever way it is reached. `ways` is
pure; `Measured` learns the costs from an engine's own loads and passes.

Cost model: reading any checkpoint takes `load` seconds (the base model is checkpoint 0). Commits are applied in one
pass over theta, which takes `begin` seconds for any number of commits, plus `each` per unit of work.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hpc_es.records import Commit

NEWEST_WEIGHT = 0.25
"""Weight of the newest measurement, so that one slow read or a busy neighbour is soon forgotten."""
UNTRIED_LOAD_DECAY = 0.98
"""Factor on the estimated load time whenever a load was possible but not chosen. A load that is never chosen is never
measured, so without this one slow read would rule out loading for ever."""
DEFAULT_LOAD_WORK = 2.0
"""Units of work that reading a checkpoint is assumed to cost until it has been measured."""
MIN_SLOPE = 0.125
"""Smallest cost of a unit of work, as a fraction of the mean cost per unit: one slow pass with little work must not
make work look free."""


def work(commit: Commit) -> float:
    """Work of applying a commit, in units of one member over all of theta.

    A member of one of K subspaces counts 1/K; the version's digest and norm count about one. A null commit is free.
    """
    return 0.0 if commit.null else full_work(len(commit.consumed), commit.seeds.num_subspaces)


def full_work(num_members: int, num_subspaces: int) -> float:
    """Work of a non-null commit."""
    return 1.0 + num_members / num_subspaces


class Costs(NamedTuple):
    """Seconds per load, per pass and per unit of work (see the module's docstring)."""

    load: float
    begin: float
    each: float


class Way(NamedTuple):
    """One way to a version."""

    load: int | None
    """Version of the checkpoint to load first; None to start from the arena as it is."""
    commits: range
    """Versions whose commits to apply."""
    seconds: float
    """Predicted duration."""

    def __str__(self) -> str:
        start = {None: "from here", 0: "from the base model"}.get(self.load, f"from checkpoint {self.load}")
        return f"{start} by {len(self.commits)} commits in {self.seconds:.2g} s"


def ways(
    here: int | None, wanted: int, checkpoints: Iterable[int], work_of: Callable[[int], float], costs: Costs
) -> list[Way]:
    """Every way to theta_wanted, cheapest first; among equals, the one with the fewest commits first.

    `here` is the arena's version, or None if the arena is incomplete. `checkpoints` are versions, in any order.
    `work_of` gives the work of applying a version's commit (see `work`).
    """
    loads = {start for start in checkpoints if start <= wanted} | {0}
    starts: list[tuple[int | None, int]] = [(start, start) for start in loads]
    if here is not None and here <= wanted:
        starts.append((None, here))
    found, summed, upto = list[Way](), 0.0, wanted
    for load, start in sorted(starts, key=lambda way: (-way[1], way[0] is not None)):
        summed += sum(work_of(version) for version in range(start + 1, upto + 1))
        upto = start
        replay = costs.begin + costs.each * summed if start < wanted else 0.0
        found.append(Way(load, range(start + 1, wanted + 1), replay + (0.0 if load is None else costs.load)))
    # The sort is stable: among equals, newer starts come first, and staying comes before loading.
    return sorted(found, key=lambda way: way.seconds)


class Measured:
    """Measured costs: a running mean of loads, and a running linear fit through the passes.

    Passes of equal work cannot separate `begin` from `each`; then `begin` is assumed to cost one unit of work.
    """

    def __init__(self, base_load: float = 0.0) -> None:
        """`base_load`: seconds that reading theta_0 took, or 0 if unknown."""
        self._load = base_load
        self._passes = 0
        self._work = self._seconds = self._variance = self._covariance = 0.0

    @property
    def costs(self) -> Costs:
        """The current estimates, never negative. Before any measurement only their ratios are meaningful."""
        if not self._passes:
            load = self._load or 1.0
            return Costs(load, load / DEFAULT_LOAD_WORK, load / DEFAULT_LOAD_WORK)
        usual = self._seconds / (self._work + 1.0)
        slope = (self._covariance + usual) / (self._variance + 1.0)
        each = max(slope, MIN_SLOPE * usual)
        if self._work:
            each = min(each, self._seconds / self._work)
        return Costs(self._load or DEFAULT_LOAD_WORK * usual, max(self._seconds - each * self._work, 0.0), each)

    def loaded(self, seconds: float) -> None:
        """Record a load."""
        self._load = self._load + NEWEST_WEIGHT * (seconds - self._load) if self._load else seconds

    def load_not_chosen(self) -> None:
        """Record that a load was possible and another way was chosen."""
        self._load *= UNTRIED_LOAD_DECAY

    def applied(self, work: float, seconds: float) -> None:
        """Record a pass over theta with this much work."""
        self._passes += 1
        weight = max(NEWEST_WEIGHT, 1.0 / self._passes)
        by_work, by_seconds = work - self._work, seconds - self._seconds
        self._work += weight * by_work
        self._seconds += weight * by_seconds
        self._variance = (1.0 - weight) * (self._variance + weight * by_work * by_work)
        self._covariance = (1.0 - weight) * (self._covariance + weight * by_work * by_seconds)
