"""What workers did when: a timeline of their evaluations between the commits, and the shares of their time.

Invariant: a share is of the seconds that a worker was connected. Busy is updating, perturbing and rolling out; useful
is the part of it that went into accepted evaluations. Bars are on the head's clock.
"""

import re
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.figures.canvas import FATES, MUTED, legend_below, panels, percent, short, title
from hpc_es.analysis.statistics.runs import Runs, labelled
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_WORKERS = 24
"""Rows of a panel; of more workers the first by name are shown."""
MAX_UPDATES = 24
"""Approximate number of updates that a timeline shows if no window is given."""

_FATE_LABELS = {
    "accepted": "member, consumed",
    "discarded": "member, discarded",
    "void": "void",
    "other": "member, reported: neither consumed nor refused yet",
    "eval": "centre: the unperturbed policy",
}


def worker_shares(run: Run) -> "pd.DataFrame":
    """One row per incarnation that was ever connected: worker, connected (s), busy and useful (shares of it)."""
    import pandas as pd

    workers = run.workers[run.workers["seconds_connected"] > 0]
    workers = workers.sort_values("worker", key=lambda names: names.map(_by_number))
    connected = workers["seconds_connected"]
    return pd.DataFrame(
        {
            "worker": workers["worker"],
            "connected": connected,
            "busy": workers["seconds_busy"] / connected,
            "useful": workers["seconds_useful"] / connected,
        }
    ).reset_index(drop=True)


def spans(run: Run) -> "pd.DataFrame":
    """Evaluations that a worker finished: worker, start and end (s since the run's first plan), fate (of FATES)."""
    import pandas as pd

    evaluations = run.evaluations[run.evaluations["time_finished"].notna() & (run.evaluations["source"] == "run")]
    begin = _first_plan(run)
    fate = evaluations["status"].where(evaluations["status"].isin(list(FATES)), "other")
    fate = fate.where((evaluations["kind"] == "train") | (fate == "void"), "eval")
    return pd.DataFrame(
        {
            "worker": evaluations["worker"],
            "start": evaluations["time_started"] - begin,
            "end": evaluations["time_finished"] - begin,
            "fate": fate,
        }
    )


def _first_plan(run: Run) -> float:
    """Evaluations made after the run are by another clock."""
    return float(run.evaluations.loc[run.evaluations["source"] == "run", "time_planned"].min())


def plot_timeline(runs: Runs, window: tuple[float, float] | None = None) -> "Figure":
    """Per run, one line per worker: its evaluations, coloured by what became of them, between commits (vertical lines).

    `window` is (from, to) in seconds since the run's first plan; by default the whole run, or as long as 24 updates
    take, around the time by which half of the evaluations had begun. Errors: NothingToShow without any evaluation.
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
    """Per run, one bar per worker: useful, busy for nothing, and idle shares of the time that it was connected.
    Errors: NothingToShow while no worker has been connected."""
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
    commits = run.updates["time_committed"].to_numpy(float) - _first_plan(run)
    low, high = window or _middle(commits, found)
    visible = found[(found["end"] > low) & (found["start"] < high)]
    workers = sorted(found["worker"].unique().tolist(), key=_by_number)[:MAX_WORKERS]
    gap = 0.4 if (visible["end"] - visible["start"]).median() > (high - low) / 250 else 0.0
    for place, worker in enumerate(workers):
        mine = visible[visible["worker"] == worker]
        for fate, bars in mine.groupby("fate"):
            lengths = list(zip(bars["start"], bars["end"] - bars["start"], strict=True))
            axes.broken_barh(lengths, (place - 0.38, 0.76), color=FATES[str(fate)], edgecolor="white", linewidth=gap)
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
    """The whole run, or as long as MAX_UPDATES updates take on average, where the workers have most to do."""
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
    axes.barh(places, some["useful"], color=FATES["accepted"], label="useful: accepted evaluations")
    axes.barh(places, wasted, left=some["useful"], color=FATES["discarded"], label="busy, not (yet) accepted")
    idle = (1 - some["busy"]).clip(lower=0)  # a worker that goes on while there is no head is busy beyond its time
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
    handles: list[Any] = [Patch(color=FATES[fate], label=text) for fate, text in fates.items()]
    handles.append(Line2D([], [], color="black", linewidth=0.8, label="commit"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=MUTED)


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    """seat2 before seat10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))
