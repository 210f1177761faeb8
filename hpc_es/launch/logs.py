"""Find the log of a role: head.log and worker-local-0.log of a local run, worker-12_3.1.log of attempt 1 in Slurm.

A job that failed before its role began has only what Slurm wrote, slurm-12_3.out; then that is its log.
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_es.errors import ConfigError
from hpc_es.launch.slurm import recorded_jobs
from hpc_es.paths import RunPaths

FOLLOW_EVERY_S = 0.5

_NAME = re.compile(r"(?P<role>head|worker)(-(?P<seat>.+?))?(\.(?P<attempt>\d+))?\.log")


@dataclass(frozen=True)
class Log:
    path: Path
    role: str
    seat: str
    """12_3, local-0; empty for the head of a local run."""
    attempt: int

    @property
    def age_key(self) -> tuple[float, int]:
        return self.path.stat().st_mtime, self.attempt

    @property
    def slurm_output(self) -> Path | None:
        """What Slurm itself said about this job: time limits, cancellations, a script that could not start."""
        path = self.path.with_name(f"slurm-{self.seat}.out")
        return path if path.is_file() and path != self.path else None

    def answers_to(self, name: str) -> bool:
        """Whether `name` means this log: head, 12_3, 12_3.1, local-0, or the number of an array element."""
        seat = self.seat or self.role
        return name in (self.role, seat, f"{self.role}-{seat}", f"{seat}.{self.attempt}") or (
            self.role == "worker" and re.split("[_-]", seat)[-1] == name
        )


def find_log(paths: RunPaths, name: str) -> Log:
    """The newest log that `name` means (see `answers_to`).

    Errors: ConfigError that lists what there is.
    """
    logs = all_logs(paths)
    if found := [log for log in logs if log.answers_to(name)]:
        return found[-1]
    there = ", ".join(log.path.stem for log in logs) or "none yet"
    raise ConfigError(f"{paths.logs} has no log of {name!r}; there are: {there}")


def follow(paths: RunPaths, name: str) -> Iterator[str]:
    """Lines that are written from now on to the newest log that `name` means, and after a requeue to the next one."""
    path = find_log(paths, name).path
    file = open(path, "rb")  # noqa: SIM115 - another one takes its place
    try:
        file.seek(0, os.SEEK_END)
        unfinished = b""
        while True:
            if line := file.readline():
                unfinished += line
                if line.endswith(b"\n"):
                    yield unfinished.decode("utf-8", errors="replace").rstrip("\n")
                    unfinished = b""
            elif (newest := find_log(paths, name).path) != path:
                file.close()
                path, unfinished = newest, b""
                file = open(path, "rb")  # noqa: SIM115
                yield f"==> {path} <=="
            else:
                time.sleep(FOLLOW_EVERY_S)
    finally:
        file.close()


def all_logs(paths: RunPaths) -> list[Log]:
    """Every log of a role, the one written to last at the end."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in paths.logs.glob("*.log")]
    logs = [
        Log(path, match["role"], match["seat"] or "", int(match["attempt"] or 0)) for path, match in matches if match
    ]
    seats = {log.seat for log in logs}
    for job in recorded_jobs(paths):
        for path in (*paths.logs.glob(f"slurm-{job.job_id}.out"), *paths.logs.glob(f"slurm-{job.job_id}_*.out")):
            seat = path.stem.removeprefix("slurm-")
            if seat not in seats:
                logs.append(Log(path, job.role, seat, 0))
    return sorted(logs, key=lambda log: log.age_key)
