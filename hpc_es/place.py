"""Where this process runs: the node and, inside a Slurm job, which job.

The only module that reads Slurm's environment variables. None of our own begins with SLURM_, since srun reads those.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    node: str
    job: str | None = None
    """Slurm's job id, that of the whole array for an element of one; None outside Slurm."""
    array_task: str | None = None
    num_elements: int = 0
    """Of the array, whose elements are then 0, 1, ...; 0: it is not such an array."""
    step: str | None = None
    """Which task of which step, when srun started this process."""
    num_tasks: int = 1
    """Of that step: above 1, the process shares its job with others like it."""
    attempt: int = 0
    """How often the job was requeued before."""
    cpus: int | None = None
    """CPUs that were asked for, where Slurm says so."""

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> "Place":
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
        """As squeue writes it: 12, or 12_3 for an element of an array. Requeueing by it spares the other elements."""
        return f"{self.job}_{self.array_task}" if self.array_task is not None else self.job

    @property
    def seat(self) -> str:
        """The same for every attempt of one job, different for any two processes that run at once."""
        if self.job_name is None:
            return f"{self.node}-{os.getpid()}"
        return self.job_name if self.step is None else f"{self.job_name}-{self.step}"

    @property
    def facts(self) -> dict[str, str]:
        """What the head records about a worker's place; empty outside Slurm."""
        if self.job is None:
            return {}
        return {
            "slurm_job": self.job,
            "array_task": self.array_task or "",
            "restart_count": str(self.attempt),
            "node": self.node,
        }
