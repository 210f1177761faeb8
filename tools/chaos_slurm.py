"""A run on the cluster of tools/slurm_cluster.sh, and the faults that chaos.py causes in it."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos_local import Fault, Run

from hpc_es.launch import slurm
from hpc_es.launch.slurm_commands import JobStatus, Slurm
from hpc_es.transport.rendezvous import read_rendezvous

CLUSTER = str(Path(__file__).with_name("slurm_cluster.sh"))
POLL_S = 0.5
COMMAND_S = 120.0
"""Time limit of one command of the cluster."""


@dataclass
class SlurmRun(Run):
    """A run that is submitted once; Slurm and the jobs themselves must recover from all faults."""

    poll_s: float = POLL_S
    submission: slurm.Submission | None = None

    @property
    def is_up(self) -> bool:
        return self.submission is not None and not self.jobs("head")[0].is_final

    def start(self) -> None:
        self.starts += 1
        if self.submission is not None:
            sys.exit(f"the head ended as {self.submission.state} before the run did; see {self.paths.logs}")
        self.submission = slurm.submit(self.config)

    def jobs(self, role: slurm.Role) -> list[JobStatus]:
        assert self.submission is not None, "it is submitted before anything is asked"
        return (self.submission.head if role == "head" else self.submission.workers).status()

    def running(self, role: slurm.Role, rng: random.Random) -> JobStatus:
        """Wait until a job of this role runs on a node, and return it."""
        found: list[JobStatus] = []

        def there() -> bool:
            found[:] = [job for job in self.jobs(role) if job.state == "RUNNING" and job.node]
            return bool(found) or self.finished()

        self.wait(there)
        if not found:
            sys.exit(f"{self.paths.root} ended before a {role} could be disturbed: raise run.num_updates")
        return rng.choice(found)

    def kill(self, role: str) -> None:
        if self.submission is not None:
            self.submission.cancel()

    def end(self) -> list[int]:
        """Wait for all jobs to end; returns the processes that are left."""
        assert self.submission is not None
        self.submission.wait(self.limit_s)
        return self.pids("")


def preempt_worker(run: Run, rng: random.Random) -> None:
    """A job of higher priority claims the whole node for a moment: USR2, then SIGKILL after the grace time."""
    node = _slurm_run(run).running("worker", rng).node
    script = run.paths.root.with_name("preempt.sh")
    script.write_text("#!/bin/sh\nsleep 1\n", encoding="utf-8")
    Slurm().submit(script, "--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null")


def requeue_worker(run: Run, rng: random.Random) -> None:
    Slurm().requeue(_slurm_run(run).running("worker", rng).name)


def requeue_head(run: Run, rng: random.Random) -> None:
    Slurm().requeue(_slurm_run(run).running("head", rng).name)


def fail_node(run: Run, rng: random.Random) -> None:
    """Kill all processes of a worker's node at once; Slurm notices this after a while."""
    there = _slurm_run(run)
    worker = there.running("worker", rng)
    _cluster("fail-node", worker.node)
    # Ask for the job, not for the node: sinfo shows a failed node as "mixed*" until another job starts or ends.
    _await(run, lambda: (worker.name, worker.node) not in {(job.name, job.node) for job in there.jobs("worker")})
    _cluster("restore-node", worker.node)


def double_head(run: Run, rng: random.Random) -> None:
    """Kill only slurmd on the head's node. Slurm starts a second head while the first one continues: it must exit."""
    node = _slurm_run(run).running("head", rng).node
    _await(run, lambda: run.paths.rendezvous.exists())
    before = read_rendezvous(run.paths.rendezvous)
    assert before is not None
    _cluster("fail-slurmd", node)
    _await(run, lambda: len(run.paths.segments()) > before.generation or run.finished())
    _await(run, lambda: before.pid not in run.pids("head"))
    _cluster("restore-node", node)


FAULTS: dict[str, Fault] = {
    "double": double_head,
    "requeue": requeue_worker,
    "preempt": preempt_worker,
    "head": requeue_head,
    "node": fail_node,
}


def _slurm_run(run: Run) -> SlurmRun:
    assert isinstance(run, SlurmRun), "faults of a cluster are for runs on a cluster"
    return run


def _cluster(command: str, node: str) -> None:
    subprocess.run([CLUSTER, command, node], check=True, stdin=subprocess.DEVNULL, timeout=COMMAND_S)


def _await(run: Run, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + run.limit_s
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"{run.paths.root}: Slurm did not do what was waited for within {run.limit_s:g} s")
        time.sleep(POLL_S)
