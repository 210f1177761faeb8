"""The cheapest way to another version: the checkpoint to begin from, if any, and the commits to apply.

Invariant: the choice is about seconds only; theta_v has the same bits whichever way it was reached. `ways` is pure;
`Measured` learns from an engine's own passes what it costs there.

The model: a checkpoint, whichever it is, takes `load` seconds to read (the base model is checkpoint 0). Commits are
applied in one pass over theta, which takes `begin` seconds however many they are, and `each` more per unit of work.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hpc_es.records import Commit

NEWEST_WEIGHT = 0.25
"""Weight of the newest measurement: what a file system or a neighbour did once is soon forgotten."""
UNTRIED_LOAD_DECAY = 0.98
"""A load that was not chosen is not measured either; each time its estimate shrinks by this, so that one slow read does
not decide for ever."""
LOAD = 2.0
"""Units of work that reading a checkpoint is worth, as long as it was not measured."""
FLATTEST = 0.125
"""A unit of work costs at least this part of what passes usually take per unit, whatever one slow pass pretends."""


def work(commit: Commit) -> float:
    """Of applying a commit, in members over all of theta: a member of one of K subspaces is worth 1/K, the version's
    digest and norm about one. A null commit costs nothing."""
    return 0.0 if commit.null else full_work(len(commit.consumed), commit.seeds.num_subspaces)


def full_work(num_members: int, num_subspaces: int) -> float:
    """Cost of a non-null commit."""
    return 1.0 + num_members / num_subspaces


class Costs(NamedTuple):
    """Seconds; see the module's text."""

    load: float
    begin: float
    each: float


class Way(NamedTuple):
    """One way to a version."""

    load: int | None
    """The checkpoint to begin from; None: from where the arena is."""
    commits: range
    """Versions to apply."""
    seconds: float
    """Predicted."""

    def __str__(self) -> str:
        start = {None: "from here", 0: "from the base model"}.get(self.load, f"from checkpoint {self.load}")
        return f"{start} by {len(self.commits)} commits in {self.seconds:.2g} s"


def ways(
    here: int | None, wanted: int, checkpoints: Iterable[int], work_of: Callable[[int], float], costs: Costs
) -> list[Way]:
    """Every way to theta_wanted, the cheapest first; of equal ones that with the fewest commits.

    here: the arena's version; None: it holds no whole version. checkpoints: their versions, in any order. work_of: what
    applying a version is worth (see `work`).
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
    return sorted(found, key=lambda way: way.seconds)  # stable: newer starts, and staying, come first among equals


class Measured:
    """What loads and passes cost, from those that were made: a running mean, and a running line through the passes.

    Passes with equal work cannot tell `begin` from `each`; then `begin` is taken to be worth one unit.
    """

    def __init__(self, base_load: float = 0.0) -> None:
        """base_load: seconds that reading theta_0 took; 0: unknown."""
        self._load = base_load
        self._passes = 0
        self._work = self._seconds = self._variance = self._covariance = 0.0

    @property
    def costs(self) -> Costs:
        """Never negative. Before any measurement only their ratios mean something."""
        if not self._passes:
            load = self._load or 1.0
            return Costs(load, load / LOAD, load / LOAD)
        usual = self._seconds / (self._work + 1.0)
        slope = (self._covariance + usual) / (self._variance + 1.0)
        each = max(slope, FLATTEST * usual)
        if self._work:
            each = min(each, self._seconds / self._work)
        return Costs(self._load or LOAD * usual, max(self._seconds - each * self._work, 0.0), each)

    def loaded(self, seconds: float) -> None:
        self._load = self._load + NEWEST_WEIGHT * (seconds - self._load) if self._load else seconds

    def load_lost(self) -> None:
        """A load was possible, and another way was chosen."""
        self._load *= UNTRIED_LOAD_DECAY

    def applied(self, work: float, seconds: float) -> None:
        """One pass of so much work."""
        self._passes += 1
        weight = max(NEWEST_WEIGHT, 1.0 / self._passes)
        by_work, by_seconds = work - self._work, seconds - self._seconds
        self._work += weight * by_work
        self._seconds += weight * by_seconds
        self._variance = (1.0 - weight) * (self._variance + weight * by_work * by_work)
        self._covariance = (1.0 - weight) * (self._covariance + weight * by_work * by_seconds)
