"""Lengths of episodes over a run, by success, and the brackets of a staircase.

Invariant: means are per episode of the members that an update consumed, since those are what moved theta. The
unperturbed policy has numbers of its own.
"""

from typing import TYPE_CHECKING

from hpc_es.analysis.statistics.runs import Condition, compared_settings, settings, staleness_label
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = {"turns": "turns", "tokens_out": "generated tokens", "tokens_in": "prompt tokens"}
"""Columns of `episodes` that measure length, with their labels."""
LOW, HIGH = 0.1, 0.9
"""Outer quantiles of `lengths`."""
REFERENCES = ("Sync", "Async-1")
"""Schedules that a staircase is compared with."""


def per_update(run: Run) -> "pd.DataFrame":
    """Mean turns, tokens_in and tokens_out per episode of each cohort. Index: update."""
    rows = run.evaluations
    rows = rows[(rows["kind"] == "train") & (rows["status"] == "accepted")]
    return _per_episode(rows, rows["consumed_version"].astype(int) + 1).rename_axis("update")


def per_version(run: Run) -> "pd.DataFrame":
    """The same for the unperturbed policy on held-out tasks, at the versions that the run evaluated. Index: version."""
    rows = run.evaluations
    rows = rows[(rows["kind"] == "eval") & (rows["status"] == "accepted") & (rows["source"] == "run")]
    return _per_episode(rows, rows["dispatch_version"].astype(int)).rename_axis("version")


def lengths(run: Run) -> "pd.DataFrame":
    """Lengths of the episodes of each cohort, successful and unsuccessful ones separately.

    Columns: update, success, num_episodes, and for each of LENGTHS its `_mean` and its quantiles `_low` (LOW),
    `_median` and `_high` (HIGH).
    """
    key = ["source", "dispatch_version", "slot", "replacement"]
    consumed = run.evaluations[(run.evaluations["kind"] == "train") & (run.evaluations["status"] == "accepted")]
    members = run.episodes[run.episodes["kind"] == "train"].merge(consumed[[*key, "consumed_version"]], on=key)
    members["update"] = members["consumed_version"].astype(int) + 1
    groups = members.groupby(["update", "success"])
    found = groups.size().rename("num_episodes").to_frame()
    for what in LENGTHS:
        found[f"{what}_mean"] = groups[what].mean()
        for name, share in (("low", LOW), ("median", 0.5), ("high", HIGH)):
            found[f"{what}_{name}"] = groups[what].quantile(share)
    return found.reset_index()


def brackets(run: Run) -> "pd.DataFrame":
    """One row per step that a staircase run has reached; empty for other schedules.

    Columns: update, lag, and the fitness of three cohorts with its standard errors over members: start (start_error) is
    the first cohort, before (before_error) the one preceding the step, and at (at_error) the one of the step itself,
    which was measured around an old theta again.
    """
    import pandas as pd

    names = ["update", "lag", "start", "start_error", "before", "before_error", "at", "at_error"]
    staleness, updates = settings(run).get("staleness", {}), run.updates.sort_values("version")
    fitness = updates["fitness_mean"].to_numpy(float)
    errors = (updates["fitness_std"] / updates["num_members"] ** 0.5).to_numpy(float)
    rows = []
    for update, lag in staleness.get("steps", ()) if staleness.get("mode") == "staircase" else ():
        if 1 < update <= len(updates):
            first, before, at = ((fitness[place - 1], errors[place - 1]) for place in (1, update - 1, update))
            rows.append([update, lag, *first, *before, *at])
    return pd.DataFrame(rows, columns=names)


def mean_over_runs(series: "list[pd.Series[float]]") -> "pd.Series[float]":
    """Mean at each update over the runs that have reached it."""
    import pandas as pd

    return pd.concat(series, axis=1).mean(axis=1).sort_index()


def is_reference(condition: Condition, run: Run) -> bool:
    """Whether a condition has one of the REFERENCES as its schedule and otherwise the settings of `run`."""
    if schedule_of(condition) not in REFERENCES:
        return False
    mine, theirs = (
        {key: value for key, value in compared_settings(each).items() if not key.startswith("staleness.")}
        for each in (run, condition.runs[0])
    )
    return mine == theirs


def schedule_of(condition: Condition) -> str:
    """Name of a condition's schedule, as the asynchronous-ES paper writes it."""
    return staleness_label(settings(condition.runs[0]).get("staleness", {}))


def _per_episode(rows: "pd.DataFrame", by: "pd.Series[int]") -> "pd.DataFrame":
    columns = ["turns", "tokens_in", "tokens_out", "num_tasks"]
    sums = rows[columns].astype(float).groupby(by.to_numpy()).sum()
    return sums[columns[:3]].div(sums["num_tasks"], axis=0)
