"""Figures of how far theta moved, compared with a random walk (statistics/drift.py says which)."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import (
    MUTED,
    colour,
    from_zero,
    legend,
    legend_below,
    log_scale,
    panels,
    percent,
    title,
    whole_numbers,
)
from hpc_es.analysis.statistics.drift import magnitudes, ratio_to_walk, share_within, walk
from hpc_es.analysis.statistics.runs import Runs, conditions_of, labelled
from hpc_es.analysis.statistics.sample import Sample, sample
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_update_norms(runs: Runs) -> "Figure":
    """Plot the norm of every update as the head measured it. Errors: NothingToShow before the first digest."""
    conditions = conditions_of(runs)
    if all(run.updates["update_norm"].isna().all() for condition in conditions for run in condition.runs):
        raise NothingToShow("the norm of no update has been recorded yet")
    figure, ((axes,),) = panels(1, 1, width=10.5, height=2.8)
    for number, condition in enumerate(conditions):
        for place, run in enumerate(condition.runs):
            label = condition.label if place == 0 else None
            updates = run.updates
            axes.plot(updates["version"], updates["update_norm"], color=colour(number), linewidth=1.2, label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("|theta_u - theta_{u-1}|")
    from_zero(axes)
    whole_numbers(axes)
    legend_below(figure, axes, 4)
    return figure


def plot_drift(runs: Runs, model: Path | None = None) -> "Figure":
    """Plot for each run the norm of each update, the distance from theta_0, and its ratio to the random walk.

    The band and the ± in the title are two standard errors, of the sample and of the walk. Errors: NothingToShow if no
    run can be sampled.
    """
    shown, missing = _sampled(runs, model)
    figure, rows = panels(len(shown), 3, width=10.5, height=2.6)
    _name_missing(figure, missing)
    for (left, middle, right), (label, _, found) in zip(rows, shown, strict=True):
        _draw_walks(left, middle, found)
        _draw_ratio(right, found)
        title(left, f"{label}: length of updates")
        title(middle, "distance from theta_0")
    for axes in rows[-1]:
        axes.set_xlabel("updates")
    legend_below(figure, rows[0][1])
    return figure


def plot_magnitudes(runs: Runs, model: Path | None = None) -> "Figure":
    """Plot for each run the distribution of |theta_V - theta_0| over parameters, and that of the random walk.

    Errors: NothingToShow as `plot_drift`.
    """
    shown, missing = _sampled(runs, model)
    figure, rows = panels(-(-len(shown) // 2), min(len(shown), 2), width=10.5, height=2.9)
    _name_missing(figure, missing)
    every = [axes for row in rows for axes in row]
    for axes, (label, run, found) in zip(every, shown, strict=False):
        _draw_magnitudes(axes, found, magnitudes(run, model))
        title(axes, label)
        axes.set_xlabel("|theta_V - theta_0| of a parameter")
    for axes in every[len(shown) :]:
        axes.set_axis_off()
    for row in rows:
        row[0].set_ylabel("share of parameters")
    return figure


# --- panels ------------------------------------------------------------------------------------------------------


def _draw_walks(left: "Axes", middle: "Axes", found: Sample) -> None:
    expected, root = walk(found.commits), math.sqrt(found.num_parameters)
    updates = [commit.version for commit in found.commits]
    pairs = (
        (left, found.norms, found.norm_errors, expected.steps),
        (middle, found.distances, found.distance_errors, expected.distances),
    )
    for axes, values, errors, walking in pairs:
        axes.plot(updates, values, color=colour(0), linewidth=1.6, label="theta, from a sample of its parameters")
        axes.fill_between(updates, values - 2 * errors, values + 2 * errors, color=colour(0), alpha=0.2)
        axes.plot(
            updates, root * walking, color="black", linewidth=1, linestyle="--", label="random walk, same schedule"
        )
        from_zero(axes)
        whole_numbers(axes)


def _draw_ratio(axes: "Axes", found: Sample) -> None:
    updates, ratio, error = ratio_to_walk(found)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.plot(updates, ratio, color=colour(0), linewidth=1.6)
    axes.fill_between(updates, ratio - 2 * error, ratio + 2 * error, color=colour(0), alpha=0.2)
    whole_numbers(axes)
    last = f"{ratio[-1]:.4f} ± {2 * error[-1]:.4f}" if len(ratio) else "no change"
    title(axes, f"distance / walk: {last}")


def _draw_magnitudes(axes: "Axes", found: Sample, table: "pd.DataFrame") -> None:
    import numpy as np

    moved = np.sort(np.abs(found.changes))
    deviation = float(walk(found.commits).distances[-1])
    grid = np.geomspace(max(moved[-1], deviation, 1e-30) * 1e-2, max(moved[-1], deviation, 1e-30) * 1.2, 300)
    axes.plot(
        grid, np.searchsorted(moved, grid, side="right") / moved.size, color=colour(0), linewidth=2, label="theta"
    )
    walking = [share_within(float(value), deviation) for value in grid]
    axes.plot(grid, walking, color="black", linewidth=1, linestyle="--", label="random walk, same schedule")
    for threshold in table["threshold"].tolist():
        if grid[0] < threshold < grid[-1]:
            axes.axvline(threshold, color=MUTED, linewidth=0.7, linestyle=":", zorder=1.6)
    log_scale(axes)
    percent(axes)
    lines = [
        f"≤ {row.threshold:g} ({row.sigmas:.3g} sigma):  {row.share:.2%}  "
        f"(walk {row.walk:.2%} ± {row.standard_error:.2%})"
        for row in table.itertuples()
    ]
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
    text = axes.text(
        0.02, 0.97, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7, color=MUTED, bbox=box
    )
    text.set_zorder(1.8)  # behind the curves, in front of the thresholds
    legend(axes, loc="lower right")


def _sampled(runs: Runs, model: Path | None) -> tuple[list[tuple[str, Run, Sample]], list[str]]:
    """Runs that can be sampled, and the labels of the others. Errors: NothingToShow if none can be sampled."""
    shown, reasons = list[tuple[str, Run, Sample]](), dict[str, NothingToShow]()
    for label, run in labelled(runs):
        try:
            shown.append((label, run, sample(run, model)))
        except NothingToShow as reason:
            reasons[label] = reason
    if not shown:
        raise next(iter(reasons.values()), NothingToShow("there are no runs"))
    return shown, list(reasons)


def _name_missing(figure: "Figure", labels: list[str]) -> None:
    if labels:
        text = f"not shown, since base model or journal is missing: {', '.join(labels)}"
        figure.suptitle(text, x=0.01, ha="left", fontsize=8, color=MUTED)
