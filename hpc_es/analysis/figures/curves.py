"""Figures of learning: fitness of cohorts and evaluations of the policy, over updates or cost, and final results.

Invariant: the runs of a condition are drawn as their mean with its standard deviation, never as one lucky run. A single
run shows the standard error of its evaluations over the tasks.
"""

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.figures.canvas import MUTED, colour, legend_below, panels, percent, thousands, title, whole_numbers
from hpc_es.analysis.statistics.conditions import outcomes, table
from hpc_es.analysis.statistics.held_out import Ceiling, at_most, ceiling
from hpc_es.analysis.statistics.progress import (
    COSTS,
    TRAILING_UPDATES,
    Cost,
    Measure,
    check_cost,
    evaluated,
    evaluated_with_costs,
    mean_over_runs,
    measure_column,
    measure_of,
    progress,
    seconds_cost,
)
from hpc_es.analysis.statistics.runs import Condition, Runs, conditions_of, is_staircase
from hpc_es.analysis.statistics.text_table import mean_and_sd
from hpc_es.errors import NothingToShow

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_LABELS: dict[str, str] = {"success": "success on held-out tasks", "fitness": "mean reward on held-out tasks"}


def plot_learning_curve(runs: Runs, x: Cost = "updates", measure: Measure | None = None) -> "Figure":
    """Plot the fitness of cohorts (left) and evaluations of the unperturbed policy with their peak (right).

    Fitness is the mean of each cohort (thin) and its trailing mean over five updates (thick). For a staircase only the
    raw fitness is shown, since its drops at the steps are the purpose of the run. `measure=None` means success, or
    fitness if no task was ever solved. Errors: ConfigError for an unknown x or measure; NothingToShow.
    """
    check_cost(x)
    conditions = conditions_of(runs)
    measure = measure or measure_of(run for condition in conditions for run in condition.runs)
    if not any(len(run.updates) or len(run.evals) for condition in conditions for run in condition.runs):
        raise NothingToShow("no update has been committed and no policy evaluated yet")
    if x == "gpu_seconds" and seconds_cost(run for condition in conditions for run in condition.runs) != x:
        raise NothingToShow("not every run has workers that reported a GPU; x='worker_seconds' compares them all")
    figure, ((left, right),) = panels(1, 2, width=10.5, height=3.9)
    rows = {str(row["condition"]): row for row in table(runs, measure).to_dict("records")}
    for number, condition in enumerate(conditions):
        _draw_fitness(left, condition, x, colour(number))
        _draw_evaluations(right, condition, x, measure, colour(number), _legend(rows[condition.label], measure))
    title(left, _training_title(conditions))
    left.set_ylabel("fitness (mean episode reward)")
    title(right, "Unperturbed policy, ★ its peak")
    right.set_ylabel(_held_out_label(conditions, measure))
    _dress(right, conditions, measure)
    for axes in (left, right):
        _label_x(axes, x)
    legend_below(figure, right, 2)
    return figure


def plot_costs(runs: Runs, measure: Measure | None = None) -> "Figure":
    """Plot evaluations of the unperturbed policy over four costs: members rolled out, tokens, busy time and wall-clock.

    Busy time is in GPU-seconds, or in worker-seconds if a run has no GPU. Errors: NothingToShow without evaluations.
    """
    conditions = conditions_of(runs)
    measure = measure or measure_of(run for condition in conditions for run in condition.runs)
    if all(evaluated(run).empty for condition in conditions for run in condition.runs):
        raise NothingToShow("no policy has been evaluated on held-out tasks")
    figure, rows = panels(2, 2, width=10.5, height=2.9)
    seconds = seconds_cost(run for condition in conditions for run in condition.runs)
    costs: tuple[Cost, ...] = ("evaluations", "tokens", seconds, "wall_clock_s")
    for axes, cost in zip((axes for row in rows for axes in row), costs, strict=True):
        for number, condition in enumerate(conditions):
            _draw_evaluations(axes, condition, cost, measure, colour(number), condition.label)
        _label_x(axes, cost)
        _dress(axes, conditions, measure)
    for row in rows:
        row[0].set_ylabel(_held_out_label(conditions, measure))
    legend_below(figure, rows[0][0], 4)
    return figure


