"""Tables over several runs: results and costs of each condition over its seeds, and paired differences between them.

Invariant: a number over repeated runs always comes with its standard deviation and the number of runs. Deviations are
between runs (ddof 1), and differences only between runs of equal seed and equal length.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.intervals import bootstrap_mean, sign_flip_p_value
from hpc_es.analysis.statistics.progress import (
    Measure,
    busy_seconds,
    gpus_per_worker,
    head_spans,
    measure_column,
    outcome,
    tokens,
)
from hpc_es.analysis.statistics.runs import Runs, conditions_of, seed
from hpc_es.analysis.statistics.text_table import TextTable, mean_and_sd
from hpc_es.errors import ConfigError
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd

OUTCOMES = ("start", "peak", "peak_update", "final")
COSTS = (
    "evaluations",
    "discarded",
    "tokens",
    "worker_seconds",
    "gpu_seconds",
    "wall_clock_s",
    "busy_share",
    "useful_share",
)
LAGS = ("lag_mean", "lag_max")
_MIN_PAIRS = 3
"""Smallest number of pairs for an interval."""


def outcomes(runs: Runs, measure: Measure = "success") -> "pd.DataFrame":
    """One row per run: condition, run, seed, num_updates (as configured), finished, start, peak, peak_update, final,
    final_update, num_tasks, standard_error (of final, over the tasks), ceiling (share of tasks that can be solved at
    all; NaN unless it is known to be below 1)."""
    import pandas as pd

    rows = [
        {
            "condition": condition.label,
            "run": str(run.attrs["run_id"]),
            "seed": seed(run),
            "num_updates": int(run.config["run"]["num_updates"]),
            "finished": bool(run.attrs["finished"]),
            **vars(outcome(run, measure)),
            "ceiling": known.share if (known := held_out.ceiling(run)) else math.nan,
        }
        for condition in conditions_of(runs)
        for run in condition.runs
    ]
    names = ["condition", "run", "seed", "num_updates", "finished", *_OUTCOME_FIELDS, "ceiling"]
    return pd.DataFrame(rows, columns=names)


def table(runs: Runs, measure: Measure = "success") -> "pd.DataFrame":
    """The table of the asynchronous-ES paper, one row per condition: start, peak, peak_update and final, each with
    `_mean` and `_sd` over its runs; `num_runs`, `num_tasks`, `standard_error` of one run's final over its tasks, and
    `ceiling` as in `outcomes`."""
    per_run = outcomes(runs, measure)
    result = _over_runs(per_run, OUTCOMES)
    groups = per_run.groupby("condition", sort=False)
    result["num_tasks"] = groups["num_tasks"].max().to_numpy()
    result["standard_error"] = groups["standard_error"].mean().to_numpy()
    result["ceiling"] = groups["ceiling"].min().to_numpy()
    return result


def costs(runs: Runs) -> "pd.DataFrame":
    """Costs and staleness of each condition, one row each, with `_mean` and `_sd` over its runs.

    evaluations (results received) and how many of them were discarded; tokens, worker_seconds, gpu_seconds (NaN without
    GPUs), wall_clock_s; busy_share and useful_share of the workers' connected seconds; lag_mean and lag_max of the
    consumed members.
    """
    import pandas as pd

    rows = [{"condition": condition.label, **_cost(run)} for condition in conditions_of(runs) for run in condition.runs]
    return _over_runs(pd.DataFrame(rows, columns=["condition", *COSTS, *LAGS]), (*COSTS, *LAGS))


def paired(runs: Runs, base: str = "Sync", measure: Measure = "success") -> "pd.DataFrame":
    """Differences in peak and final between each condition and `base`, over pairs of runs of equal seed.

    Two runs whose num_updates or final evaluated update differ are not a pair; `num_unequal` counts them.
    Columns: condition, base, outcome, num_pairs, num_unequal, mean, sd, low, high (95 % percentile bootstrap over
    pairs, which is too narrow for few of them), num_better, p (two-sided, over all sign flips: at least 0.0625 with 5
    pairs). NaN with fewer than three pairs. Errors: ConfigError if `base` is not a condition.
    """
    import pandas as pd

    per_run = outcomes(runs, measure)
    labels = list(dict.fromkeys(per_run["condition"]))
    if base not in labels:
        raise ConfigError(f"there is no condition {base!r} to compare with: {', '.join(labels) or 'no runs at all'}")
    rows = []
    for label in labels:
        if label == base:
            continue
        mine, theirs = (per_run[per_run["condition"] == name] for name in (label, base))
        same_seed = mine.merge(theirs, on="seed", suffixes=("", "_base")).dropna(subset=["final", "final_base"])
        equal = (same_seed["num_updates"] == same_seed["num_updates_base"]) & (
            same_seed["final_update"] == same_seed["final_update_base"]
        )
        pairs = same_seed[equal]
        for what in ("peak", "final"):
            found = _difference((pairs[what] - pairs[f"{what}_base"]).tolist())
            names = {"condition": label, "base": base, "outcome": what, "num_unequal": int((~equal).sum())}
            rows.append({**names, **found})
    columns = ["condition", "base", "outcome", "num_pairs", "num_unequal", "mean", "sd", "low", "high"]
    return pd.DataFrame(rows, columns=[*columns, "num_better", "p"])


# --- as text -----------------------------------------------------------------------------------------------------


def markdown(table: "pd.DataFrame", measure: Measure = "success") -> str:
    """Format `table` as Markdown, with a note on the meaning of its numbers."""
    return text(table, measure).markdown()


def costs_markdown(table: "pd.DataFrame") -> str:
    """Format `costs` as Markdown."""
    return costs_text(table).markdown()


def paired_markdown(table: "pd.DataFrame", measure: Measure = "success") -> str:
    """Format `paired` as Markdown."""
    return paired_text(table, measure).markdown()


def text(table: "pd.DataFrame", measure: Measure = "success") -> TextTable:
    """Format `table` as text: mean ± standard deviation."""
    digits, scale, unit = _format(measure)
    forms = {"start": (scale, digits), "peak": (scale, digits), "peak_update": (1, 0), "final": (scale, digits)}
    header = ("condition", "runs", f"start{unit}", f"peak{unit}", "peak update", f"final{unit}")
    return TextTable(header, _mean_rows(table, forms), _foot(table, measure))


def costs_text(table: "pd.DataFrame") -> TextTable:
    """Format `costs` as text, with GPU-seconds if all conditions have GPUs, else worker-seconds."""
    gpus = bool(table["gpu_seconds_mean"].notna().all())
    columns = [name for name in COSTS if name != ("worker_seconds" if gpus else "gpu_seconds")]
    forms = dict.fromkeys(columns, (1, 0)) | {"busy_share": (100, 1), "useful_share": (100, 1)}
    forms |= {"lag_mean": (1, 2), "lag_max": (1, 0)}
    unit = "GPU-seconds" if gpus else "Worker-seconds"
    header = ("condition", "runs", "evaluations", "discarded", "tokens", unit, "wall-clock s", "busy %")
    return TextTable(
        (*header, "useful %", "lag", "max lag"),
        _mean_rows(table, forms),
        f"Mean ± standard deviation between runs. {unit} are seconds that workers spent on evaluations"
        f"{', times their GPUs' if gpus else ''}; tokens are prompt and generated ones; neither counts evaluations on "
        "held-out tasks. Busy and useful: of the seconds that workers were connected, spent on evaluations, and on "
        "accepted ones. Lag in versions, counted at the commit.",
    )


def paired_text(table: "pd.DataFrame", measure: Measure = "success") -> TextTable:
    """Format `paired` as text."""
    digits, scale, unit = _format(measure, "points")
    rows = []
    for row in table.to_dict("records"):
        known = not math.isnan(row["low"])
        interval = f"{scale * row['low']:+.{digits}f} to {scale * row['high']:+.{digits}f}" if known else "-"
        difference = mean_and_sd(row["mean"], row["sd"], scale, digits, sign="+")
        better = f"{row['num_better']} of {row['num_pairs']}"
        p = f"{row['p']:.3f}" if known else "-"
        rows.append([row["condition"], row["base"], row["outcome"], difference, interval, better, p])
    header = ("condition", "minus", "of", f"difference{unit}", "95 % interval", "better", "p")
    foot = (
        "Differences between runs of equal seed: mean ± standard deviation between pairs, and how many of the pairs "
        "were better. The interval is a percentile bootstrap over pairs, and too narrow when they are few; p is "
        "two-sided over all flips of signs (with 5 pairs at least 0.0625), not corrected for the number of rows."
    )
    unequal = table.loc[table["num_unequal"] > 0].drop_duplicates("condition")
    for row in unequal.to_dict("records"):
        foot += (
            f" Left out of {row['condition']} minus {row['base']}: {row['num_unequal']} pair"
            f"{'s' if row['num_unequal'] > 1 else ''} of unequal length (num_updates, or the last update evaluated)."
        )
    return TextTable(header, rows, foot, num_names=3)


def _mean_rows(table: "pd.DataFrame", forms: Mapping[str, tuple[float, int]]) -> list[list[str]]:
    """Cells of each condition. `forms` maps a column to its factor and digits."""
    return [
        [row["condition"], str(row["num_runs"])]
        + [mean_and_sd(row[f"{name}_mean"], row[f"{name}_sd"], *form) for name, form in forms.items()]
        for row in table.to_dict("records")
    ]


def _foot(table: "pd.DataFrame", measure: Measure) -> str:
    """Note on the meaning of the numbers and on the standard error of one evaluation."""
    digits, scale, _ = _format(measure)
    meaning = (
        f"{'Success rates' if measure == 'success' else 'Mean rewards'} of the unperturbed policy on held-out tasks: "
        "mean ± standard deviation between runs. Start: theta_0; peak: the highest evaluation, ties to the earliest; "
        "final: the last update."
    )
    known = table[table["num_tasks"] > 0]
    if known.empty:
        return meaning
    sizes = sorted({int(size) for size in known["num_tasks"]})
    errors = [scale * float(error) for error in (known["standard_error"].min(), known["standard_error"].max())]
    spread = " to ".join(dict.fromkeys(f"{error:.{digits}f}" for error in errors))
    ceilings = sorted({f"{100 * share:.1f}" for share in known["ceiling"].dropna()}) if measure == "success" else []
    if ceilings:
        meaning += f" Of these tasks {' or '.join(ceilings)} % can be solved at all."
    return (
        f"{meaning} The standard error of one final evaluation, on {' or '.join(map(str, sizes))} tasks, is {spread}"
        f"{' points' if measure == 'success' else ''}; a peak is the best of several looks, so it is biased upwards."
    )


def _format(measure: Measure, unit: str = "%") -> tuple[int, float, str]:
    """Return digits, factor and unit of a measure."""
    measure_column(measure)
    return (2, 100.0, f" {unit}") if measure == "success" else (4, 1.0, "")


# --- numbers -----------------------------------------------------------------------------------------------------

_OUTCOME_FIELDS = ("start", "peak", "peak_update", "final", "final_update", "num_tasks", "standard_error")


def _over_runs(per_run: "pd.DataFrame", columns: Sequence[str]) -> "pd.DataFrame":
    """Mean and standard deviation (ddof 1) by condition; a peak update of -1 counts as unknown."""
    import pandas as pd

    values = per_run[list(columns)].astype(float)
    if "peak_update" in columns:
        values["peak_update"] = values["peak_update"].where(values["peak_update"] >= 0)
    groups = values.groupby(per_run["condition"], sort=False)
    mean, deviation = groups.mean(), groups.std(ddof=1)
    parts = {"num_runs": per_run.groupby("condition", sort=False).size()}
    for column in columns:
        parts |= {f"{column}_mean": mean[column], f"{column}_sd": deviation[column]}
    return pd.DataFrame(parts).reset_index(names="condition")


def _cost(run: Run) -> dict[str, float]:
    training = run.evaluations[run.evaluations["kind"] != "eval"]
    results, workers, updates = training[training["time_received"].notna()], run.workers, run.updates
    connected = float(workers["seconds_connected"].sum())
    members = float(updates["num_members"].sum())
    seconds = float(busy_seconds(results).sum())
    return {
        "evaluations": float(len(results)),
        "discarded": float((results["status"] == "discarded").sum()),
        "tokens": float(tokens(results).sum()),
        "worker_seconds": seconds,
        "gpu_seconds": seconds * gpus_per_worker(run),
        "wall_clock_s": sum(end - start for start, end in head_spans(run)),
        "busy_share": float(workers["seconds_busy"].sum()) / connected if connected else math.nan,
        "useful_share": float(workers["seconds_useful"].sum()) / connected if connected else math.nan,
        "lag_mean": float((updates["lag_mean"] * updates["num_members"]).sum()) / members if members else math.nan,
        "lag_max": float(updates["lag_max"].max()) if len(updates) else math.nan,
    }


def _difference(values: list[float]) -> dict[str, Any]:
    import numpy as np

    pairs = np.asarray(values, float)
    several, enough = len(pairs) > 1, len(pairs) >= _MIN_PAIRS
    low, high = bootstrap_mean(pairs) if enough else (math.nan, math.nan)
    return {
        "num_pairs": len(pairs),
        "mean": float(pairs.mean()) if len(pairs) else math.nan,
        "sd": float(pairs.std(ddof=1)) if several else math.nan,
        "low": low,
        "high": high,
        "num_better": int((pairs > 0).sum()),
        "p": sign_flip_p_value(pairs) if enough else math.nan,
    }
