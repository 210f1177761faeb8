"""The summary of one run: fitness before and after on the same tasks, and what it cost.

Invariant: the two policies are compared task by task, on accepted evaluations of the unperturbed policy only. The
interval is a bootstrap over tasks with a fixed seed, so that the same run always gives the same table.
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.held_out import Ceiling
from hpc_es.analysis.statistics.intervals import bootstrap_mean, wilson
from hpc_es.analysis.statistics.progress import head_spans
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


@dataclass(frozen=True)
class Evaluated:
    """One policy version on the held-out tasks."""

    version: int
    num_tasks: int
    fitness: float
    """Mean episode reward."""
    standard_error: float | None
    success_rate: float


@dataclass(frozen=True)
class Difference:
    """Final minus theta_0, paired by task, with a 95 % percentile bootstrap interval over tasks."""

    num_tasks: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Results and costs of one run. None means not known (yet)."""

    run_id: str
    finished: bool
    num_commits: int
    num_null_commits: int
    num_voids: int
    base: Evaluated | None
    """Result of theta_0."""
    final: Evaluated | None
    """Result of the newest version that the run evaluated."""
    difference: Difference | None
    ceiling: Ceiling | None
    """Set if not all held-out tasks can be solved."""
    num_workers: int
    """Number of worker incarnations: a restarted worker counts again."""
    wall_clock_s: float
    """Wall-clock time during which a head was running."""
    tokens_per_second: float | None
    """Prompt and generated tokens of all results, per second of wall-clock time."""
    generated_per_second: float | None
    busy_share: float | None
    """Share of the seconds of connected workers that were spent on evaluations."""
    useful_share: float | None
    """Share of the same seconds that were spent on accepted evaluations."""

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as a dictionary, for JSON."""
        return asdict(self)


def summary(run: Run) -> Summary:
    """Summarise a run, finished or not. Later evaluations (`hpc-es eval`) do not count."""
    evaluations = run.evaluations[run.evaluations["source"] == "run"]
    evals = run.evals[(run.evals["source"] == "run") & (run.evals["num_tasks"] > 0)]
    versions = sorted(evals["version"])
    base = _evaluated(evals, 0) if 0 in versions else None
    final = _evaluated(evals, versions[-1]) if versions and versions[-1] > 0 else None
    seconds = sum(end - start for start, end in head_spans(run))
    return Summary(
        run_id=str(run.attrs["run_id"]),
        finished=bool(run.attrs["finished"]),
        num_commits=len(run.updates),
        num_null_commits=int(run.updates["null"].sum()),
        num_voids=int((evaluations["status"] == "void").sum()),
        base=base,
        final=final,
        difference=_difference(run, base.version, final.version) if base and final else None,
        ceiling=held_out.ceiling(run),
        num_workers=len(run.workers),
        wall_clock_s=seconds,
        tokens_per_second=_ratio(evaluations["tokens_in"].sum() + evaluations["tokens_out"].sum(), seconds),
        generated_per_second=_ratio(evaluations["tokens_out"].sum(), seconds),
        busy_share=_ratio(run.workers["seconds_busy"].sum(), run.workers["seconds_connected"].sum()),
        useful_share=_ratio(run.workers["seconds_useful"].sum(), run.workers["seconds_connected"].sum()),
    )


def render(summary: Summary) -> "Table":
    """Format a summary for a terminal."""
    from rich import box
    from rich.table import Table

    title = f"run {summary.run_id}" + ("" if summary.finished else " (not finished)")
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for line in _lines(summary):
        table.add_row(*line)
    return table


def _lines(summary: Summary) -> list[tuple[str, str, str]]:
    lines = [_fitness_line("fitness of theta_0", summary.base)]
    lines.append(_fitness_line("fitness of the final theta" if summary.finished else "newest fitness", summary.final))
    if (difference := summary.difference) is not None:
        remark = (
            f"95 % interval {difference.low:+.4f} to {difference.high:+.4f}, paired over {difference.num_tasks} tasks"
        )
        lines.append(("difference", f"{difference.mean:+.4f}", remark))
    if (ceiling := summary.ceiling) is not None:
        lines.append(("ceiling of success", f"{ceiling.share:.1%}", str(ceiling)))
    nulls = f"{summary.num_null_commits} without spread" if summary.num_null_commits else ""
    lines += [
        ("commits", str(summary.num_commits), nulls),
        ("void evaluations", str(summary.num_voids), ""),
        ("wall-clock", _duration(summary.wall_clock_s), "while a head was running"),
        (
            "tokens per second",
            _number(summary.tokens_per_second),
            f"generated: {_number(summary.generated_per_second)}",
        ),
        ("busy share of workers", _percent(summary.busy_share), "seconds on evaluations / seconds connected"),
        ("useful share of workers", _percent(summary.useful_share), "the same, accepted evaluations only"),
    ]
    return lines


# --- the comparison ---------------------------------------------------------------------------------------------


def _difference(run: Run, base: int, final: int) -> Difference | None:
    after, before = (held_out.by_task(held_out.episodes(run, version))["reward"] for version in (final, base))
    paired = (after - before).dropna().to_numpy()
    if len(paired) == 0:
        return None
    low, high = bootstrap_mean(paired)
    return Difference(len(paired), float(paired.mean()), low, high)


def _evaluated(evals: "pd.DataFrame", version: int) -> Evaluated:
    row = evals[evals["version"] == version].iloc[-1]
    error = float(row["standard_error"])
    return Evaluated(
        version=int(version),
        num_tasks=int(row["num_tasks"]),
        fitness=float(row["reward_mean"]),
        standard_error=None if math.isnan(error) else error,
        success_rate=float(row["success_rate"]),
    )


# --- formatting --------------------------------------------------------------------------------------------------


def _fitness_line(label: str, evaluated: Evaluated | None) -> tuple[str, str, str]:
    if evaluated is None:
        return label, "-", "not evaluated"
    error = "" if evaluated.standard_error is None else f" ± {evaluated.standard_error:.4f}"
    low, high = wilson(evaluated.success_rate * evaluated.num_tasks, evaluated.num_tasks)
    remark = (
        f"version {evaluated.version}, {evaluated.num_tasks} held-out tasks, success {evaluated.success_rate:.1%} "
        f"({low:.1%} to {high:.1%})"
    )
    return label, f"{evaluated.fitness:.4f}{error}", remark


def _ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole > 0 else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
