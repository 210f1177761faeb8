"""Where the seconds of an evaluation go: how long it takes, where it waits, and which results are discarded.

Invariant: flight is from the lease to the journalled result, queue from there to the commit that consumes it; both on
the head's clock. Durations are the worker's own, by its monotonic clock.
"""

import math
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics.progress import busy_seconds, tokens
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

NUM_RESAMPLES = 2_000
MIN_FOR_INTERVAL = 5
"""Smallest number of consumed and of discarded members for a bootstrap interval to mean something."""


def members(run: Run) -> "pd.DataFrame":
    """One row per member that returned a result.

    Columns: status, worker, lag, update (that consumed or refused it), seconds, turns and tokens per episode, and three
    waiting times in s: unleased (from plan to lease), flight (from lease to receipt) and queue (from receipt to the
    commit that consumed it; NaN if none did).
    """
    import pandas as pd

    rows = run.evaluations
    rows = rows[(rows["kind"] == "train") & rows["time_received"].notna() & (rows["error"] == "")]
    committed = pd.Series(run.updates["time_committed"].to_numpy(float), index=run.updates["version"] - 1)
    lag = rows["lag"].astype("Float64").astype(float)
    return pd.DataFrame(
        {
            "status": rows["status"],
            "worker": rows["worker"],
            "lag": lag,
            "update": lag + rows["dispatch_version"] + 1,
            "seconds": busy_seconds(rows),
            "turns": rows["turns"].astype("Float64").astype(float) / rows["num_tasks"],
            "tokens": tokens(rows) / rows["num_tasks"],
            "unleased": rows["time_leased"] - rows["time_planned"],
            "flight": rows["time_received"] - rows["time_leased"],
            "queue": rows["consumed_version"].astype("Float64").astype(float).map(committed) - rows["time_received"],
        }
    )


def discard_bias(run: Run) -> "pd.DataFrame":
    """Whether discarded members took longer than consumed ones. Rows: seconds per evaluation, turns and tokens per
    episode. Columns: consumed, discarded (means), num_consumed, num_discarded, difference, low, high (95 % percentile
    bootstrap of the difference of means with a fixed seed; NaN with fewer than five of either)."""
    import numpy as np
    import pandas as pd

    found, generator = members(run), np.random.default_rng(0)
    rows = {}
    for what in ("seconds", "turns", "tokens"):
        consumed = found.loc[found["status"] == "accepted", what].dropna().to_numpy(float)
        discarded = found.loc[found["status"] == "discarded", what].dropna().to_numpy(float)
        if not len(consumed) or not len(discarded):
            continue
        low = high = math.nan
        if min(len(consumed), len(discarded)) >= MIN_FOR_INTERVAL:
            resampled = _resampled_means(discarded, generator) - _resampled_means(consumed, generator)
            low, high = np.percentile(resampled, [2.5, 97.5])
        means = float(consumed.mean()), float(discarded.mean())
        rows[what] = {
            "consumed": means[0],
            "discarded": means[1],
            "num_consumed": len(consumed),
            "num_discarded": len(discarded),
            "difference": means[1] - means[0],
            "low": float(low),
            "high": float(high),
        }
    names = ["consumed", "discarded", "num_consumed", "num_discarded", "difference", "low", "high"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("of")


def seconds_by_update(run: Run) -> "pd.DataFrame":
    """Worker-seconds that each update consumed and refused. Index: update; columns: accepted, discarded."""
    found = members(run).dropna(subset="update")
    spent = found.groupby(["update", "status"])["seconds"].sum().unstack(fill_value=0)
    return spent.reindex(columns=["accepted", "discarded"], fill_value=0.0)


def _resampled_means(values: "np.ndarray[Any, Any]", generator: "np.random.Generator") -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.array([values[generator.integers(0, len(values), len(values))].mean() for _ in range(NUM_RESAMPLES)])
