"""The worker jobs of a run, as its head looks after them: those that fail are queued again, and an end is noticed.

Invariants: each worker job is queued again at most slurm.max_restarts times in the whole run, and none before one
worker of the run has joined (what every worker fails at is not repeated); jobs that were cancelled stay so.
"""

import contextlib
import logging
import os
import re
import threading
import time
from types import TracebackType

import msgspec

from hpc_es.errors import LaunchError
from hpc_es.files import read_json
from hpc_es.launch.process import last_lines
from hpc_es.launch.slurm import jobs_of_last_submission, recorded_jobs
from hpc_es.launch.slurm_commands import JobStatus, Slurm
from hpc_es.paths import RunPaths
from hpc_es.worker.seat import read, read_all

log = logging.getLogger(__name__)

_SLURM_SEAT = re.compile(r"\d+(_\d+)?(-|$)")

LOOK_EVERY_S = 20.0
"""Pause between two looks at the worker jobs. Slurm forgets a job that ended after MinJobAge, usually 300 s, and cannot
queue it again then."""


class Pool:
    """A context; inside it, failed workers are queued again."""

    def __init__(self, paths: RunPaths, slurm: Slurm | None = None, *, max_restarts: int) -> None:
        self._paths, self._slurm, self._max_restarts = paths, slurm or Slurm(), max_restarts
        self._file = paths.slurm / "restarts.json"
        self._began = time.time()
        self._closing = threading.Event()
        self._restarting = threading.Lock()  # the head asks in a thread of its own
        self._thread = threading.Thread(target=self._keep, name="worker-jobs", daemon=True)

    def __enter__(self) -> "Pool":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closing.set()

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            with contextlib.suppress(LaunchError):  # Slurm does not answer: the next look will do
                self.restart_failed()

    def restart_failed(self) -> list[str]:
        """Queue the worker jobs again that have failed, where that may help; their names. Errors: LaunchError."""
        with self._restarting:
            return self._restart_failed()

    def _restart_failed(self) -> list[str]:
        failed = self._failed()
        if not failed or not any(seat.worker for seat in read_all(self._paths)):
            return []
        counts, restarted = self._counts(), []
        for job in failed:
            if (count := counts.get(job.name, 0) + 1) > self._max_restarts:
                continue
            restarted.append(job.name)
            self._note({**counts, job.name: count})  # first, so that the cap holds whatever happens now
            counts[job.name] = count
            try:
                self._slurm.requeue(job.name)
            except LaunchError as error:
                log.warning("worker %s cannot be queued again: %s", job.name, error)
            else:
                why = f"{job.state} ({job.explanation})" if job.explanation else job.state
                log.warning("worker %s is %s: queued again, %d of %d", job.name, why, count, self._max_restarts)
        return restarted

    def why_empty(self) -> str | None:
        """Why no worker will come, where jobs have failed and none is queued or running; None while one may come.

        Workers that were cancelled, or were drained, are no reason to end: whoever did that may send others.
        """
        try:
            if self.restart_failed() or not self._are_over():
                return None
            failed = self._failed()
        except LaunchError:
            return None
        died = [
            seat for seat in read_all(self._paths) if seat.state in ("failed", "died") and seat.since >= self._began
        ]
        if died:
            last = max(died, key=lambda seat: seat.since)
            what = f"{last.seat}, {last.state}: {last.detail}"
        elif failed:
            what = f"{failed[-1].name}, is {failed[-1].state}; {self._last_words(failed[-1].name)}"
        else:
            return None
        return f"no worker is left, and none is queued; the last one, {what}"

    def why_abandoned(self) -> str | None:
        """Why another attempt of the head would wait in vain, however the workers ended; None while one may come."""
        try:
            is_over = self._are_over()
        except LaunchError:
            return None
        outside = [seat for seat in read_all(self._paths) if not _SLURM_SEAT.match(seat.seat)]
        if not is_over or any(seat.state in ("starting", "working") for seat in outside):
            return None
        return "no worker is left, and none is queued"

    def _failed(self) -> list[JobStatus]:
        """The worker jobs that have failed, of those that were queued with this head or later. Errors: LaunchError."""
        jobs = jobs_of_last_submission(self._paths, self._slurm)
        workers = [job for job in jobs if job.role == "worker"]
        if not workers:
            return []
        ids, elements = [job.job_id for job in workers], [name for job in workers for name in job.elements]
        failed = [status for status in self._slurm.statuses(ids, elements) if status.has_failed]
        return self._slurm.with_exit_codes(failed)

    def _are_over(self) -> bool:
        """Whether there were worker jobs, and none is queued or running. Errors: LaunchError."""
        jobs = [job.job_id for job in recorded_jobs(self._paths, self._slurm) if job.role == "worker"]
        return bool(jobs) and all(status.is_final for status in self._slurm.statuses(jobs))

    def _counts(self) -> dict[str, int]:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return read_json(self._file, dict[str, int])
        return {}

    def _note(self, counts: dict[str, int]) -> None:
        unfinished = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk must not end the run; the cap then holds until the next head
            unfinished.write_bytes(msgspec.json.encode(counts))
            unfinished.replace(self._file)

    def _last_words(self, name: str) -> str:
        seat = read(self._paths, name)
        if seat is not None and seat.state in ("failed", "died"):
            return f"it {seat.state}: {seat.detail}"
        logs = self._paths.job_logs(name)
        words = last_lines(logs[-1], 1).strip() if logs else ""
        return f"its log ends with: {words}" if words else "it has written no log"
