"""Episodes of the unperturbed policy on held-out tasks, and what is known about these tasks.

Invariants: only accepted evaluations count; several episodes of one version and task are repeats of that task, never
further tasks; results on other tasks or with other decoding are not mixed with the run's own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_es.envs.base import TaskFacts
from hpc_es.envs.manifest import read_tasks
from hpc_es.paths import RunPaths
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Array = np.ndarray[Any, np.dtype[Any]]

_EVALUATION = ["source", "dispatch_version", "slot", "replacement"]


@dataclass(frozen=True)
class Ceiling:
    """Number of held-out tasks that any policy could solve."""

    reachable: int
    num_tasks: int

    @property
    def share(self) -> float:
        return self.reachable / self.num_tasks

    def __str__(self) -> str:
        return f"{self.reachable} of {self.num_tasks} held-out tasks can be solved at all"


def episodes(run: Run, version: int | None = None, source: str = "run") -> "pd.DataFrame":
    """Episodes of the run's own evaluations, or of a later one by its name, in the order in which they were planned.

    Has the columns of `run.episodes`, with `version` instead of dispatch_version, and `repeat`, which numbers the
    episodes of a version and task from 0.
    """
    evaluations, played = run.evaluations, run.episodes
    counted = evaluations[(evaluations["kind"] == "eval") & (evaluations["status"] == "accepted")]
    played = played[(played["kind"] == "eval") & (played["source"] == source)]
    if version is not None:
        played = played[played["dispatch_version"] == version]
    found = played.merge(counted[_EVALUATION], on=_EVALUATION).rename(columns={"dispatch_version": "version"})
    found = found.sort_values(["version", "slot", "position"], ascending=[True, False, True], ignore_index=True)
    found["repeat"] = found.groupby(["version", "task"]).cumcount()
    return found


def comparable(run: Run) -> "pd.DataFrame":
    """Rows of `run.evals` that are complete and were measured on the run's own tasks with its own decoding."""
    return run.evals[(run.evals["num_tasks"] > 0) & ~run.evals["other_protocol"]]


def best_source(run: Run, version: int) -> str:
    """Source of the comparable evaluation of a version that has most tasks, then most repeats, then is the run's own.

    The version must have a comparable evaluation.
    """
    evals = comparable(run)
    rows = evals[evals["version"] == version].fillna({"num_repeats": 1})
    keys = ("num_tasks", "num_repeats", "own", "time")
    best = rows.assign(own=rows["source"] == "run").sort_values(list(keys)).iloc[-1]
    return str(best["source"])


def by_task(played: "pd.DataFrame") -> "pd.DataFrame":
    """Mean reward and success of each task over its repeats. `played` has one source and version. Index: task."""
    return played.groupby("task")[["reward", "success"]].mean()


def by_repeat(played: "pd.DataFrame", measure: str) -> "Array":
    """Array [tasks, repeats] of "reward" or "success", tasks in order, with the repeats that every task has."""
    table = played.pivot(index="task", columns="repeat", values=measure).astype(float)
    return table.dropna(axis=1).to_numpy()


def success_errors(run: Run) -> "pd.Series[float]":
    """Standard error over tasks of the success rate in the run's own evaluations. Index: version.

    Uses the population deviation of the tasks' shares: sqrt(p (1 - p) / n) where every task was played once.
    """
    played = episodes(run)
    shares = played.groupby(["version", "task"])["success"].mean().groupby("version")
    return shares.std(ddof=0) / shares.count() ** 0.5


# --- facts about tasks -------------------------------------------------------------------------------------------


def task_facts(run: Run, source: str = "run") -> list[TaskFacts] | None:
    """Facts about the tasks of the run's own evaluation or of a later one, indexed by the task of an episode.

    None without a manifest. Errors: StoreError if the manifest is damaged.
    """
    if run.folder is None:
        return None
    paths = RunPaths(run.folder)
    manifest = read_tasks(paths.later_eval_tasks(source))
    if manifest is None and not run.evals.loc[run.evals["source"] == source, "other_protocol"].any():
        manifest = read_tasks(paths.tasks)  # these are the run's own tasks
    return manifest.tasks if manifest else None


def ceiling(run: Run, tasks: Iterable[int] | None = None, source: str = "run") -> Ceiling | None:
    """Ceiling over all evaluation tasks or over `tasks`; None if all can be solved, or nothing is known about one.

    Errors: StoreError if the manifest is damaged.
    """
    facts = task_facts(run, source) or []
    chosen = list(range(len(facts)) if tasks is None else tasks)
    if any(task >= len(facts) for task in chosen) or all(facts[task].reachable for task in chosen):
        return None
    return Ceiling(sum(facts[task].reachable for task in chosen), len(chosen))


def at_most(ceilings: Iterable[Ceiling | None]) -> str:
    """Text of the ceilings for a label: "97.7%", or several joined by "or"; empty if there are none."""
    return " or ".join(f"{share:.1%}" for share in sorted({known.share for known in ceilings if known}))
