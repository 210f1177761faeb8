"""Success against horizon: how it falls with the smallest number of turns that solves a task.

Invariant: horizons come from the manifest of the run's evaluation tasks, not from the recorded episodes. Tasks
without a known horizon are left out.
"""

from typing import TYPE_CHECKING

from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.intervals import wilson
from hpc_es.analysis.statistics.runs import settings
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd

MAX_GROUPS = 8
"""Largest number of groups. More horizons than this are merged into groups of about equal numbers of tasks."""


def success_by_horizon(run: Run, version: int) -> "pd.DataFrame":
    """One row per group of horizons: first, last, horizon (mean over its tasks), num_tasks, success, and its 95 %
    Wilson interval low, high. Errors: NothingToShow if the version was not evaluated or no horizon is known."""
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
    """`success_by_horizon` of the first and last evaluated versions, with a leading column `version`.

    Errors: NothingToShow, also if no policy was evaluated.
    """
    import pandas as pd

    versions = sorted(int(version) for version in held_out.comparable(run)["version"])
    if not versions:
        raise NothingToShow("no policy has been evaluated on held-out tasks")
    tables = [(version, success_by_horizon(run, version)) for version in sorted({versions[0], versions[-1]})]
    return pd.concat([table.assign(version=version)[["version", *table]] for version, table in tables])


def _horizons(run: Run, source: str) -> dict[int, int]:
    """Map each task to its horizon, where known. Runs older than the manifest have it for sudokus, in an option.

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
    """Group of each task: its horizon, or a range of horizons where there are many."""
    import pandas as pd

    if horizon.nunique() <= MAX_GROUPS:
        return horizon
    return pd.qcut(horizon, MAX_GROUPS, labels=False, duplicates="drop")
