"""How far theta moved, compared with the random walk of a run whose fitness carries no information.

The walk assigns the utilities of every commit to its members at random. Z-scores and ranks have a fixed sum of squares
whatever the fitness, so a single update has about the same length in both cases. What information in the fitness can
change is whether updates add up: a theta further from theta_0 than the walk has moved in a consistent direction. In d
dimensions the length of a walk varies by one part in sqrt(2 d): negligible for a language model, and taken into account
for small models.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_es.analysis.statistics.runs import settings
from hpc_es.analysis.statistics.sample import Sample, sample
from hpc_es.methods.es.low_rank import noise_scale
from hpc_es.records import Commit, Term
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Floats = np.ndarray[Any, np.dtype[np.float64]]

THRESHOLDS = (1e-3, 1.5e-3, 2e-3)
"""Magnitudes at which Zheng et al. (2026) report shares of a language model's parameters."""
SIGMAS = (0.1, 0.5, 1.0, 2.0)
"""Further thresholds, in units of the run's sigma: unlike absolute ones, they are informative at every scale."""
_WALKERS = 2**15
"""Number of elements of a simulated walk, used where an optimiser leaves no closed formula."""
_TABLE_VARIANCE = 0.99998
"""Variance of the 65,536-point Gaussian of the noise; its standard deviation is 0.99999."""


class Walk(NamedTuple):
    """Standard deviation per parameter over V updates; multiplied by sqrt(d) it is a norm."""

    steps: "Floats"
    """[V] Change made by each update."""
    distances: "Floats"
    """[V] theta_u - theta_0."""


def walk(commits: "tuple[Commit, ...]") -> Walk:
    """Random walk of the same commits when their utilities are assigned to members at random."""
    import numpy as np

    gradients = np.array([gradient_variance(commit) for commit in commits])
    if all(commit.seeds.step is None for commit in commits):
        return Walk(np.sqrt(gradients), np.sqrt(np.cumsum(gradients)))
    return _simulated_walk(commits, np.sqrt(gradients))


def gradient_variance(commit: Commit) -> float:
    """Expected square, per parameter, of sum(a_i * eps_i) with a_i = 4096 * c_i, over all assignments of the utilities
    of a commit to its members. Members that share their noise (a mirrored pair) are not independent."""
    if commit.null:
        return 0.0
    weights, utilities = _weights(commit), [term.utility for term in commit.seeds.terms]
    number, squares = len(utilities), math.fsum(u * u for u in utilities)
    same = squares / number
    other = (math.fsum(utilities) ** 2 - squares) / (number * (number - 1)) if number > 1 else 0.0
    groups = defaultdict[Any, list[float]](list)
    for term, weight in zip(commit.seeds.terms, weights, strict=True):
        groups[term.seed, term.subspace, term.partition_seed].append(term.sign * weight)
    total = 0.0
    for group in groups.values():
        alone = math.fsum(weight * weight for weight in group)
        total += same * alone + other * (math.fsum(group) ** 2 - alone)
    return _TABLE_VARIANCE * total / commit.seeds.num_subspaces


def share_within(threshold: float, deviation: float) -> float:
    """Share of a normal distribution around 0 that lies within +-threshold."""
    return math.erf(threshold / (deviation * math.sqrt(2))) if deviation else 1.0


class WalkRatio(NamedTuple):
    """Distance of theta from theta_0 over that of the random walk, at the updates where the walk has moved."""

    updates: "Floats"
    ratio: "Floats"
    error: "Floats"
    """Standard error of the ratio, of the sample and of the walk."""


def ratio_to_walk(found: Sample) -> WalkRatio:
    """Distance from theta_0 relative to the random walk of the same schedule."""
    import numpy as np

    walking = math.sqrt(found.num_parameters) * walk(found.commits).distances
    moved = walking > 0
    updates = np.array([commit.version for commit in found.commits], float)
    error = np.hypot(found.distance_errors[moved] / walking[moved], 1 / math.sqrt(2 * found.num_parameters))
    return WalkRatio(updates[moved], found.distances[moved] / walking[moved], error)


def magnitudes(run: Run, model: Path | None = None) -> "pd.DataFrame":
    """Shares of trained parameters by |theta_V - theta_0|.

    Columns: threshold, sigmas (threshold in units of the first update's sigma), share (within the threshold, in the
    sample), walk (the share expected of a random walk of the same schedule), standard_error (of that share in a sample
    of this size). Errors: NothingToShow as `sample`.
    """
    import pandas as pd

    found = sample(run, model)
    deviation = float(walk(found.commits).distances[-1])
    sigma, rows = _sigma(run), []
    for threshold in sorted({float(f"{value:.9g}") for value in (*THRESHOLDS, *(part * sigma for part in SIGMAS))}):
        share = float((abs(found.changes) <= threshold).mean())
        walking = share_within(threshold, deviation)
        rows.append(
            (threshold, threshold / sigma, share, walking, math.sqrt(walking * (1 - walking) / found.num_sampled))
        )
    return pd.DataFrame(rows, columns=["threshold", "sigmas", "share", "walk", "standard_error"])


def _weights(commit: Commit) -> list[float]:
    """alpha * w_i of every member: its coefficient over its utility. A utility of 0 hides it; the mean stands in."""
    terms = commit.seeds.terms
    rank = commit.seeds.rank
    known = [_weight(term, rank) for term in terms if term.utility]
    mean = math.fsum(known) / len(known)
    return [_weight(term, rank) if term.utility else mean for term in terms]


def _weight(term: Term, rank: int) -> float:
    return noise_scale(rank) * term.coefficient / (term.utility * term.sign)


def _simulated_walk(commits: "tuple[Commit, ...]", deviations: "Floats") -> Walk:
    """Feed independent normal gradients through the optimiser of the commits."""
    import numpy as np

    from hpc_es.noise.reference import optimise
    from hpc_es.params.arena import update_of

    generator, everywhere = np.random.default_rng(0), np.ones(_WALKERS, bool)
    theta, state = np.zeros(_WALKERS), [np.zeros(_WALKERS, np.float32) for _ in range(2)]
    steps, distances = [], []
    for commit, deviation in zip(commits, deviations, strict=True):
        change, step = np.zeros(_WALKERS), update_of(commit).step
        if not commit.null:
            gradient = (deviation * generator.standard_normal(_WALKERS)).astype(np.float32)
            chosen = commit.seeds.step
            adam = chosen is not None and chosen.kind == "adam"
            change = gradient if step is None else optimise(step, gradient, everywhere, state[: 2 if adam else 1])
        theta = theta + change
        steps.append(math.sqrt(float((change.astype(float) ** 2).mean())))
        distances.append(math.sqrt(float((theta**2).mean())))
    return Walk(np.array(steps), np.array(distances))


def _sigma(run: Run) -> float:
    """Return sigma of the first update."""
    return float(settings(run)["es"]["sigma"]["start"])
