"""Figures of runs, drawn with matplotlib's Agg canvas: no display, no global state."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_es.store import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAILING_UPDATES = 5
"""The thick line of a learning curve is the mean over so many updates up to the present one."""


def plot_learning_curve(runs: Sequence[Run]) -> "Figure":
    """Training fitness over the updates, and the evaluations of the unperturbed policy with their standard errors."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        color, name = f"C{number % 10}", run.attrs["run_id"]
        updates, fitness = run.updates["version"], run.updates["fitness_mean"]
        trailing = fitness.rolling(TRAILING_UPDATES, min_periods=1).mean()
        axes.plot(updates, fitness, color=color, alpha=0.3, linewidth=1)
        axes.plot(
            updates, trailing, color=color, linewidth=2, label=f"{name}: cohorts, mean of {TRAILING_UPDATES} updates"
        )
        evals = run.evals[(run.evals["source"] == "run") & (run.evals["num_tasks"] > 0)].sort_values("version")
        axes.errorbar(
            evals["version"],
            evals["reward_mean"],
            evals["standard_error"],
            color=color,
            fmt="o",
            capsize=3,
            label=f"{name}: held-out tasks, ± standard error",
        )
    axes.set_xlabel("updates")
    axes.set_ylabel("fitness (mean episode reward)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def save_png(figure: "Figure", path: Path) -> Path:
    """Write a figure; makes the folder. Returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)
    return path
