"""What head and workers do because they run inside a Slurm job: make themselves known, and keep a log per attempt.

Invariant: a job that was queued by hand is known to the run as well as one that `hpc-es submit` queued, from its first
moment on.
"""

import logging
import os
import signal
import sys
import time

from hpc_es.config.load import load
from hpc_es.envs.manifest import complete_tasks
from hpc_es.errors import HpcEsError, LaunchError, Superseded
from hpc_es.launch import prepare
from hpc_es.launch.slurm import Role, record, recorded_jobs
from hpc_es.launch.slurm_commands import Slurm
from hpc_es.paths import RunPaths
from hpc_es.place import Place
from hpc_es.worker.seat import read_all

EXIT_FINISHED, EXIT_FAILED, EXIT_OUT_OF_TIME = 0, 1, 4
"""Exit codes of head and worker: see run_head and run_worker."""

log = logging.getLogger(__name__)


def enter(paths: RunPaths, role: Role, place: Place) -> None:
    """Record this job in the run folder, and from here on write to the log of this attempt.

    A terminal stays connected, so that `srun --pty hpc-es worker RUN` can be watched. Until the role listens to signals
    itself, a job that is told of its end while it is still loading is queued again at once.
    """
    assert place.job is not None, "only called inside a job"
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(_requeue(place)))
    try:
        record(paths, place.job, role)
        if not sys.stdout.isatty():
            _log_into(paths, role, place)
    except OSError as error:
        raise LaunchError(
            f"the run folder {paths.root} cannot be written on {place.node}: {error}; it must lie where every "
            f"node of the run may write (run.dir)"
        ) from None


def _log_into(paths: RunPaths, role: Role, place: Place) -> None:
    paths.logs.mkdir(exist_ok=True)
    own_log = paths.log(f"{role}-{place.seat}.{place.attempt}")
    # What is said before this, and by Slurm itself at the end, stays in the job's own output.
    print(f"{role} {place.seat} on {place.node}, attempt {place.attempt}: {own_log}", flush=True)
    with open(own_log, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


def be_head(paths: RunPaths, place: Place) -> int:
    """The head of a run whose workers are Slurm jobs: those still in the queue when it ends for good go with it."""
    from hpc_es.head.loop import run_head

    try:
        began = time.time()
        complete_tasks(paths.tasks, load(paths.config).config)
        code = run_head(paths.root, local=False, workers_are_gone=lambda: workers_are_gone(paths, began))
    except Superseded:
        raise  # the workers are those of the newer head
    except HpcEsError:
        _cancel_waiting_workers(paths)
        raise
    if code in (EXIT_FINISHED, EXIT_FAILED):
        _cancel_waiting_workers(paths)
    return _requeue(place) if code == EXIT_OUT_OF_TIME else code


def be_worker(paths: RunPaths, seat: str, place: Place) -> int:
    """A worker as a Slurm job. One that comes after the end has nothing to do, and ends well."""
    if prepare.is_finished(paths):
        log.info("%s is finished: nothing to do", paths.root)
        return EXIT_FINISHED
    from hpc_es.worker.loop import run_worker

    code = run_worker(paths.root, seat, ends_at=_ends_at(place), head_is_gone=lambda: head_is_gone(paths))
    return _requeue(place) if code == EXIT_OUT_OF_TIME else code


def head_is_gone(paths: RunPaths, slurm: Slurm | None = None) -> str | None:
    """Why no head will come back, by what Slurm says of the heads that we know; None while one may."""
    heads = [job.job_id for job in recorded_jobs(paths) if job.role == "head"]
    if not heads:
        return None  # it is no Slurm job
    try:
        statuses = (slurm or Slurm()).statuses(heads)
    except LaunchError:
        return None
    if not all(status.is_final for status in statuses):
        return None
    return ", ".join(f"job {status.name} is {status.state}" for status in statuses[-1:])


def workers_are_gone(paths: RunPaths, since: float, slurm: Slurm | None = None) -> str | None:
    """Why no worker will come, where the last ones failed or died and none is queued; None while one may come.

    `since`: when this head began; what failed before it is history. Workers that were cancelled or have run out of time
    are no reason to end: whoever did that will send others.
    """
    gone = [seat for seat in read_all(paths) if seat.state in ("failed", "died") and seat.since >= since]
    jobs = [job.job_id for job in recorded_jobs(paths) if job.role == "worker"]
    if not gone or not jobs:
        return None
    try:
        statuses = (slurm or Slurm()).statuses(jobs)
    except LaunchError:
        return None
    if not all(status.is_final for status in statuses):
        return None
    last = max(gone, key=lambda seat: seat.since)
    return f"no worker is left, and none is queued; the last one, {last.seat}, {last.state}: {last.detail}"


def _ends_at(place: Place, slurm: Slurm | None = None) -> float | None:
    """When Slurm will end this job, in seconds since the epoch; None where it does not say."""
    assert place.job_name is not None, "only called inside a job"
    try:
        (status,) = (slurm or Slurm()).statuses([place.job_name])
    except LaunchError as error:
        log.warning("the end of this job is not known: %s", error)
        return None
    return None if status.seconds_left is None else time.time() + status.seconds_left


def _requeue(place: Place) -> int:
    """Queue this job again; Slurm then ends it. The exit code for where that fails."""
    assert place.job_name is not None, "only called inside a job"
    log.info("requeueing %s", place.job_name)
    try:
        Slurm().requeue(place.job_name)
    except LaunchError as error:
        log.error("this job is not queued again: %s", error)
    return EXIT_OUT_OF_TIME


def _cancel_waiting_workers(paths: RunPaths) -> None:
    slurm = Slurm()
    waiting = [job.job_id for job in recorded_jobs(paths, slurm) if job.role == "worker"]
    if not waiting:
        return
    try:
        slurm.cancel(waiting, "--state=PENDING")
    except LaunchError as error:  # compute nodes may lack scancel; whoever starts later finds the run finished
        log.warning("workers that wait in the queue stay there: %s", error)
