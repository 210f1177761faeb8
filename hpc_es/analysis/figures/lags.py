"""Figures of staleness: lags of consumed and refused members, and cohorts compared with their schedule."""

from typing import TYPE_CHECKING, Any

from hpc_es.analysis.figures.canvas import (
    FATE_COLOURS,
    MUTED,
    lag_colours,
    legend,
    legend_below,
    panels,
    title,
    whole_numbers,
)
from hpc_es.analysis.statistics.lags import composition, deviating_updates, lag_counts, members_with_lag, prescribed
from hpc_es.analysis.statistics.runs import Runs, labelled
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_lags(runs: Runs) -> "Figure":
    """Plot for each run the lags of consumed and refused members.

    Left: number of members by lag. Right: mean and largest lag of each cohort, and the members refused since the
    previous one. Errors: NothingToShow before the first commit.
    """
    shown = _committed(runs)
    figure, rows = panels(len(shown), 2, width=10.5, height=2.4, width_ratios=(1, 1.6))
    for (left, right), (label, run) in zip(rows, shown, strict=True):
        _draw_histogram(left, lag_counts(run))
        _draw_over_updates(right, run)
        title(left, label)
    rows[-1][0].set_xlabel("lag (versions, counted at the commit)")
    rows[-1][1].set_xlabel("updates")
    legend_below(figure, rows[0][0], 2)
    return figure


def plot_composition(runs: Runs) -> "Figure":
    """Plot for each run the members of each cohort by lag, stacked, and the prescribed composition as black lines.

    Errors: NothingToShow before the first commit.
    """
    shown = _committed(runs)
    figure, rows = panels(len(shown), 1, width=10.5, height=2.3)
    for (axes,), (label, run) in zip(rows, shown, strict=True):
        found, wanted = composition(run), prescribed(run)
        _draw_stack(axes, found)
        if wanted is None:
            title(axes, f"{label}: the schedule prescribes no composition")
        else:
            _draw_prescription(axes, wanted)
            wrong = deviating_updates(run)
            verdict = f"{len(wrong)} of {len(wanted)} cohorts deviate" if wrong else f"all {len(wanted)} as prescribed"
            title(axes, f"{label}: {verdict}")
        axes.set_ylabel("members")
        axes.set_ylim(0, found.sum(axis=1).max() * 1.02)
        whole_numbers(axes)
        axes.set_xlim(0.5, found.index[-1] + 0.5)
        legend(axes, title="lag", loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    rows[-1][0].set_xlabel("updates")
    return figure


# --- panels ------------------------------------------------------------------------------------------------------


def _draw_histogram(axes: "Axes", counts: "pd.DataFrame") -> None:
    """Draw one bar per lag that occurs, evenly spaced, since lags may be 0, 1, 2, 4, ... 128."""
    places = range(len(counts))
    axes.bar(places, counts["accepted"], color=FATE_COLOURS["accepted"], label="consumed")
    axes.bar(places, counts["discarded"], bottom=counts["accepted"], color=FATE_COLOURS["discarded"], label="discarded")
    axes.set_xticks(list(places), [str(lag) for lag in counts.index], rotation=90 if len(counts) > 14 else 0)
    axes.set_xlim(-0.6, max(len(counts), 4) - 0.4)
    axes.set_ylabel("members")
    axes.grid(axis="x", visible=False)


def _draw_over_updates(axes: "Axes", run: Run) -> None:
    updates = run.updates
    axes.plot(updates["version"], updates["lag_max"], color=MUTED, linewidth=1, drawstyle="steps-mid", label="largest")
    axes.plot(updates["version"], updates["lag_mean"], color=FATE_COLOURS["accepted"], linewidth=1.6, label="mean")
    members = members_with_lag(run)
    refused = members[members["status"] == "discarded"]
    if len(refused):
        when = refused["lag"].astype(int) + refused["dispatch_version"].astype(int) + 1
        axes.plot(
            when, refused["lag"].astype(int), "x", color=FATE_COLOURS["discarded"], markersize=4, label="discarded"
        )
    top = max(axes.get_ylim()[1], 1.0)
    axes.set_ylim(-0.04 * top, 1.2 * top)  # room for the legend
    axes.set_ylabel("lag")
    whole_numbers(axes)
    legend(axes, loc="upper left", ncols=3)


def _draw_stack(axes: "Axes", found: "pd.DataFrame") -> None:
    import numpy as np

    lags = [int(lag) for lag in found.columns]
    colours, bottom = lag_colours(lags), np.zeros(len(found))
    for lag, top in zip(lags, found.to_numpy(float).cumsum(axis=1).T, strict=True):
        axes.stairs(top, _edges(found), baseline=bottom, fill=True, color=colours[lag], label=str(lag), linewidth=0)
        bottom = top


def _draw_prescription(axes: "Axes", wanted: "pd.DataFrame") -> None:
    """Draw the boundaries between lags that the schedule prescribes."""
    for upper in wanted.to_numpy(float).cumsum(axis=1).T:
        axes.stairs(upper, _edges(wanted), color="black", linewidth=0.9, baseline=None)


def _edges(cohorts: "pd.DataFrame") -> "np.ndarray[Any, Any]":
    """Edges of the stacked bars: halfway between consecutive updates."""
    import numpy as np

    return np.append(cohorts.index.to_numpy(float) - 0.5, float(cohorts.index[-1]) + 0.5)


def _committed(runs: Runs) -> list[tuple[str, Run]]:
    shown = [(label, run) for label, run in labelled(runs) if len(run.updates)]
    if not shown:
        raise NothingToShow("no update has been committed yet")
    return shown
