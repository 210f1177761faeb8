"""What is asked of every message before the core acts on it, and how much one sender may cause.

Pure. Nothing that breaks a rule reaches journal, ledger, crew or plane. Who breaks rules again and again is sent away,
and nobody can make the head write without end: events and given-up leases have an allowance per worker, joins one for
all.
"""

from hpc_es.allowance import Allowance
from hpc_es.bounds import fault
from hpc_es.es.records import Assignment
from hpc_es.es.results import contradiction
from hpc_es.transport.messages import AnyMessage, Report

MAX_REFUSALS = 3
"""Messages of one worker that break a rule before it is sent away."""
AGE_SLACK_S = 3600.0
"""How much older than its run a report may claim to be: the clock may have been set back between two heads."""
EVENTS_AT_ONCE, EVENTS_PER_MINUTE = 60, 60
"""Events that the messages of one worker may cause, and leases that it may give up."""
JOINS_AT_ONCE, JOINS_PER_MINUTE = 4096, 600
"""Workers that may join; one that comes too early asks again with its next heartbeat."""


def events_allowance() -> Allowance:
    return Allowance(EVENTS_AT_ONCE, EVENTS_PER_MINUTE)


def why_refused(message: AnyMessage) -> str | None:
    """The rule of its fields that a message breaks."""
    found = fault(message)
    return None if found is None else str(found)


def why_no_result(report: Report, assignment: Assignment, run_age_s: float) -> str | None:
    """Why a report cannot be of this assignment, in a run that began so long ago; None: it can."""
    return contradiction(assignment, report.result) or _impossible_times(report, run_age_s)


def _impossible_times(report: Report, run_age_s: float) -> str | None:
    result, limit = report.result, run_age_s + AGE_SLACK_S
    if report.finished_age > report.started_age:
        return f"it ended {report.finished_age:g} s ago and began {report.started_age:g} s ago"
    generating = [episode.seconds_generating for episode in result.episodes]
    in_env = [episode.seconds_in_env for episode in result.episodes]
    measured = (report.started_age, result.seconds_update, result.seconds_perturb, result.seconds_rollout)
    if (longest := max(*measured, *generating, *in_env)) > limit:
        return f"it says that something took {longest:g} s; the run began {run_age_s:g} s ago"
    return None
