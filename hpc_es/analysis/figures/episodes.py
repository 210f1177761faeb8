"""What episodes were like over a run: tokens and turns, with and without success, and the brackets of a staircase.

Invariant: means are per episode of the members that an update consumed, so that a cohort is described by what moved
theta; the unperturbed policy is shown beside it.
"""

from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import (
    MUTED,
    colour,
    from_zero,
    lag_colours,
    legend,
    legend_below,
    panels,
    title,
    whole_numbers,
)
from hpc_es.analysis.statistics.progress import TRAILING_UPDATES
from hpc_es.analysis.statistics.runs import (
    Condition,
    Runs,
    compared_settings,
    conditions_of,
    is_staircase,
    labelled,
    settings,
    staleness_label,
)
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LENGTHS = {"turns": "turns", "tokens_out": "generated tokens", "tokens_in": "prompt tokens"}
"""Column of `episodes`, and what to call it."""
LOW, HIGH = 0.1, 0.9
REFERENCES = ("Sync", "Async-1")
"""Schedules that a staircase is held against."""


def per_update(run: Run) -> "pd.DataFrame":
    """Index update; mean turns, tokens_in and tokens_out per episode of its cohort."""
    rows = run.evaluations
    rows = rows[(rows["kind"] == "train") & (rows["status"] == "accepted")]
    return _per_episode(rows, rows["consumed_version"].astype(int) + 1).rename_axis("update")


def per_version(run: Run) -> "pd.DataFrame":
    """Index version; the same of the unperturbed policy on held-out tasks, where the run evaluated it."""
    rows = run.evaluations
    rows = rows[(rows["kind"] == "eval") & (rows["status"] == "accepted") & (rows["source"] == "run")]
    return _per_episode(rows, rows["dispatch_version"].astype(int)).rename_axis("version")


def lengths(run: Run) -> "pd.DataFrame":
    """Lengths of the episodes of each cohort, one row for those that succeeded and one for those that did not.

    Columns: update, success, num_episodes; and for each of turns, tokens_out and tokens_in the `_mean` and the
    quantiles LOW, 0.5 and HIGH as `_low`, `_median` and `_high`.
    """
    key = ["source", "dispatch_version", "slot", "replacement"]
    consumed = run.evaluations[(run.evaluations["kind"] == "train") & (run.evaluations["status"] == "accepted")]
    members = run.episodes[run.episodes["kind"] == "train"].merge(consumed[[*key, "consumed_version"]], on=key)
    members["update"] = members["consumed_version"].astype(int) + 1
    groups = members.groupby(["update", "success"])
    found = groups.size().rename("num_episodes").to_frame()
    for what in _LENGTHS:
        found[f"{what}_mean"] = groups[what].mean()
        for name, share in (("low", LOW), ("median", 0.5), ("high", HIGH)):
            found[f"{what}_{name}"] = groups[what].quantile(share)
    return found.reset_index()


def brackets(run: Run) -> "pd.DataFrame":
    """One row per step of a staircase that the run has reached: update, lag, before (fitness of the cohort before),
    at (of the cohort of the step, measured around an old theta again), start (of the first cohort), and standard
    errors over members (before_error, at_error, start_error). Empty for other schedules."""
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


def plot_episodes(runs: Runs) -> "Figure":
    """Turns, generated tokens and prompt tokens per episode over the updates: cohorts (lines, trailing mean over five,
    but raw for a staircase) and the unperturbed policy (dots); runs of a condition are averaged.
    Errors: NothingToShow without a commit."""
    conditions = conditions_of(runs)
    if not any(len(run.updates) for condition in conditions for run in condition.runs):
        raise NothingToShow("no update has been committed yet")
    figure, (row,) = panels(1, 3, width=10.5, height=3.1)
    for axes, (what, text) in zip(row, _LENGTHS.items(), strict=True):
        for number, condition in enumerate(conditions):
            cohorts = _mean_over([per_update(run)[what] for run in condition.runs])
            window = 1 if is_staircase(condition.runs[0]) else TRAILING_UPDATES
            trailing = cohorts.rolling(window, min_periods=1).mean()
            axes.plot(cohorts.index, cohorts, color=colour(number), alpha=0.3, linewidth=0.9)
            axes.plot(cohorts.index, trailing, color=colour(number), linewidth=1.8, label=condition.label)
            policy = _mean_over([per_version(run)[what] for run in condition.runs])
            axes.plot(policy.index, policy, "o", color=colour(number), markersize=4, markeredgecolor="white")
        title(axes, f"{text} per episode")
        axes.set_xlabel("updates")
        from_zero(axes)
        whole_numbers(axes)
    legend_below(figure, row[0], 4)
    return figure


