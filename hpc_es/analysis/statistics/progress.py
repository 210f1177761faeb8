"""How far a run came at each update and what that cost: fitness, success, and the costs to plot them against.

Invariant: everything is counted at the moment of the commit. Cost is what training took up to then, discarded and void
results included. Evaluations on held-out tasks cost nothing here, since how many to make is the observer's choice.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_es.analysis.statistics import held_out
from hpc_es.errors import ConfigError
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

Measure = Literal["success", "fitness"]
"""Measure of the unperturbed policy: share of tasks solved, or mean episode reward."""
Cost = Literal["updates", "evaluations", "tokens", "worker_seconds", "gpu_seconds", "wall_clock_s"]

MEASURES: dict[str, str] = {"success": "success_rate", "fitness": "reward_mean"}
"""Column of `evals` for each measure."""
COSTS: dict[str, str] = {
    "updates": "updates",
    "evaluations": "evaluations (members that were rolled out)",
    "tokens": "tokens (prompt and generated)",
    "worker_seconds": "worker-seconds (seconds that workers were busy)",
    "gpu_seconds": "GPU-seconds (seconds that workers were busy, times their GPUs)",
    "wall_clock_s": "wall-clock (s while a head was running)",
}
"""Choices for the x axis, with their labels."""

TRAILING_UPDATES = 5
"""Number of updates in the trailing mean, the thick line of a learning curve."""


@dataclass(frozen=True)
class Outcome:
    """Results of a run's evaluations of the unperturbed policy; NaN and -1 if there are none."""

    start: float
    """Value of theta_0."""
    peak: float
    """Highest value of all evaluations."""
    peak_update: int
    """Update at which the peak was reached; the earliest if several."""
    final: float
    """Value of the newest evaluation: that of the last update, in a finished run."""
    final_update: int
    num_tasks: int
    """Number of held-out tasks per evaluation."""
    standard_error: float
    """Standard error of `final` over the tasks."""


def progress(run: Run) -> "pd.DataFrame":
    """One row per version from 0: costs up to its commit (COSTS), fitness of its cohort, and trailing mean.

    Columns: version, updates, evaluations, tokens, worker_seconds, gpu_seconds (NaN where no worker has a GPU),
    wall_clock_s, fitness, trailing.
    """
    import numpy as np
    import pandas as pd

    updates = run.updates.sort_values("version")
    committed = updates["time_committed"].to_numpy(float)
    results = _training_results(run).sort_values("time_received")
    counted = np.searchsorted(results["time_received"].to_numpy(float), committed, side="right")
    begun = head_spans(run)
    seconds = np.array(_so_far(busy_seconds(results), counted))
    fitness = np.concatenate([[math.nan], updates["fitness_mean"].to_numpy(float)])
    return pd.DataFrame(
        {
            "version": [0, *updates["version"]],
            "updates": [0, *updates["version"]],
            "evaluations": [0, *counted],
            "tokens": _so_far(tokens(results), counted),
            "worker_seconds": seconds,
            "gpu_seconds": seconds * gpus_per_worker(run),
            "wall_clock_s": [0.0, *(seconds_elapsed(begun, time) for time in committed)],
            "fitness": fitness,
            "trailing": pd.Series(fitness).rolling(TRAILING_UPDATES, min_periods=1).mean(),
        }
    )


def evaluated(run: Run) -> "pd.DataFrame":
    """The run's own evaluations of the unperturbed policy, ordered by version."""
    evals = run.evals[(run.evals["source"] == "run") & (run.evals["num_tasks"] > 0)]
    return evals.sort_values("version").reset_index(drop=True)


def evaluated_with_costs(run: Run, measure: Measure) -> "pd.DataFrame":
    """Rows of `evaluated` with the columns of `progress` at the same version, and `error`, the standard error."""
    frame = evaluated(run).merge(progress(run), on="version")
    frame["error"] = standard_errors(run, measure).reindex(frame["version"]).to_numpy()
    return frame


def mean_over_runs(frames: "Sequence[pd.DataFrame]", x: str, y: str) -> "tuple[pd.DataFrame, pd.Series[float]]":
    """Mean of x and y at each version that all runs have reached, and standard deviation of y (0 for a single run)."""
    import pandas as pd

    together = pd.concat(frames)
    columns = list(dict.fromkeys(("version", x, y)))
    groups = together[columns].astype(float).groupby(together["version"].to_numpy())
    complete = groups.size() == len(frames)
    return groups.mean()[complete], groups[y].std(ddof=1)[complete].fillna(0.0)


