"""What head and workers do because they run inside a Slurm job: make themselves known, keep a log per attempt, queue
again.

Invariants: a job that was queued by hand is known to the run as well as one that `hpc-es submit` queued, from its first
moment on; a worker never runs while its head waits in the queue, but waits there too.
"""

import itertools
import logging
import os
import signal
import sys
import time

from hpc_es.config.load import load
from hpc_es.envs.manifest import complete_tasks
from hpc_es.errors import HpcEsError, LaunchError, Superseded
from hpc_es.launch import prepare
from hpc_es.launch.head_watch import HeadWatch, newest_head, outlook_of
from hpc_es.launch.pool import Pool
from hpc_es.launch.slurm import Role, record, recorded_jobs
from hpc_es.launch.slurm_commands import NotInstalled, Slurm
from hpc_es.paths import RunPaths
from hpc_es.place import Place

EXIT_FINISHED, EXIT_FAILED, EXIT_OUT_OF_TIME = 0, 1, 4
"""Exit codes of head and worker: see run_head and run_worker. After EXIT_OUT_OF_TIME the batch script may have to queue
the job again: see `_requeue`."""
AT_START_S = 1.0
"""How old an answer about the head may be when a worker starts."""
REQUEUE_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Between attempts to queue this job again; the last one repeats until slurm.signal_lead is over."""

log = logging.getLogger(__name__)


def enter(paths: RunPaths, role: Role, place: Place) -> None:
    """Record this job in the run folder, and from here on write to the log of this attempt.

    A terminal stays connected, so that `srun --pty hpc-es worker RUN` can be watched. Until the role listens to signals
    itself, a job that gets the signal USR2 while it is still loading is queued again at once.
    """
    assert place.job is not None, "only called inside a job"
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(_requeue(paths, place)))
    try:
        record(paths, place.job, role, place.num_elements)
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
    """The head of a run whose workers are Slurm jobs: those still in the queue when it ends for good go with it.

    Errors: LaunchError when its time is up and no worker is left that could make the next attempt worthwhile.
    """
    from hpc_es.head.loop import run_head

    try:
        config = load(paths.config).config
        complete_tasks(paths.tasks, config)
        with Pool(paths, max_restarts=config.slurm.max_restarts) as pool:
            code = run_head(paths.root, local=False, workers_are_gone=pool.why_empty)
        if code == EXIT_OUT_OF_TIME and (reason := pool.why_abandoned()) is not None:
            raise LaunchError(f"the time of this job is up, and it is not queued again: {reason}")
    except Superseded:
        raise  # the workers are those of the newer head
    except HpcEsError:
        _cancel_waiting_workers(paths)
        raise
    if code in (EXIT_FINISHED, EXIT_FAILED):
        _cancel_waiting_workers(paths)
    return _requeue(paths, place) if code == EXIT_OUT_OF_TIME else code


def be_worker(paths: RunPaths, seat: str, place: Place) -> int:
    """A worker as a Slurm job. One that comes after the end has nothing to do, and ends well; one that comes before its
    head, which may have been requeued meanwhile, goes back to the queue before it loads anything."""
    if prepare.seems_finished(paths):
        log.info("%s is finished: nothing to do", paths.root)
        return EXIT_FINISHED
    ask_about_head = HeadWatch(paths)
    # an older answer may be of the time before the head's start, which has just let this job start too
    if (outlook := ask_about_head(AT_START_S)).state == "queued":
        log.info("the head waits in the queue: %s", outlook.detail)
        return _requeue(paths, place)
    from hpc_es.worker.loop import run_worker

    code = run_worker(paths.root, seat, ends_at=_ends_at(place), ask_about_head=ask_about_head)
    return _requeue(paths, place) if code == EXIT_OUT_OF_TIME else code


def _ends_at(place: Place, slurm: Slurm | None = None) -> float | None:
    """When Slurm will end this job, in seconds since the epoch; None where it does not say."""
    assert place.job_name is not None, "only called inside a job"
    try:
        (status,) = (slurm or Slurm()).statuses([place.job_name])
    except LaunchError as error:
        log.warning("the end of this job is not known: %s", error)
        return None
    return None if status.seconds_left is None else time.time() + status.seconds_left


def _requeue(paths: RunPaths, place: Place) -> int:
    """Queue this job again, a worker behind a head that is in the queue too; Slurm then ends it. An outage of the
    controller is waited for. The exit code: EXIT_OUT_OF_TIME where it fails, as in a container without Slurm's
    commands, and where several workers share the job; the batch script then queues it again."""
    assert place.job_name is not None, "only called inside a job"
    if place.num_tasks > 1:  # the other workers of this job may have time left for what they do
        log.info("the batch script requeues %s once all its workers have ended", place.job_name)
        return EXIT_OUT_OF_TIME
    log.info("requeueing %s", place.job_name)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's, once the job is requeued: a dependency is set after that
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    slurm, deadline = Slurm(), time.monotonic() + load(paths.config).config.slurm.signal_lead
    for pause in itertools.chain(REQUEUE_PAUSES_S, itertools.repeat(REQUEUE_PAUSES_S[-1])):
        try:
            slurm.requeue(place.job_name, after=_head_in_queue(paths, place, slurm))
            return EXIT_FINISHED
        except NotInstalled as error:
            log.warning("the batch script has to queue this job again: %s", error)
            return EXIT_OUT_OF_TIME
        except LaunchError as error:
            log.warning("this job is not queued again yet: %s", error)
        if time.monotonic() + pause > deadline:
            break
        time.sleep(pause)
    log.error(
        "this job is not queued again: Slurm refused for slurm.signal_lead; `hpc-es submit %s` resumes", paths.root
    )
    return EXIT_OUT_OF_TIME


def _head_in_queue(paths: RunPaths, place: Place, slurm: Slurm) -> str | None:
    """The job of a head that this job should wait for in the queue."""
    head = newest_head(paths, slurm)
    if head is None or head.job_id == place.job or outlook_of(head).state != "queued":
        return None
    return head.job_id


def _cancel_waiting_workers(paths: RunPaths) -> None:
    slurm = Slurm()
    waiting = [job.job_id for job in recorded_jobs(paths, slurm) if job.role == "worker"]
    if not waiting:
        return
    try:
        slurm.cancel(waiting, "--state=PENDING")
    except LaunchError as error:  # compute nodes may lack scancel; whoever starts later finds the run finished
        log.warning("workers that wait in the queue stay there: %s", error)
