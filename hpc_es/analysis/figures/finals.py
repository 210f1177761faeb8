"""Figure of the final results of all conditions, as in the tables of the papers.

Invariant: as in the tables, a mean over runs is always shown with its standard deviation, and a single run with the
standard error over its tasks.
"""

from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import MUTED, colour, panels, percent
from hpc_es.analysis.figures.curves import AXIS_LABELS
from hpc_es.analysis.statistics.conditions import outcomes
from hpc_es.analysis.statistics.progress import Measure, measure_of
from hpc_es.analysis.statistics.runs import Runs, conditions_of
from hpc_es.errors import NothingToShow

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def _draw_condition(axes: "Axes", row: int, finals: "pd.DataFrame", tint: str) -> None:
    several = len(finals) > 1
    error = finals["final"].std(ddof=1) if several else finals["standard_error"].iloc[0]
    axes.plot(finals["start"].mean(), row, "o", markerfacecolor="none", markeredgecolor=MUTED, markersize=6)
    if several:
        axes.plot(finals["final"], [row + 0.16] * len(finals), "o", color=tint, alpha=0.45, markersize=3.5)
    axes.errorbar(finals["final"].mean(), row, xerr=error, fmt="o", color=tint, markersize=6, capsize=3)