def plot_finals(runs: Runs, measure: Measure | None = None) -> "Figure":
    """Plot one row per condition: the final evaluation of each run, their mean and deviation, and theta_0.

    `measure=None` means success, or fitness if no task was ever solved. Errors: NothingToShow without evaluations.
    """
    conditions = conditions_of(runs)
    measure = measure or measure_of(run for condition in conditions for run in condition.runs)
    per_run = outcomes(runs, measure).dropna(subset=["final"])
    if per_run.empty:
        raise NothingToShow("no policy has been evaluated on held-out tasks")
    groups = list(per_run.groupby("condition", sort=False))
    figure, ((axes,),) = panels(1, 1, width=7.5, height=0.8 + 0.34 * len(groups))
    axes.axvline(groups[0][1]["final"].mean(), color=colour(0), linestyle="--", linewidth=1, alpha=0.6)
    for row, (_, finals) in enumerate(groups):
        _draw_condition(axes, row, finals, colour(row))
    axes.set_yticks(range(len(groups)), [f"{label} ({len(finals)})" for label, finals in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{AXIS_LABELS[measure]}, final (number of runs in brackets)")
    if measure == "success":
        percent(axes, "x")
    return figure


def _training_title(conditions: Sequence[Condition]) -> str:
    raw = [is_staircase(condition.runs[0]) for condition in conditions]
    if all(raw):
        return "Training: cohort fitness, raw"
    exception = ", raw for a staircase" if any(raw) else ""
    return f"Training: cohort fitness, mean of {TRAILING_UPDATES} updates{exception}"


def _draw_fitness(axes: "Axes", condition: Condition, x: Cost, tint: str) -> None:
    frames = [progress(run)[1:] for run in condition.runs if len(run.updates)]
    if not frames:
        return
    shown = "fitness" if is_staircase(condition.runs[0]) else "trailing"
    for frame in frames:
        thin = frame["fitness"] if len(frames) == 1 else frame[shown]
        axes.plot(frame[x], thin, color=tint, alpha=0.3, linewidth=0.9)
    mean, deviation = mean_over_runs(frames, x, shown)
    axes.plot(mean[x], mean[shown], color=tint, linewidth=2)
    axes.fill_between(mean[x], mean[shown] - deviation, mean[shown] + deviation, color=tint, alpha=0.15)


def _draw_evaluations(axes: "Axes", condition: Condition, x: Cost, measure: Measure, tint: str, label: str) -> None:
    column = measure_column(measure)
    frames = [frame for run in condition.runs if not (frame := evaluated_with_costs(run, measure)).empty]
    if not frames:
        return
    mean, deviation = mean_over_runs(frames, x, column)
    if len(frames) == 1:
        error = frames[0]["error"]
    else:
        error = deviation
        for frame in frames:
            axes.plot(frame[x], frame[column], color=tint, alpha=0.25, linewidth=0.8)
    axes.errorbar(mean[x], mean[column], error, color=tint, fmt="o-", markersize=4, capsize=2.5, label=label)
    best = mean.loc[[mean[column].idxmax()]]
    axes.plot(best[x], best[column], "*", color=tint, markersize=13, markeredgecolor="white")


def _draw_condition(axes: "Axes", row: int, finals: "pd.DataFrame", tint: str) -> None:
    several = len(finals) > 1
    error = finals["final"].std(ddof=1) if several else finals["standard_error"].iloc[0]
    axes.plot(finals["start"].mean(), row, "o", markerfacecolor="none", markeredgecolor=MUTED, markersize=6)
    if several:
        axes.plot(finals["final"], [row + 0.16] * len(finals), "o", color=tint, alpha=0.45, markersize=3.5)
    axes.errorbar(finals["final"].mean(), row, xerr=error, fmt="o", color=tint, markersize=6, capsize=3)


def _legend(row: "dict[Hashable, Any]", measure: Measure) -> str:
    """Legend of a condition: "Sync: peak 24.5 ± 10.1 % at update 13, final 23.2 ± 9.8 % (3 runs)"."""
    if math.isnan(row["peak_mean"]):
        return str(row["condition"])
    scale, digits, unit = (100, 1, " %") if measure == "success" else (1, 4, "")
    peak = mean_and_sd(row["peak_mean"], row["peak_sd"], scale, digits)
    final = mean_and_sd(row["final_mean"], row["final_sd"], scale, digits)
    several = f" ({row['num_runs']:.0f} runs)" if row["num_runs"] > 1 else ""
    where = f"{row['peak_update_mean']:.0f}"
    return f"{row['condition']}: peak {peak}{unit} at update {where}, final {final}{unit}{several}"


def _label_x(axes: "Axes", x: Cost) -> None:
    axes.set_xlabel(COSTS[x])
    if x == "updates":
        whole_numbers(axes)
    else:
        thousands(axes)


def _held_out_label(conditions: Sequence[Condition], measure: Measure) -> str:
    """Label of the y axis, with the ceiling of success if it is below 1."""
    highest = at_most(_ceilings(conditions, measure))
    return AXIS_LABELS[measure] + (f"\n(dotted: the ceiling, {highest})" if highest else "")


def _dress(axes: "Axes", conditions: Sequence[Condition], measure: Measure) -> None:
    if measure == "success":
        percent(axes)
    for known in _ceilings(conditions, measure):
        axes.axhline(known.share, color=MUTED, linestyle=":", linewidth=1)


def _ceilings(conditions: Sequence[Condition], measure: Measure) -> set[Ceiling]:
    if measure != "success":
        return set()
    return {known for condition in conditions for run in condition.runs if (known := ceiling(run)) is not None}