def outcome(run: Run, measure: Measure = "success") -> Outcome:
    """Peak, update of the peak and final value, as the asynchronous-ES paper reports them."""
    column, evals = measure_column(measure), evaluated(run)
    if evals.empty:
        return Outcome(math.nan, math.nan, -1, math.nan, -1, 0, math.nan)
    values, versions = evals[column].to_numpy(float), evals["version"].to_numpy(int)
    best, num_tasks = int(values.argmax()), int(evals["num_tasks"].iloc[-1])
    errors = standard_errors(run, measure)
    return Outcome(
        start=float(values[0]) if versions[0] == 0 else math.nan,
        peak=float(values[best]),
        peak_update=int(versions[best]),
        final=float(values[-1]),
        final_update=int(versions[-1]),
        num_tasks=num_tasks,
        standard_error=float(errors.get(versions[-1], math.nan)),
    )


def standard_errors(run: Run, measure: Measure) -> "pd.Series[float]":
    """Standard error over tasks of the run's own evaluations. Index: version."""
    if measure == "success":
        return held_out.success_errors(run)
    return evaluated(run).set_index("version")["standard_error"]


def measure_column(measure: str) -> str:
    """Return the column of `evals` for a measure. Errors: ConfigError for an unknown measure."""
    if measure not in MEASURES:
        raise ConfigError(f"the measure {measure!r} is unknown: {' or '.join(MEASURES)}")
    return MEASURES[measure]


def measure_of(runs: Iterable[Run]) -> Measure:
    """Choose success, or fitness if no task was ever solved."""
    return "success" if any((evaluated(run)["success_rate"] > 0).any() for run in runs) else "fitness"


def check_cost(cost: str) -> None:
    """Check the name of a cost. Errors: ConfigError for an unknown cost."""
    if cost not in COSTS:
        raise ConfigError(f"the x axis {cost!r} is unknown: one of {', '.join(COSTS)}")


def busy_seconds(evaluations: "pd.DataFrame") -> "pd.Series[float]":
    """Seconds of updating, perturbing and rolling out per evaluation; NaN without a result."""
    return evaluations["seconds_update"] + evaluations["seconds_perturb"] + evaluations["seconds_rollout"]


def gpus_per_worker(run: Run) -> float:
    """Number of GPUs per worker (engine.tensor_parallel); NaN if all workers reported a CPU as their device."""
    devices = {str(json.loads(facts or "{}").get("device", "cpu")) for facts in run.workers["facts"]}
    if devices <= {"cpu"}:
        return math.nan
    return float(run.config.get("engine", {}).get("tensor_parallel", 1))


def seconds_cost(runs: Iterable[Run]) -> Literal["worker_seconds", "gpu_seconds"]:
    """Choose the cost that can compare the busy seconds of all runs: GPU-seconds if all have GPUs."""
    return "worker_seconds" if any(math.isnan(gpus_per_worker(run)) for run in runs) else "gpu_seconds"


def tokens(evaluations: "pd.DataFrame") -> "pd.Series[float]":
    """Prompt and generated tokens per evaluation; NaN without a result."""
    return evaluations["tokens_in"].astype("Float64").add(evaluations["tokens_out"]).astype(float)


def head_spans(run: Run) -> list[tuple[float, float]]:
    """Start and last recorded time of each head, in seconds since the epoch. They do not overlap: see Projection."""
    import pandas as pd

    evaluations = run.evaluations[run.evaluations["source"] == "run"]
    times = pd.concat(
        [run.events["time"], run.updates["time_committed"], evaluations["time_planned"], evaluations["time_received"]]
    ).dropna()
    starts = [*run.events.loc[run.events["what"] == "head started", "time"], math.inf]
    return [
        (float(start), float(times[(times >= start) & (times < end)].max()))
        for start, end in itertools.pairwise(starts)
        if start < end  # else a file of the first release, read without its journal, in which a clock was set back
    ]


def seconds_elapsed(spans: list[tuple[float, float]], time: float) -> float:
    """Seconds up to `time` during which a head was running."""
    return sum(min(max(time - start, 0.0), end - start) for start, end in spans)


def _training_results(run: Run) -> "pd.DataFrame":
    """Evaluations of members, and of the centre on their batch, that returned a result."""
    evaluations = run.evaluations
    return evaluations[(evaluations["kind"] != "eval") & evaluations["time_received"].notna()]


def _so_far(values: "pd.Series[float]", counted: "np.ndarray[Any, Any]") -> list[float]:
    import numpy as np

    total = np.concatenate([[0.0], np.cumsum(values.fillna(0.0).to_numpy(float))])
    return [0.0, *total[counted]]
