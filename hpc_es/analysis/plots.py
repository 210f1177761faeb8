"""All figures of runs in one place, for notebooks: each takes a run, several, or runs by name, and returns a Figure.

    from hpc_es.analysis.plots import plot_learning_curve
    plot_learning_curve(["runs/a", "runs/b"])

A run is the folder, the run.h5, or what hpc_es.store.read makes of it, which is quicker for several figures.

A figure for which the runs have no data raises NothingToShow, which says why.
"""

from hpc_es.analysis.at_k import plot_at_k
from hpc_es.analysis.canvas import save_png
from hpc_es.analysis.curves import plot_costs, plot_learning_curve
from hpc_es.analysis.drift import plot_drift, plot_magnitudes, plot_update_norms
from hpc_es.analysis.episodes import plot_brackets, plot_episodes, plot_lengths
from hpc_es.analysis.finals import plot_finals
from hpc_es.analysis.horizon import plot_horizon
from hpc_es.analysis.lags import plot_composition, plot_lags
from hpc_es.analysis.timeline import plot_timeline, plot_worker_shares
from hpc_es.analysis.waiting import plot_discards, plot_durations, plot_waiting

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
