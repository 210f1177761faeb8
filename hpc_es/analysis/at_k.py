"""What k attempts at a task are worth: pass@k, mean@k and max@k, estimated without bias from n >= k repeats.

Invariant: every estimate is the exact mean over all ways to choose k of a task's n repeats, so that it does not depend
on their order; the task is the unit of the interval. Values are arrays [tasks, repeats].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.intervals import Interval, bootstrap_mean
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    Array = np.ndarray[Any, np.dtype[Any]]

KS = (1, 2, 4, 8, 16, 32)
"""Of a curve, as far as there are repeats."""


@dataclass(frozen=True)
class AtK:
    """The mean over tasks, and its 95 % interval over tasks."""

    k: int
    mean: float
    interval: Interval


Estimator = Callable[["ArrayLike", int], AtK]


def pass_at_k(successes: "ArrayLike", k: int) -> AtK:
    """Share of tasks of which at least one of k attempts succeeds: 1 - C(n-c, k) / C(n, k) for c successes among n
    (Chen et al., 2021). Successes are bool, or 0 and 1. Errors: ConfigError with fewer than k repeats."""
    import numpy as np

    return max_at_k(np.asarray(successes) > 0, k)  # the best of k is 1 exactly when one of them is


def mean_at_k(values: "ArrayLike", k: int) -> AtK:
    """Mean of k attempts: the mean of all n, whatever k is. Errors: ConfigError with fewer than k repeats."""
    array = _repeats(values, k)
    return AtK(k, float(array.mean()), bootstrap_mean(array))


def max_at_k(rewards: "ArrayLike", k: int) -> AtK:
    """Best of k attempts: the i-th smallest of n rewards is the largest of C(i-1, k-1) among the C(n, k) choices.

    Errors: ConfigError with fewer than k repeats.
    """
    import numpy as np

    array = _repeats(rewards, k)
    num_repeats = array.shape[1]
    choices = math.comb(num_repeats, k)
    weights = np.array([math.comb(rank, k - 1) / choices for rank in range(num_repeats)])  # Python divides exactly
    means = np.sort(array, axis=1) @ weights
    return AtK(k, float(means.mean()), bootstrap_mean(means))


ESTIMATORS: dict[str, Estimator] = {"pass@k": pass_at_k, "mean@k": mean_at_k, "max@k": max_at_k}
"""pass@k and mean@k of success, max@k of reward."""


def curve(estimator: Estimator, values: "ArrayLike") -> tuple[AtK, ...]:
    """The estimate at each k of KS that there are repeats for."""
    num_repeats = _repeats(values, 1).shape[1]
    return tuple(estimator(values, k) for k in KS if k <= num_repeats)


def _repeats(values: "ArrayLike", k: int) -> "Array":
    """[tasks, repeats]. Errors: ConfigError."""
    import numpy as np

    array = np.asarray(values, float)
    if array.ndim != 2 or array.size == 0:
        raise ConfigError(f"values of the shape {array.shape} must be [tasks, repeats], at least one of each")
    if k < 1:
        raise ConfigError(f"k={k} attempts are none: k must be at least 1")
    if k > array.shape[1]:
        raise ConfigError(
            f"k={k} attempts need at least {k} repeats of every task, there are {array.shape[1]}: eval.repeats={k} "
            "plays so many"
        )
    return array
