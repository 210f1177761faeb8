"""How stale results were: lags of consumed and refused members, and cohorts compared with their schedule.

Invariant: lags are those that the head counted at the commit (`evaluations.lag`), of members only, not the centre.
"""

from typing import TYPE_CHECKING

from hpc_es.config.load import from_record
from hpc_es.errors import ConfigError
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd


def lag_counts(run: Run) -> "pd.DataFrame":
    """Number of members by lag. Index: lag; columns: accepted, discarded."""
    import pandas as pd

    members = members_with_lag(run)
    counts = pd.crosstab(members["lag"].astype(int), members["status"])
    return counts.reindex(columns=["accepted", "discarded"], fill_value=0).rename_axis(columns=None)


def composition(run: Run) -> "pd.DataFrame":
    """Number of accepted members by lag in each cohort. Index: update; one column per lag."""
    import pandas as pd

    members = members_with_lag(run)
    members = members[members["status"] == "accepted"]
    update = (members["consumed_version"].astype(int) + 1).rename("update")
    return pd.crosstab(update, members["lag"].astype(int).rename("lag"))


def prescribed(run: Run) -> "pd.DataFrame | None":
    """Composition that the schedule prescribes for the committed cohorts, as a table like `composition`.

    None if the schedule prescribes none (natural), or another version of hpc_es wrote the configuration.
    """
    import pandas as pd

    from hpc_es import methods
    from hpc_es.staleness import Composed

    try:
        schedule = methods.make(from_record(str(run.attrs["config"]))).schedule()
    except ConfigError:
        return None
    if not isinstance(schedule, Composed):
        return None
    updates = run.updates["version"].astype(int).tolist()
    rows = pd.DataFrame([schedule.composition(update) for update in updates], index=pd.Index(updates, name="update"))
    return rows.fillna(0).astype(int).sort_index(axis=1).rename_axis(columns="lag")


def deviating_updates(run: Run) -> list[int]:
    """Updates whose cohort differs from the schedule; empty if the schedule prescribes nothing."""
    wanted = prescribed(run)
    if wanted is None:
        return []
    found, wanted = composition(run).align(wanted, fill_value=0)
    return [int(update) for update in found.index[(found != wanted).any(axis=1)]]


def members_with_lag(run: Run) -> "pd.DataFrame":
    """Rows of `run.evaluations` of members that have a lag: those that were consumed or refused."""
    evaluations = run.evaluations
    return evaluations[(evaluations["kind"] == "train") & evaluations["lag"].notna()]