def plot_lengths(runs: Runs) -> "Figure":
    """Per run: turns, generated and prompt tokens of the episodes of each cohort, those that succeeded apart from those
    that did not; lines are means, bands go from the quantile of 10 % to that of 90 %. Errors: NothingToShow."""
    shown = [(label, lengths(run)) for label, run in labelled(runs) if len(run.updates)]
    if not shown:
        raise NothingToShow("no update has been committed yet")
    figure, rows = panels(len(shown), 3, width=10.5, height=2.6)
    for row, (label, table) in zip(rows, shown, strict=True):
        for axes, (what, text) in zip(row, _LENGTHS.items(), strict=True):
            for success, tint in ((True, colour(2)), (False, colour(1))):
                mine = table[table["success"] == success]
                axes.fill_between(mine["update"], mine[f"{what}_low"], mine[f"{what}_high"], color=tint, alpha=0.15)
                name = "succeeded" if success else "did not succeed"
                axes.plot(mine["update"], mine[f"{what}_mean"], ".-", color=tint, markersize=3, label=name)
            axes.set_ylabel(text)
            from_zero(axes)
            whole_numbers(axes)
        title(row[0], label)
    for axes in rows[-1]:
        axes.set_xlabel("updates")
    legend_below(figure, rows[0][0], 2)
    return figure


def plot_brackets(runs: Runs, references: Runs = ()) -> "Figure":
    """Per run with a staircase: raw fitness of every cohort, coloured by lag; at each step (vertical line) it should
    fall back to that of the first cohort (dotted). Behind it the raw fitness of Sync and Async-1 runs among
    `references` whose settings differ in nothing but the schedule, the mean over the runs of each.
    Errors: NothingToShow where no staircase has reached a step."""
    beside = [condition for condition in conditions_of(references) if condition.runs]
    shown = [(label, run, found) for label, run in labelled(runs) if not (found := brackets(run)).empty]
    if not shown:
        raise NothingToShow("no run is a staircase that has reached its second step")
    figure, rows = panels(len(shown), 1, width=10.5, height=2.9)
    for (axes,), (label, run, found) in zip(rows, shown, strict=True):
        _draw_references(axes, [condition for condition in beside if _is_reference(condition, run)])
        _draw_brackets(axes, label, run, found)
    rows[-1][0].set_xlabel("updates")
    return figure


def _is_reference(condition: Condition, run: Run) -> bool:
    """Sync or Async-1, and otherwise the same experiment as `run`."""
    if _schedule(condition) not in REFERENCES:
        return False
    mine, theirs = (
        {key: value for key, value in compared_settings(each).items() if not key.startswith("staleness.")}
        for each in (run, condition.runs[0])
    )
    return mine == theirs


def _schedule(condition: Condition) -> str:
    return staleness_label(settings(condition.runs[0]).get("staleness", {}))


def _draw_references(axes: "Axes", conditions: list[Condition]) -> None:
    for condition in conditions:
        fitness = _mean_over([run.updates.set_index("version")["fitness_mean"].astype(float) for run in condition.runs])
        schedule = _schedule(condition)
        dashes = "-" if schedule == REFERENCES[0] else "--"
        axes.plot(fitness.index, fitness, color=MUTED, linestyle=dashes, linewidth=1, alpha=0.8, label=schedule)


def _draw_brackets(axes: "Axes", label: str, run: Run, found: "pd.DataFrame") -> None:
    updates = run.updates
    error = updates["fitness_std"] / updates["num_members"] ** 0.5
    axes.axhline(found["start"][0], color="black", linestyle=":", linewidth=1)
    for lag, tint in lag_colours(updates["lag_max"].astype(int).tolist()).items():
        mine = updates["lag_max"] == lag
        places = updates["version"][mine], updates["fitness_mean"][mine], error[mine]
        axes.errorbar(*places, fmt="o", color=tint, markersize=3, linewidth=0.8, label=f"lag {lag}")
    top = axes.get_ylim()[1]
    for step in found.itertuples():
        axes.axvline(float(str(step.update)) - 0.5, color="black", linewidth=0.8)
        text = f"{step.before:.3g} → {step.at:.3g}"
        axes.annotate(
            text, (float(str(step.update)), top), xytext=(2, -2), textcoords="offset points", fontsize=8, va="top"
        )
    axes.set_ylabel("fitness of the cohort")
    whole_numbers(axes)
    title(axes, f"{label}: the first cohort had {found['start'][0]:.3g} ± {found['start_error'][0]:.2g}")
    legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _per_episode(rows: "pd.DataFrame", by: "pd.Series[int]") -> "pd.DataFrame":
    columns = ["turns", "tokens_in", "tokens_out", "num_tasks"]
    sums = rows[columns].astype(float).groupby(by.to_numpy()).sum()
    return sums[columns[:3]].div(sums["num_tasks"], axis=0)


def _mean_over(series: "list[pd.Series[float]]") -> "pd.Series[float]":
    """At each update, over the runs that have reached it."""
    import pandas as pd

    return pd.concat(series, axis=1).mean(axis=1).sort_index()
