"""What each worker did and when: its evaluations, and how it shared its time.

Invariant: a share is of the seconds that a worker was connected. Busy is updating, perturbing and rolling out; useful
is the part of it that went into accepted evaluations. Times are on the head's clock.
"""

import re
from typing import TYPE_CHECKING, Any

from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

FATES = ("accepted", "discarded", "void", "eval", "other")
"""What became of an evaluation. `eval` is the unperturbed policy; `other` was neither consumed nor refused yet."""


def worker_shares(run: Run) -> "pd.DataFrame":
    """One row per worker incarnation that ever connected: worker, connected (s), and its busy and useful shares."""
    import pandas as pd

    workers = run.workers[run.workers["seconds_connected"] > 0]
    workers = workers.sort_values("worker", key=lambda names: names.map(natural_order))
    connected = workers["seconds_connected"]
    return pd.DataFrame(
        {
            "worker": workers["worker"],
            "connected": connected,
            "busy": workers["seconds_busy"] / connected,
            "useful": workers["seconds_useful"] / connected,
        }
    ).reset_index(drop=True)


def spans(run: Run) -> "pd.DataFrame":
    """One row per finished evaluation: worker, start and end (s since the run's first plan), fate (one of FATES)."""
    import pandas as pd

    evaluations = run.evaluations[run.evaluations["time_finished"].notna() & (run.evaluations["source"] == "run")]
    begin = first_plan(run)
    fate = evaluations["status"].where(evaluations["status"].isin(FATES), "other")
    fate = fate.where((evaluations["kind"] == "train") | (fate == "void"), "eval")
    return pd.DataFrame(
        {
            "worker": evaluations["worker"],
            "start": evaluations["time_started"] - begin,
            "end": evaluations["time_finished"] - begin,
            "fate": fate,
        }
    )


def first_plan(run: Run) -> float:
    """Time at which the run planned its first evaluation, in seconds since the epoch.

    Evaluations made after the run (`hpc-es eval`) do not count: their times come from another clock.
    """
    return float(run.evaluations.loc[run.evaluations["source"] == "run", "time_planned"].min())


def commit_times(run: Run) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Time of each commit, in seconds since the run's first plan."""
    times: np.ndarray[Any, np.dtype[np.float64]] = run.updates["time_committed"].to_numpy(float) - first_plan(run)
    return times


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts seat2 before seat10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))
