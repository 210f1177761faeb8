"""Results of recorded evaluations of the unperturbed policy, and how certain each number is.

Invariants: one result is one version under one evaluation (the run's own, or a later one). Differences are paired over
the tasks that both sides played, and only computed if both were measured by the same protocol on the same tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.at_k import KS, AtK, max_at_k, pass_at_k
from hpc_es.analysis.statistics.held_out import Ceiling
from hpc_es.analysis.statistics.intervals import Interval, Paired, bootstrap_mean, paired, wilson
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Evaluated:
    """Result of one version under one evaluation. Intervals are 95 % intervals over tasks."""

    run: str
    source: str
    """"run", or the name of a later evaluation."""
    version: int
    protocol: str
    protocol_digest: int | None
    other_protocol: bool
    """Whether tasks or decoding differ from the run's own."""
    num_tasks: int
    num_repeats: int
    reward: float
    reward_interval: Interval
    success: float
    """Share of successful episodes."""
    success_interval: Interval
    """Wilson interval if each task was played once, else a bootstrap over tasks."""
    pass_at: tuple[AtK, ...]
    """pass@k of success, for k up to the number of repeats."""
    max_at: tuple[AtK, ...]
    """max@k of reward, for the same k."""
    ceiling: Ceiling | None
    """Set if some of the tasks are known to be unsolvable."""
    outcomes: "pd.DataFrame"
    """Mean reward and success of each task, and its id (None without a manifest). Index: task."""


@dataclass(frozen=True)
class Difference:
    """Difference between two evaluations."""

    reward: Paired
    success: Paired


def evaluations(run: Run, source: str | None = None, versions: Sequence[int] | None = None) -> "list[Evaluated]":
    """Complete evaluations by source and version; optionally of one source only, and of `versions` in that order."""
    rows = run.evals[run.evals["num_tasks"] > 0]
    if source is not None:
        rows = rows[rows["source"] == source]
    rows = rows.sort_values(["source", "version"], key=_own_first, kind="stable")
    found = [_evaluated(run, row) for row in rows.to_dict("records")]
    if versions is None:
        return found
    return [each for version in versions for each in found if each.version == version]


def incomplete(run: Run) -> dict[tuple[str, int], tuple[int, int]]:
    """Map (source, version) of each unfinished evaluation to (batches played, batches planned)."""
    evaluations = run.evaluations
    planned = evaluations[(evaluations["kind"] == "eval") & (evaluations["status"] != "void")]
    done = planned["status"] == "accepted"
    counts = done.groupby([planned["source"], planned["dispatch_version"]]).agg(["sum", "size"])
    return {
        (str(source), int(version)): (int(played), int(size))
        for (source, version), played, size in counts.itertuples()
        if played < size
    }


def difference(a: Evaluated, b: Evaluated) -> Difference | None:
    """Difference a - b on the tasks that both played.

    None if their protocols differ, they share fewer than two tasks, or a task has different ids (the same options on
    other data).
    """
    if a.protocol_digest is None or a.protocol_digest != b.protocol_digest:
        return None
    tasks = a.outcomes.index.intersection(b.outcomes.index)
    if len(tasks) < 2 or _differ(a.outcomes["id"][tasks], b.outcomes["id"][tasks]):
        return None
    reward, success = (
        paired(a.outcomes[measure][tasks].to_numpy(float), b.outcomes[measure][tasks].to_numpy(float))
        for measure in ("reward", "success")
    )
    return Difference(reward, success)


def counterpart(of: Evaluated, among: Sequence[Evaluated], version: int | None) -> Evaluated | None:
    """Evaluation of a version (None: the newest) by the protocol of `of`, with most tasks and repeats."""
    alike = [
        each
        for each in among
        if each.protocol_digest == of.protocol_digest
        and each.version in (version, each.version if version is None else version)
    ]
    return max(alike, key=lambda each: (each.version, each.num_tasks, each.num_repeats), default=None)


def _evaluated(run: Run, row: dict[Any, Any]) -> Evaluated:
    import pandas as pd

    source, version = str(row["source"]), int(row["version"])
    played = held_out.episodes(run, version, source)
    reward, success = held_out.by_repeat(played, "reward"), held_out.by_repeat(played, "success")
    outcomes = held_out.by_task(played)
    ids = [facts.id for facts in held_out.task_facts(run, source) or []]
    num_tasks, num_repeats = success.shape
    ks = sorted({k for k in KS if k <= num_repeats} | {num_repeats})
    once = wilson(int(success.sum()), num_tasks) if num_repeats == 1 else None
    digest = row["protocol_digest"]
    return Evaluated(
        run=str(run.attrs["run_id"]),
        source=source,
        version=version,
        protocol=str(row["protocol"]),
        protocol_digest=None if pd.isna(digest) else int(digest),
        other_protocol=bool(row["other_protocol"]),
        num_tasks=num_tasks,
        num_repeats=num_repeats,
        reward=float(reward.mean()),
        reward_interval=bootstrap_mean(reward),
        success=float(success.mean()),
        success_interval=once or bootstrap_mean(success),
        pass_at=tuple(pass_at_k(success, k) for k in ks),
        max_at=tuple(max_at_k(reward, k) for k in ks),
        ceiling=held_out.ceiling(run, outcomes.index, source),
        outcomes=outcomes.assign(id=pd.Series(ids, dtype=object).reindex(outcomes.index)),
    )


def _differ(ids: "pd.Series[Any]", others: "pd.Series[Any]") -> bool:
    return bool((ids.notna() & others.notna() & (ids != others)).any())


def _own_first(column: "pd.Series[Any]") -> "pd.Series[Any]":
    return column.where(column != "run", "") if column.name == "source" else column
