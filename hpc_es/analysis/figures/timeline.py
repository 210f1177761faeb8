"""Figures of what each worker did and when: a timeline of evaluations between commits, and shares of its time."""

from typing import TYPE_CHECKING, Any

from hpc_es.analysis.figures.canvas import FATE_COLOURS, MUTED, legend_below, panels, percent, short, title
from hpc_es.analysis.statistics.runs import Runs, labelled
from hpc_es.analysis.statistics.timeline import commit_times, natural_order, spans, worker_shares
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_WORKERS = 24
"""Largest number of rows in a panel. With more workers, the first by name are shown."""
MAX_UPDATES = 24
"""Number of updates that a timeline covers by default."""

_FATE_LABELS = {
    "accepted": "member, consumed",
    "discarded": "member, discarded",
    "void": "void",
    "other": "member, reported: neither consumed nor refused yet",
    "eval": "centre: the unperturbed policy",
}


def plot_timeline(runs: Runs, window: tuple[float, float] | None = None) -> "Figure":
    """Plot one line of evaluations per worker for each run, coloured by fate, with commits as vertical lines.

    `window` is (from, to) in seconds since the run's first plan. By default it is the whole run, or the time of about
    24 updates around the median start of an evaluation. Errors: NothingToShow if no evaluation has finished.
    """
    shown = [(label, run, found) for label, run in labelled(runs) if not (found := spans(run)).empty]
    if not shown:
        raise NothingToShow("no worker has finished an evaluation yet")
    heights = [0.8 + 0.16 * min(found["worker"].nunique(), MAX_WORKERS) for *_, found in shown]
    figure, rows = panels(len(shown), 1, width=10.5, height=sum(heights) / len(shown), height_ratios=heights)
    for (axes,), (label, run, found) in zip(rows, shown, strict=True):
        _draw_timeline(axes, label, run, found, window)
    rows[-1][0].set_xlabel("seconds since the run's first plan")
    _legend_of_fates(figure, {str(fate) for *_, found in shown for fate in found["fate"]})
    return figure


def plot_worker_shares(runs: Runs) -> "Figure":
    """Plot one bar per worker for each run: useful, otherwise busy, and idle shares of its connected time.

    Errors: NothingToShow if no worker has connected.
    """
    shown = [(label, found) for label, run in labelled(runs) if not (found := worker_shares(run)).empty]
    if not shown:
        raise NothingToShow("no worker has been connected for any time")
    heights = [0.9 + 0.17 * min(len(found), MAX_WORKERS) for _, found in shown]
    figure, rows = panels(len(shown), 1, width=10.5, height=sum(heights) / len(shown), height_ratios=heights)
    for (axes,), (label, found) in zip(rows, shown, strict=True):
        _draw_shares(axes, label, found)
    rows[-1][0].set_xlabel("share of the seconds connected")
    legend_below(figure, rows[0][0])
    return figure


# --- panels ------------------------------------------------------------------------------------------------------


def _draw_timeline(
    axes: "Axes", label: str, run: Run, found: "pd.DataFrame", window: tuple[float, float] | None
) -> None:
    commits = commit_times(run)
    low, high = window or _middle(commits, found)
    visible = found[(found["end"] > low) & (found["start"] < high)]
    workers = sorted(found["worker"].unique().tolist(), key=natural_order)[:MAX_WORKERS]
    gap = 0.4 if (visible["end"] - visible["start"]).median() > (high - low) / 250 else 0.0
    for place, worker in enumerate(workers):
        mine = visible[visible["worker"] == worker]
        for fate, bars in mine.groupby("fate"):
            lengths = list(zip(bars["start"], bars["end"] - bars["start"], strict=True))
            axes.broken_barh(
                lengths, (place - 0.38, 0.76), color=FATE_COLOURS[str(fate)], edgecolor="white", linewidth=gap
            )
    inside = commits[(commits >= low) & (commits <= high)]
    axes.vlines(inside, -0.6, len(workers) - 0.4, color="black", linewidth=0.8)
    axes.set_yticks(range(len(workers)), [short(worker) for worker in workers], fontsize=7)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlim(low, high)
    axes.grid(axis="y", visible=False)
    total, parts = found["worker"].nunique(), [label]
    if len(inside) < len(commits):
        parts.append(f"{len(inside)} of {len(commits)} commits shown")
    if total > len(workers):
        parts.append(f"{len(workers)} of {total} workers")
    title(axes, ", ".join(parts))


def _middle(commits: Any, found: "pd.DataFrame") -> tuple[float, float]:
    """Window to show: the whole run, or MAX_UPDATES average updates around the median evaluation."""
    end = float(found["end"].max())
    if len(commits) <= MAX_UPDATES:
        return 0.0, end
    half = end * MAX_UPDATES / len(commits) / 2
    centre = min(max(float(found["start"].median()), half), end - half)
    return centre - half, centre + half


def _draw_shares(axes: "Axes", label: str, found: "pd.DataFrame") -> None:
    some = found[:MAX_WORKERS]
    places = range(len(some))
    wasted = some["busy"] - some["useful"]
    axes.barh(places, some["useful"], color=FATE_COLOURS["accepted"], label="useful: accepted evaluations")
    axes.barh(places, wasted, left=some["useful"], color=FATE_COLOURS["discarded"], label="busy, not (yet) accepted")
    idle = (1 - some["busy"]).clip(
        lower=0
    )  # a worker that keeps working while no head runs is busy for longer than it is connected
    axes.barh(places, idle, left=some["busy"], color="#E4E4E4", label="idle: waiting, starting, moving")
    axes.set_yticks(list(places), [short(worker) for worker in some["worker"]], fontsize=7)
    axes.set_ylim(len(some) - 0.4, -0.6)
    axes.set_xlim(0, max(1.0, float(some["busy"].max())))
    axes.grid(axis="y", visible=False)
    percent(axes, "x")
    busy, useful = ((found[name] * found["connected"]).sum() / found["connected"].sum() for name in ("busy", "useful"))
    some_of = f", {len(some)} of {len(found)} workers" if len(found) > len(some) else ""
    title(axes, f"{label}: all workers together busy {busy:.1%}, useful {useful:.1%}{some_of}")


def _legend_of_fates(figure: "Figure", occurring: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    fates = {fate: text for fate, text in _FATE_LABELS.items() if fate in occurring}
    handles: list[Any] = [Patch(color=FATE_COLOURS[fate], label=text) for fate, text in fates.items()]
    handles.append(Line2D([], [], color="black", linewidth=0.8, label="commit"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=MUTED)
