"""How certain a number over held-out tasks is: intervals of rates, means and differences, and p-values.

Invariants: the task is the unit of resampling, and its repeats are averaged first, since they are not independent
tasks; seeds are fixed, so that the same values always give the same result. Values are arrays [tasks], or [tasks,
repeats].

With one binary outcome per task the p-value of `paired` is that of McNemar's exact test, so that has no function of its
own.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    Array = np.ndarray[Any, np.dtype[Any]]

NUM_RESAMPLES = 10_000
_AT_ONCE = 500
_EXACT = 14
"""Largest number of differences for which all 2^n sign flips are evaluated."""
_DETECTABLE = 1.96 + 0.84
"""Size of a difference, in standard errors, that is detected in 80 % of trials at the two-sided level of 5 %."""
LEVEL = 0.05
MAX_TASKS = 1_000_000
"""Largest number of needed tasks that a verdict states; a difference that needs more is negligible."""


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: float, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson interval of a rate from independent trials (Wilson, 1927), valid also with 0 successes or few trials.

    For tasks with repeats, `successes` may be the sum of their shares: shares vary no more than binary outcomes, so the
    interval is rather too wide. Errors: ConfigError unless 0 <= successes <= trials, trials >= 1 and
    0 < confidence < 1.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ConfigError(
            f"{successes} successes of {trials} trials are not a rate: at least 1 trial, and at most as many successes"
        )
    z = NormalDist().inv_cdf(_levels(confidence)[1])
    rate, weight = successes / trials, z * z / trials
    centre, half = rate + weight / 2, math.sqrt(weight * (rate * (1 - rate) + weight / 4))
    low = 0.0 if successes == 0 else (centre - half) / (1 + weight)  # rounding would miss both ends
    return Interval(low, 1.0 if successes == trials else (centre + half) / (1 + weight))


def bootstrap_mean(
    values: "ArrayLike", seed: int = 0, resamples: int = NUM_RESAMPLES, confidence: float = 0.95
) -> Interval:
    """Bootstrap percentile interval of the mean, with tasks resampled together with all of their repeats.

    It is somewhat too narrow for few tasks. Errors: ConfigError without a value, or for a wrong shape or confidence.
    """
    import numpy as np

    means, generator = by_task(values), np.random.default_rng(seed)
    sizes = [min(_AT_ONCE, resamples - done) for done in range(0, resamples, _AT_ONCE)]
    drawn = [means[generator.integers(0, len(means), (size, len(means)))].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(drawn), _levels(confidence))
    return Interval(float(low), float(high))


def pigeonhole_interval(values: "Array") -> Interval:
    """95 % interval of the mean of [seeds, tasks], with rows and columns resampled independently (Owen, 2007)."""
    import numpy as np

    generator, means = np.random.default_rng(0), []
    num_seeds, num_tasks = values.shape
    for _ in range(NUM_RESAMPLES):
        seeds = values[generator.integers(0, num_seeds, num_seeds)].mean(axis=0)
        means.append(seeds[generator.integers(0, num_tasks, num_tasks)].mean())
    low, high = np.quantile(means, _levels(0.95))
    return Interval(float(low), float(high))


def sign_flip_p_value(differences: "ArrayLike") -> float:
    """Two-sided p-value: how often random signs give a mean as far from 0. Differences [n]; zeros have no effect.

    Exact over all 2^n sign flips for up to 14 differences; else (1 + hits) / (1 + 10,000 draws).
    """
    import numpy as np

    given = np.asarray(differences, float)
    values = given[given != 0]
    if values.size == 0:
        return 1.0
    observed = abs(values.sum()) * (1 - 1e-12)
    if values.size <= _EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=values.size)))
        return float((abs(signs @ values) >= observed).mean())
    generator, hits = np.random.default_rng(0), 0
    for _ in range(NUM_RESAMPLES // _AT_ONCE):
        signs = generator.integers(0, 2, (_AT_ONCE, values.size)) * 2.0 - 1.0
        hits += int((abs(signs @ values) >= observed).sum())
    return (1 + hits) / (1 + NUM_RESAMPLES)


@dataclass(frozen=True)
class Paired:
    """Difference A - B over `num_tasks` tasks, each averaged over its repeats and over `num_seeds` pairs of runs."""

    num_tasks: int
    num_seeds: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    p_value: float
    by_seed: tuple[float, ...]
    """Difference of each pair of runs."""
    detectable: float
    """Smallest difference that this number of tasks detects in 80 % of trials."""
    tasks_needed: int | None
    """Number of tasks that would detect this difference in 80 % of trials, capped just beyond MAX_TASKS.

    None if the difference is zero.
    """

    @property
    def verdict(self) -> str:
        """Verdict in words. "Better" needs both the interval and the p-value."""
        if self.p_value < LEVEL and self.low > 0:
            return "A better"
        if self.p_value < LEVEL and self.high < 0:
            return "B better"
        if self.tasks_needed is None:
            return "no difference"
        needed = max(self.tasks_needed, self.num_tasks + 1)
        number = f"about {needed:,}" if needed <= MAX_TASKS else "more than a million"
        return (
            f"no difference shown; it would take {number} tasks to show a difference of this size "
            f"(there are {self.num_tasks:,})"
        )


def paired(a: "ArrayLike", b: "ArrayLike") -> Paired:
    """Compare two policies on the same tasks in the same order; the numbers of repeats may differ.

    The interval generalises to other tasks, not to other runs. Errors: ConfigError for unequal numbers of tasks, or
    fewer than two.
    """
    return paired_runs([(a, b)])


def paired_runs(pairs: "Sequence[tuple[ArrayLike, ArrayLike]]") -> Paired:
    """Compare several pairs of runs on the same tasks. With more than one pair, seeds are resampled as well as tasks.

    That interval is wider than needed with many seeds, and still too narrow with two or three.
    """
    import numpy as np

    sides = [by_task(values) for pair in pairs for values in pair]
    if len({len(values) for values in sides}) > 1 or len(sides[0]) < 2:
        counts = ", ".join(str(len(values)) for values in sides)
        raise ConfigError(f"a paired difference needs the same tasks on all sides, and at least 2: there are {counts}")
    a, b = np.array(sides[::2]), np.array(sides[1::2])
    differences = a - b
    means = differences.mean(axis=0)
    mean, spread, num_tasks = float(means.mean()), float(means.std(ddof=1)), means.size
    low, high = bootstrap_mean(means) if len(pairs) == 1 else pigeonhole_interval(differences)
    ratio = _DETECTABLE * spread / abs(mean) if mean else 0.0
    needed = max(2, math.ceil(min(ratio, math.sqrt(MAX_TASKS + 1)) ** 2)) if mean else None
    return Paired(
        num_tasks=num_tasks,
        num_seeds=len(pairs),
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        difference=mean,
        low=low,
        high=high,
        p_value=sign_flip_p_value(means),
        by_seed=tuple(float(value) for value in differences.mean(axis=1)),
        detectable=_DETECTABLE * spread / math.sqrt(num_tasks),
        tasks_needed=needed,
    )


def by_task(values: "ArrayLike") -> "Array":
    """Average [tasks, repeats] to [tasks]; [tasks] stays as it is. Errors: ConfigError for other or empty shapes."""
    import numpy as np

    array = np.asarray(values, float)
    if array.ndim not in (1, 2) or array.size == 0:
        raise ConfigError(
            f"values of the shape {array.shape} must be [tasks] or [tasks, repeats], at least one of each"
        )
    return array if array.ndim == 1 else array.mean(axis=1)


def _levels(confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise ConfigError(f"a confidence of {confidence} must lie between 0 and 1, e.g. 0.95")
    return 0.5 - confidence / 2, 0.5 + confidence / 2
