"""All figures of runs in one place, for notebooks (`hpc_es.plots`). Each function returns a matplotlib Figure.

    figure = hpc_es.plots.plot_learning_curve({"sync": "runs/a", "async": ["runs/b", "runs/c"]})
    hpc_es.plots.save_png(figure, "curve.png")

A figure takes one run, several, or a mapping from names to runs. A run is a run folder, a run.h5, or the result of
`hpc_es.read`, which is faster when several figures are drawn. A figure without data raises NothingToShow, which says
why.
"""

from hpc_es.analysis.figures.at_k import plot_at_k
from hpc_es.analysis.figures.canvas import save_png
from hpc_es.analysis.figures.curves import plot_costs, plot_finals, plot_learning_curve
from hpc_es.analysis.figures.drift import plot_drift, plot_magnitudes, plot_update_norms
from hpc_es.analysis.figures.episodes import plot_brackets, plot_episodes, plot_lengths
from hpc_es.analysis.figures.horizon import plot_horizon
from hpc_es.analysis.figures.lags import plot_composition, plot_lags
from hpc_es.analysis.figures.timeline import plot_timeline, plot_worker_shares
from hpc_es.analysis.figures.waiting import plot_discards, plot_durations, plot_waiting

__all__ = [
    "plot_at_k",
    "plot_brackets",
    "plot_composition",
    "plot_costs",
    "plot_discards",
    "plot_drift",
    "plot_durations",
    "plot_episodes",
    "plot_finals",
    "plot_horizon",
    "plot_lags",
    "plot_learning_curve",
    "plot_lengths",
    "plot_magnitudes",
    "plot_timeline",
    "plot_update_norms",
    "plot_waiting",
    "plot_worker_shares",
    "save_png",
]
