"""Checks of every message before the core acts on it, and limits on what one sender may cause.

Pure. No message that breaks a rule reaches journal, ledger, crew or plane. A worker that repeatedly breaks rules is
removed from the run. What messages can make the head write is limited: the events that each worker causes, the leases
that it gives up, and the joins of all workers together.
"""

from hpc_es.allowance import Allowance
from hpc_es.bounds import fault
from hpc_es.records import Assignment
from hpc_es.results import contradiction
from hpc_es.transport.messages import AnyMessage, Report

MAX_REFUSALS = 3
"""How many invalid messages one worker may send; after one more it is removed from the run."""
AGE_SLACK_S = 3600.0
"""How much older than its run a reported age may be: the clock may have been set back between two heads."""
EVENTS_AT_ONCE, EVENTS_PER_MINUTE = 60, 60
"""Rate limit on the events that the messages of one worker cause, and on the leases that it gives up."""
JOINS_AT_ONCE, JOINS_PER_MINUTE = 4096, 600
"""Rate limit on workers that join; a worker above the limit tries again at its next heartbeat."""


def events_allowance() -> Allowance:
    return Allowance(EVENTS_AT_ONCE, EVENTS_PER_MINUTE)


def why_refused(message: AnyMessage) -> str | None:
    """Which field of the message breaks which rule; None if all fields are valid."""
    found = fault(message)
    return None if found is None else str(found)


def why_no_result(report: Report, assignment: Assignment, run_age_s: float) -> str | None:
    """Why a report is impossible for this assignment and for the age of the run; None if it is possible."""
    return contradiction(assignment, report.result) or _impossible_times(report, run_age_s)


def _impossible_times(report: Report, run_age_s: float) -> str | None:
    result, limit = report.result, run_age_s + AGE_SLACK_S
    if report.finished_age > report.started_age:
        return f"it ended {report.finished_age:g} s ago, before it began, {report.started_age:g} s ago"
    generating = [episode.seconds_generating for episode in result.episodes]
    in_env = [episode.seconds_in_env for episode in result.episodes]
    measured = (report.started_age, result.seconds_update, result.seconds_perturb, result.seconds_rollout)
    if (longest := max(*measured, *generating, *in_env)) > limit:
        return f"it reports a duration or age of {longest:g} s; the run began {run_age_s:g} s ago"
    return None
