"""Ask Slurm about the run's head, on behalf of all its workers.

Invariant: a silent head costs the controller about one question in SHARED_S, however many workers the run has: an
answer is kept in RUN/slurm/head-state.json, and whoever asks says so there first.
"""

import contextlib
import os
import time

import msgspec

from hpc_es.errors import LaunchError
from hpc_es.files import read_json
from hpc_es.launch.slurm import Job, recorded_jobs
from hpc_es.launch.slurm_commands import UNKNOWN as NOT_KNOWN
from hpc_es.launch.slurm_commands import Slurm
from hpc_es.paths import RunPaths
from hpc_es.worker.lookout import UNKNOWN, Outlook

SHARED_S = 20.0
"""How long an answer serves every worker of the run."""


class Answer(msgspec.Struct, frozen=True):
    """Contents of RUN/slurm/head-state.json."""

    time: float
    """When Slurm was asked, in seconds since the epoch."""
    outlook: Outlook


class HeadWatch:
    """Callable: the outlook of the newest head. Never fails: what cannot be found out is unknown."""

    def __init__(self, paths: RunPaths, slurm: Slurm | None = None) -> None:
        self._paths, self._slurm = paths, slurm or Slurm()
        self._file = paths.slurm / "head-state.json"

    def __call__(self, max_age_s: float) -> Outlook:
        """`max_age_s`: how old an answer that another worker got may be, if that is less than SHARED_S."""
        head = newest_head(self._paths, self._slurm)
        if head is None:
            return UNKNOWN  # it is not a Slurm job
        known = self._known(head, min(max_age_s, SHARED_S))
        if known is not None:
            return known
        self._tell(Outlook("unknown", "being asked", head.job_id))  # the others wait for the answer, and do not ask
        outlook = outlook_of(head)
        self._tell(outlook)
        return outlook

    def _known(self, head: Job, max_age_s: float) -> Outlook | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            answer = read_json(self._file, Answer)
            # the clocks of two nodes may differ a little
            if answer.outlook.job == head.job_id and abs(time.time() - answer.time) < max_age_s:
                return answer.outlook
        return None

    def _tell(self, outlook: Outlook) -> None:
        unfinished = self._file.with_name(f".{self._file.name}.{os.uname().nodename}.{os.getpid()}")
        with contextlib.suppress(OSError):  # then every worker asks for itself
            unfinished.write_bytes(msgspec.json.encode(Answer(time.time(), outlook)))
            unfinished.replace(self._file)


def newest_head(paths: RunPaths, slurm: Slurm) -> Job | None:
    """The head that was submitted last: it takes over from all before it, whatever has become of them."""
    return next((job for job in reversed(recorded_jobs(paths, slurm)) if job.role == "head"), None)


def outlook_of(head: Job) -> Outlook:
    """Ask Slurm. One job is asked for by name, since for several squeue reads the table of all jobs."""
    try:
        status = head.status()[0]
    except LaunchError as error:
        return Outlook("unknown", str(error), head.job_id)
    said = f"job {status.name} is {status.state}" + (f" ({status.explanation})" if status.explanation else "")
    if status.is_final:
        return Outlook("gone", said, head.job_id)
    if status.state == NOT_KNOWN:
        return Outlook("unknown", said, head.job_id)
    if status.state == "COMPLETING":
        return Outlook("ending", said, head.job_id)
    if status.state in ("RUNNING", "SUSPENDED", "STOPPED"):
        return Outlook("running", said, head.job_id, status.seconds_running)
    return Outlook("queued", said, head.job_id)
