"""Success against horizon: how it falls with the least number of turns that a task takes.

Invariant: horizons come from the manifest of the run's evaluation tasks and not from what was played; tasks without
one are left out and counted.
"""

from typing import TYPE_CHECKING

from hpc_es.analysis.figures.canvas import colour, legend_below, panels, percent, title, whole_numbers
from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.intervals import wilson
from hpc_es.analysis.statistics.runs import Runs, labelled, settings
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_GROUPS = 8
"""More horizons than these are put together, so that groups have about as many tasks."""


def success_by_horizon(run: Run, version: int) -> "pd.DataFrame":
    """One row per group of horizons: first, last, horizon (mean over its tasks), num_tasks, success, and its 95 %
    interval (Wilson) low, high. Errors: NothingToShow where the version was not evaluated or no horizon is known."""
    import pandas as pd

    known = sorted({int(known) for known in held_out.comparable(run)["version"]})
    if version not in known:
        raise NothingToShow(f"version {version} was not evaluated, only {', '.join(map(str, known)) or 'none'}")
    source = held_out.best_source(run, version)
    played = held_out.by_task(held_out.episodes(run, version, source))
    played["horizon"] = pd.Series(_horizons(run, source), dtype=float).reindex(played.index)
    played = played.dropna(subset=["horizon"])
    if played.empty:
        raise NothingToShow("the task does not know its horizon")
    rows = []
    for _, group in played.groupby(_groups(played["horizon"])):
        horizon, share = group["horizon"], float(group["success"].mean())
        interval = wilson(float(group["success"].sum()), len(group))
        rows.append((int(horizon.min()), int(horizon.max()), float(horizon.mean()), len(group), share, *interval))
    return pd.DataFrame(rows, columns=["first", "last", "horizon", "num_tasks", "success", "low", "high"])


def horizons(run: Run) -> "pd.DataFrame":
    """`success_by_horizon` of the first and of the last evaluated version, each row led by its version.

    Errors: NothingToShow, also where no policy was evaluated.
    """
    import pandas as pd

    versions = sorted(int(version) for version in held_out.comparable(run)["version"])
    if not versions:
        raise NothingToShow("no policy has been evaluated on held-out tasks")
    tables = [(version, success_by_horizon(run, version)) for version in sorted({versions[0], versions[-1]})]
    return pd.concat([table.assign(version=version)[["version", *table]] for version, table in tables])


def plot_horizon(runs: Runs) -> "Figure":
    """Success on held-out tasks by horizon, with Wilson's 95 % intervals: the first evaluated version (left) and the
    last (right) of each run. Errors: NothingToShow without evaluations, or where no task knows its horizon."""
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
        axes.set_xlabel("horizon (least turns that can succeed)")
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


def _horizons(run: Run, source: str) -> dict[int, int]:
    """Task -> horizon, where it is known. Runs older than the manifest say it of sudokus by an option.

    Errors: NothingToShow without a manifest.
    """
    facts = held_out.task_facts(run, source)
    if facts is not None:
        return {task: known.horizon for task, known in enumerate(facts) if known.horizon is not None}
    task = settings(run).get("task", {})
    blanks = {**task.get("options", {}), **settings(run).get("eval", {}).get("options", {})}.get("blanks")
    if task.get("env") != "sudoku" or blanks is None:
        raise NothingToShow("the folder of this run has no tasks.json, which gives the horizon of each task")
    return dict.fromkeys(range(settings(run)["eval"]["num_tasks"]), int(blanks))


def _groups(horizon: "pd.Series[float]") -> "pd.Series[float]":
    """What to group by: each horizon, or ranges of it where there are many."""
    import pandas as pd

    if horizon.nunique() <= MAX_GROUPS:
        return horizon
    return pd.qcut(horizon, MAX_GROUPS, labels=False, duplicates="drop")
