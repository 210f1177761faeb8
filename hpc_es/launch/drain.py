"""Remove one worker from a live run, without a pause and without losing its evaluation.

The head does it: the worker gets no more evaluations, finishes its current one, and its job ends COMPLETED.
"""

import re

from hpc_es.errors import LaunchError
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import AnyMessage, DrainRequest, Status, StatusRequest, WorkerStatus
from hpc_es.transport.observer import ask

TIMEOUT_S = 5.0


def drain(paths: RunPaths, who: str) -> str:
    """Drain the worker that `who` means: a seat (12_3), the number of an array element (3), or a name.

    Errors: TransportError when no head answers; LaunchError with the workers when none or several of them match.
    """
    worker = find(_ask(paths, StatusRequest()), who)
    left = [one for one in _ask(paths, DrainRequest(worker.worker)).workers if one.worker == worker.worker]
    if not left:
        return f"{worker.seat} had no evaluation and was told to exit"
    return f"{worker.seat} exits when {left[0].eval_id} is done"


def find(status: Status, who: str) -> WorkerStatus:
    """The only worker that `who` means. Errors: LaunchError with the workers when none or several of them match."""
    seats = [worker for worker in status.workers if who in (worker.seat, worker.worker)]
    found = seats or [worker for worker in status.workers if re.split("[_-]", worker.seat)[-1] == who]
    if len(found) == 1:
        return found[0]
    there = ", ".join(worker.worker if seats else worker.seat for worker in found or status.workers) or "none"
    raise LaunchError(
        f"{who!r} may be any of the workers {there}: give one of these"
        if found
        else f"the run has no worker {who!r}; connected are: {there}"
    )


def _ask(paths: RunPaths, message: AnyMessage) -> Status:
    answer = ask(paths, message, TIMEOUT_S)
    assert isinstance(answer, Status), "the answer to both requests"
    return answer
