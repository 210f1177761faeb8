"""Figure of success against horizon, the smallest number of turns that solves a task."""

from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import colour, legend_below, panels, percent, title, whole_numbers
from hpc_es.analysis.statistics.horizon import horizons
from hpc_es.analysis.statistics.runs import Runs, labelled
from hpc_es.errors import NothingToShow

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_horizon(runs: Runs) -> "Figure":
    """Plot success on held-out tasks by horizon with 95 % Wilson intervals, for the first (left) and the last (right)
    evaluated version of each run. Errors: NothingToShow without evaluations or known horizons."""
    shown, reasons = [], []
    for label, run in labelled(runs):
        try:
            shown.append((label, horizons(run)))
        except NothingToShow as reason:
            reasons.append(str(reason))
    if not shown:
        raise NothingToShow(reasons[0] if reasons else "no run was given")
    figure, (row,) = panels(1, 2, width=10.5, height=3.4, sharex=True, sharey=True)
    for number, (label, table) in enumerate(shown):
        shift = 0.06 * (number - (len(shown) - 1) / 2)  # bars of several runs stand side by side
        first, last = table["version"].min(), table["version"].max()
        for axes, version in zip(row, (first, last), strict=True):
            mine = table[table["version"] == version]
            _draw(axes, mine, shift, colour(number), f"{label}: versions {first} and {last}")
    for axes, text in zip(row, ("First evaluated version", "Last evaluated version"), strict=True):
        title(axes, text)
        axes.set_xlabel("horizon (smallest number of turns that can succeed)")
        percent(axes)
        whole_numbers(axes)
    row[0].set_ylim(-0.03, 1.03)
    row[0].set_ylabel("success on held-out tasks")
    legend_below(figure, row[0], 3)
    return figure


def _draw(axes: "Axes", table: "pd.DataFrame", shift: float, tint: str, label: str) -> None:
    share = table["success"]
    error = [(share - table["low"]).clip(lower=0), (table["high"] - share).clip(lower=0)]
    axes.errorbar(
        table["horizon"] + shift,
        share,
        error,
        color=tint,
        fmt="o-",
        markersize=4,
        capsize=2.5,
        linewidth=1,
        label=label,
    )
