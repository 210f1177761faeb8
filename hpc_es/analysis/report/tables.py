"""The tables of a report: numbers for a CSV file, and text for the page if a table is short enough to read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_es.analysis.report.figures import Selection
from hpc_es.analysis.statistics import conditions
from hpc_es.analysis.statistics.at_k import at_k
from hpc_es.analysis.statistics.drift import magnitudes
from hpc_es.analysis.statistics.episodes import lengths
from hpc_es.analysis.statistics.horizon import horizons
from hpc_es.analysis.statistics.lags import composition, lag_counts
from hpc_es.analysis.statistics.progress import head_spans, progress
from hpc_es.analysis.statistics.retention import retention, retention_text
from hpc_es.analysis.statistics.runs import labelled, seed
from hpc_es.analysis.statistics.text_table import TextTable
from hpc_es.analysis.statistics.timeline import worker_shares
from hpc_es.analysis.statistics.waiting import discard_bias
from hpc_es.errors import NothingToShow
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Table:
    """One table of a report."""

    name: str
    numbers: "pd.DataFrame"
    title: str = ""
    text: TextTable | None = None
    """None if the table is written as CSV only."""


def tables(chosen: Selection, base: str) -> Iterator[Table]:
    """All tables of a report, in order. `base` is the condition that others are compared with."""
    runs, measure = chosen.runs, chosen.measure
    overview = run_overview(runs)
    yield Table("runs", overview, "Runs", overview_text(overview))
    outcomes = conditions.table(runs, measure)
    yield Table("outcomes", outcomes, "Peak and final by condition", conditions.text(outcomes, measure))
    if len(chosen.conditions) > 1:
        paired = conditions.paired(runs, base, measure)
        yield Table("paired", paired, f"Differences from {base}", conditions.paired_text(paired, measure))
    kept = retention(runs)
    yield Table("retention", kept, "Retention of other abilities", retention_text(kept))
    costs = conditions.costs(runs)
    yield Table("costs", costs, "Costs", conditions.costs_text(costs))
    yield Table("outcomes_by_run", conditions.outcomes(runs, measure))
    yield Table("progress", _by_run(runs, progress))
    yield Table("lags", _by_run(runs, lambda run: lag_counts(run).reset_index()))
    yield Table("composition", _by_run(runs, _long_composition))
    yield Table("workers", _by_run(runs, worker_shares))
    yield Table("discard_bias", _by_run(runs, lambda run: discard_bias(run).reset_index()))
    yield Table("lengths", _by_run(runs, lengths))
    few = list(chosen.few.values())
    yield Table("at_k", _by_run(runs, at_k, only=few))
    yield Table("horizon", _by_run(runs, horizons, only=few))
    yield Table("magnitudes", _by_run(runs, lambda run: magnitudes(run, chosen.model), only=few))


def run_overview(runs: conditions.Runs) -> "pd.DataFrame":
    """One row per run: its progress, its failures, and how long it took."""
    import pandas as pd

    rows = []
    for label, run in labelled(runs):
        status = run.evaluations["status"]
        rows.append(
            {
                "label": label,
                "run": str(run.attrs["run_id"]),
                "seed": seed(run),
                "updates": len(run.updates),
                "num_updates": int(run.config.get("run", {}).get("num_updates", 0)),
                "null": int(run.updates["null"].sum()),
                "void": int((status == "void").sum()),
                "discarded": int((status == "discarded").sum()),
                "workers": len(run.workers),
                "wall_clock_s": sum(end - start for start, end in head_spans(run)),
                "finished": bool(run.attrs["finished"]),
            }
        )
    return pd.DataFrame(rows)


def overview_text(overview: "pd.DataFrame") -> TextTable:
    """Format `run_overview` as text."""
    header = (
        "run",
        "folder",
        "seed",
        "updates",
        "null",
        "void",
        "discarded",
        "workers",
        "wall-clock s",
        "state",
    )
    rows = [
        [
            *(row["label"], row["run"], str(row["seed"]), f"{row['updates']} of {row['num_updates']}"),
            *(str(row[name]) for name in ("null", "void", "discarded", "workers")),
            *(f"{row['wall_clock_s']:,.0f}", "finished" if row["finished"] else "not finished"),
        ]
        for row in overview.to_dict("records")
    ]
    foot = (
        "Null updates had no spread in their fitness and did not change theta. Void evaluations failed and were "
        "replaced; discarded ones succeeded but were too late. Workers are incarnations, so a restarted worker counts "
        "again. Wall-clock time counts only while a head was running."
    )
    return TextTable(header, rows, foot, num_names=2)


def _long_composition(run: Run) -> "pd.DataFrame":
    """`composition` with one row per update and lag. Columns: update, lag, members."""
    found = composition(run).reset_index()
    return found.melt("update", value_name="members").sort_values(["update", "lag"])


def _by_run(
    runs: conditions.Runs, frame: "Callable[[Run], pd.DataFrame]", only: Sequence[Run] | None = None
) -> "pd.DataFrame":
    """Concatenate the frames of all runs (or of `only` these) that have one, with a leading column `run_label`."""
    import pandas as pd

    frames = []
    for label, run in labelled(runs):
        if only is not None and run not in only:
            continue
        try:
            found = frame(run)
        except NothingToShow:
            continue  # the figure beside it says why
        found.insert(0, "run_label", label)
        frames.append(found)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
