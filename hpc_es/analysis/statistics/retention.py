"""Scores of runs on MMLU-Pro and HellaSwag, by condition, compared with their base models.

Invariant: a change is computed only between scores on the same examples with the same settings (`hpc-es retention`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics.runs import Runs, conditions_of, seed
from hpc_es.analysis.statistics.text_table import TextTable, mean_and_sd
from hpc_es.paths import RunPaths
from hpc_es.store import Run
from hpc_es.store.retention import Record, asked_alike, read_records

if TYPE_CHECKING:
    import pandas as pd

_BY_RUN = ["condition", "run", "seed", "task", "metric", "version", "num_examples", "base", "score", "change"]


def retention(runs: Runs) -> "pd.DataFrame":
    """One row per run, task and metric: scores of the newest measured version and of the base model.

    Scores are from 0 to 1, `change` is their difference. The base score is NaN if the base was not measured with the
    same settings. Runs that were not measured have no row.

    Errors: StoreError for a damaged record.
    """
    import pandas as pd

    rows = [
        {"condition": condition.label, "run": str(run.attrs["run_id"]), "seed": seed(run), **score}
        for condition in conditions_of(runs)
        for run in condition.runs
        for score in _scores(run)
    ]
    return pd.DataFrame(rows, columns=_BY_RUN)


def retention_text(by_run: "pd.DataFrame") -> TextTable:
    """Table of `retention` by condition: mean ± standard deviation between runs."""
    rows = []
    for (task, metric, condition), mine in by_run.groupby(["task", "metric", "condition"], sort=False):
        versions = sorted(set(mine["version"]))
        cells = [
            mean_and_sd(mine[name].mean(), mine[name].std(ddof=1), scale, digits, sign=sign)
            for name, scale, digits, sign in (("base", 1, 4, ""), ("score", 1, 4, ""), ("change", 100, 2, "+"))
        ]
        sizes = " or ".join(f"{size:,}" for size in sorted(set(mine["num_examples"])))
        version = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        rows.append([str(task), str(metric), str(condition), str(len(mine)), version, sizes, *cells])
    header = ("task", "metric", "condition", "runs", "version", "examples", "base", "score", "change, points")
    foot = (
        "Scores of the newest version measured by `hpc-es retention`, and the change from the base on the same "
        "examples with the same settings: mean ± standard deviation between runs."
    )
    return TextTable(header, rows, foot, num_names=3)


def _scores(run: Run) -> Iterator[dict[str, Any]]:
    """Scores of the newest measured version of a run, for each task and metric."""
    if run.folder is None:
        return
    records = [record for _, record in read_records(RunPaths(run.folder).evals) if record.version is not None]
    newest: dict[str, Record] = {}
    for record in records:
        known = newest.get(record.measured.task)
        if known is None or (record.version or 0, record.began) >= (known.version or 0, known.began):
            newest[record.measured.task] = record
    for record in newest.values():
        base = next((each for each in records if each.version == 0 and asked_alike(each, record)), None)
        for metric, score in record.scores.items():
            before = base.scores[metric] if base is not None else float("nan")
            yield {
                "task": record.title,
                "metric": metric,
                "version": record.version,
                "num_examples": record.measured.num_examples,
                "base": before,
                "score": score,
                "change": score - before,
            }
