"""Where this process runs: its node and, inside Slurm, its job.

This is the only module that reads Slurm's environment variables. None of our own variables begins with SLURM_, since
srun reads all of those.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Node and Slurm job of a process."""

    node: str
    job: str | None = None
    """Slurm's job id; for an array task, the id of the whole array; None outside Slurm."""
    array_task: str | None = None
    """Index in the job array; None if the job is not an array."""
    num_elements: int = 0
    """Number of elements of the array, if they are 0, 1, ...; 0: it is not such an array."""
    step: str | None = None
    """Step and task in it, if srun started this process."""
    num_tasks: int = 1
    """Number of tasks of that step; above 1, the process shares its job with others like it."""
    attempt: int = 0
    """How often the job has been requeued."""
    cpus: int | None = None
    """Number of allocated CPUs, if Slurm tells it."""

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> "Place":
        """The place of this process."""
        given = os.environ if environment is None else environment
        job = given.get("SLURM_ARRAY_JOB_ID") or given.get("SLURM_JOB_ID")
        if not job:
            return cls(socket.gethostname())
        step = given.get("SLURM_STEP_ID")
        return cls(
            # virtual nodes of one machine share its host name
            node=given.get("SLURMD_NODENAME") or socket.gethostname(),
            job=job,
            array_task=given.get("SLURM_ARRAY_TASK_ID"),
            num_elements=int(given.get("SLURM_ARRAY_TASK_COUNT") or 0)
            if given.get("SLURM_ARRAY_TASK_MIN") == "0"
            else 0,
            step=f"{step}.{given.get('SLURM_PROCID', '0')}" if step is not None else None,
            num_tasks=int(given.get("SLURM_STEP_NUM_TASKS") or 1) if step is not None else 1,
            attempt=int(given.get("SLURM_RESTART_COUNT") or 0),
            cpus=int(given.get("SLURM_CPUS_PER_TASK") or given.get("SLURM_CPUS_ON_NODE") or 0) or None,
        )

    @property
    def job_name(self) -> str | None:
        """The job's name in squeue: 12, or 12_3 for an array task. Requeueing 12_3 leaves the other tasks alone."""
        return f"{self.job}_{self.array_task}" if self.array_task is not None else self.job

    @property
    def seat(self) -> str:
        """Default name of a worker's seat: the same for all attempts of a job, unique among running processes."""
        if self.job_name is None:
            return f"{self.node}-{os.getpid()}"
        return self.job_name if self.step is None else f"{self.job_name}-{self.step}"

    @property
    def facts(self) -> dict[str, str]:
        """Facts that the head records about a worker's place; empty outside Slurm."""
        if self.job is None:
            return {}
        return {
            "slurm_job": self.job,
            "array_task": self.array_task or "",
            "restart_count": str(self.attempt),
            "node": self.node,
        }
