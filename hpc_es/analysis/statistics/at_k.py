"""pass@k, mean@k and max@k: what k attempts at a task achieve, estimated without bias from n >= k repeats.

Invariant: every estimate is the exact mean over all ways to choose k of a task's n repeats, so it does not depend
on their order. The task is the unit of the interval. Values are arrays [tasks, repeats].

mean@k of success equals pass@1 for every k.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics.held_out import by_repeat, episodes
from hpc_es.analysis.statistics.intervals import Interval, bootstrap_mean
from hpc_es.errors import ConfigError, NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import ArrayLike

    Array = np.ndarray[Any, np.dtype[Any]]

KS = (1, 2, 4, 8, 16, 32)
"""Values of k in a curve, up to the number of repeats."""


@dataclass(frozen=True)
class AtK:
    """An estimate at one k: its mean over tasks, and the 95 % interval over tasks."""

    k: int
    mean: float
    interval: Interval


Estimator = Callable[["ArrayLike", int], AtK]


def pass_at_k(successes: "ArrayLike", k: int) -> AtK:
    """Share of tasks that at least one of k attempts solves: 1 - C(n-c, k) / C(n, k) for c successes among n
    (Chen et al., 2021). Successes are bool, or 0 and 1. Errors: ConfigError with fewer than k repeats."""
    import numpy as np

    return max_at_k(np.asarray(successes) > 0, k)  # the best of k is 1 exactly when one of them is


def mean_at_k(values: "ArrayLike", k: int) -> AtK:
    """Mean of k attempts, which is the mean of all n for every k. Errors: ConfigError with fewer than k repeats."""
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


def curve(estimator: Estimator, values: "ArrayLike") -> tuple[AtK, ...]:
    """Estimates at each k of KS up to the number of repeats."""
    num_repeats = _repeats(values, 1).shape[1]
    return tuple(estimator(values, k) for k in KS if k <= num_repeats)


# --- of runs -----------------------------------------------------------------------------------------------------

_CURVES: tuple[tuple[str, str, Estimator], ...] = (
    ("pass@k", "success", pass_at_k),
    ("mean@k", "success", mean_at_k),
    ("max@k", "reward", max_at_k),
    ("mean@k", "reward", mean_at_k),
)
"""Name of each curve, the measure it is computed from, and its estimator."""


def at_k(run: Run, version: int | None = None) -> "pd.DataFrame":
    """pass@k and mean@k of success, max@k and mean@k of reward, for a version whose tasks were played repeatedly.

    Uses the run's own protocol (tasks, decoding) if it has repeats, else that of the last version with repeats.
    `version=None` means the first and the last such version.
    Columns: source, version, protocol, num_tasks, num_repeats, name, of, k, mean, low, high.
    Errors: NothingToShow, which lists the versions with repeats.
    """
    import pandas as pd

    frames = []
    for row in _repeated(run, version).itertuples():
        played = episodes(run, int(str(row.version)), str(row.source))
        facts: dict[str, Any] = {"source": row.source, "version": row.version, "protocol": row.protocol}
        for name, of, estimator in _CURVES:
            values = by_repeat(played, of)
            facts |= {"num_tasks": values.shape[0], "num_repeats": values.shape[1], "name": name, "of": of}
            points = [(point.k, point.mean, *point.interval) for point in curve(estimator, values)]
            table = pd.DataFrame(points, columns=["k", "mean", "low", "high"])
            frames.append(table.assign(**facts)[[*facts, *table.columns]])
    return pd.concat(frames, ignore_index=True)


def _repeated(run: Run, version: int | None) -> "pd.DataFrame":
    """Rows of `run.evals` with repeats, one per version: the one with most, by one protocol. Errors: NothingToShow."""
    evals = run.evals[(run.evals["num_tasks"] > 0) & (run.evals["num_repeats"] > 1).fillna(False)]
    if evals.empty:
        raise NothingToShow("no version has played its held-out tasks more than once (eval.repeats)")
    rows = evals if version is None else evals[evals["version"] == version]
    if rows.empty:
        known = ", ".join(str(known) for known in sorted(set(evals["version"])))
        raise NothingToShow(f"version {version} has not played its held-out tasks more than once, only {known}")
    rows = rows.sort_values(["version", "num_repeats", "num_tasks", "time"])
    own, protocols = rows[~rows["other_protocol"]], rows["protocol_digest"].fillna(0)
    rows = rows[protocols == protocols.iloc[-1]] if own.empty else own
    return rows.drop_duplicates("version", keep="last").iloc[[0, -1]].drop_duplicates("version")


def _repeats(values: "ArrayLike", k: int) -> "Array":
    """Check and convert values to an array [tasks, repeats]. Errors: ConfigError."""
    import numpy as np

    array = np.asarray(values, float)
    if array.ndim != 2 or array.size == 0:
        raise ConfigError(f"values of the shape {array.shape} must be [tasks, repeats], at least one of each")
    if k < 1:
        raise ConfigError(f"k={k} must be at least 1")
    if k > array.shape[1]:
        raise ConfigError(
            f"k={k} attempts need at least {k} repeats of every task, but there are {array.shape[1]}: "
            f"set eval.repeats={k}"
        )
    return array
