"""What the unperturbed policy did on held-out tasks, episode by episode, and what is known of these tasks.

Invariants: only accepted evaluations count; several episodes of one version and task are repeats of it, never further
tasks; what was played on other tasks than the run's own is not mixed with these.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_es.envs.base import TaskFacts
from hpc_es.launch.manifest import read_tasks
from hpc_es.paths import RunPaths
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Array = np.ndarray[Any, np.dtype[Any]]

_EVALUATION = ["source", "dispatch_version", "slot", "replacement"]


@dataclass(frozen=True)
class Ceiling:
    """How many held-out tasks any policy could solve."""

    reachable: int
    num_tasks: int

    @property
    def share(self) -> float:
        return self.reachable / self.num_tasks

    def __str__(self) -> str:
        return f"{self.reachable} of {self.num_tasks} held-out tasks can be solved at all"


def episodes(run: Run, version: int | None = None, source: str | None = "run") -> "pd.DataFrame":
    """Of the run's own evaluations, or of a later one by its name; None: of both, on the run's own tasks.

    The columns of `run.episodes`, with `version` for dispatch_version and `repeat`: from 0, the how manieth episode of
    its source, version and task. In the order in which they were planned.
    """
    evaluations, played = run.evaluations, run.episodes
    counted = evaluations[(evaluations["kind"] == "eval") & (evaluations["status"] == "accepted")]
    played = played[played["kind"] == "eval"]
    if version is not None:
        played = played[played["dispatch_version"] == version]
    sources = sources_of(run) if source is None else [source]
    found = played[played["source"].isin(sources)].merge(counted[_EVALUATION], on=_EVALUATION)
    found = found.sort_values(["source", "dispatch_version", "slot", "position"], ascending=[True, True, False, True])
    found = found.rename(columns={"dispatch_version": "version"}).reset_index(drop=True)
    found["repeat"] = found.groupby(["source", "version", "task"]).cumcount()
    return found


def sources_of(run: Run) -> list[str]:
    """The run itself, and later evaluations that played its tasks."""
    later = [str(name) for name in run.evals["source"].unique() if name != "run"]
    return ["run", *(name for name in later if not _has_own_tasks(run, name))]


def by_task(played: "pd.DataFrame") -> "pd.DataFrame":
    """Index task; reward and success, each the mean over its repeats. `played`: of one source and version."""
    return played.groupby("task")[["reward", "success"]].mean()


def by_repeat(played: "pd.DataFrame", measure: str) -> "Array":
    """[tasks, repeats] of "reward" or "success", tasks in order: as many repeats as every task has."""
    table = played.pivot(index="task", columns="repeat", values=measure)
    return table.dropna(axis=1).to_numpy(float)


def success_errors(run: Run) -> "pd.Series[float]":
    """Index version: standard error of the success rate in the run's own evaluation, over tasks.

    The population deviation of the tasks' shares: sqrt(p (1 - p) / n) where every task was played once.
    """
    played = episodes(run)
    shares = played.groupby(["version", "task"])["success"].mean().groupby("version")
    return shares.std(ddof=0) / shares.count() ** 0.5


# --- what is known of the tasks ----------------------------------------------------------------------------------


def task_facts(run: Run) -> list[TaskFacts] | None:
    """Of the run's evaluation tasks: task i of an episode is the i-th. None where the run has no manifest of them.

    Errors: StoreError when the manifest is damaged.
    """
    manifest = read_tasks(RunPaths(run.folder).tasks) if run.folder else None
    return manifest.tasks if manifest else None


def ceiling(run: Run, tasks: Iterable[int] | None = None) -> Ceiling | None:
    """Of all evaluation tasks or of these; None where all can be solved, or nothing is known of one of them."""
    facts = task_facts(run) or []
    chosen = list(range(len(facts)) if tasks is None else tasks)
    if any(task >= len(facts) for task in chosen) or all(facts[task].reachable for task in chosen):
        return None
    return Ceiling(sum(facts[task].reachable for task in chosen), len(chosen))


def ceilings(runs: Iterable[Run]) -> list[Ceiling]:
    """The different ones among these runs, lowest first."""
    found = {known for run in runs if (known := ceiling(run)) is not None}
    return sorted(found, key=lambda known: (known.share, known.num_tasks))


def _has_own_tasks(run: Run, source: str) -> bool:
    return run.folder is not None and RunPaths(run.folder).later_eval_tasks(source).exists()
