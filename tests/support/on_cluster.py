"""Helpers for tests on a real Slurm cluster: queries, actions and waits."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from repository import ROOT

from hpc_es.engine.lifetime import process_start
from hpc_es.errors import TransportError
from hpc_es.launch.slurm import Submission
from hpc_es.launch.slurm_commands import Slurm
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import verify
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Committed, Digested, Joined
from hpc_es.transport.messages import Status, StatusRequest
from hpc_es.transport.observer import ask

TOOL = str(ROOT / "tools" / "slurm_cluster.sh")
LIMIT_S = 300.0
"""Time limit for anything that takes up to a minute on an idle machine."""


def hpc_es(*arguments: str | Path) -> str:
    """What the command writes to stdout."""
    return _run(*arguments).stdout


def told(*arguments: str | Path) -> str:
    """What the command writes to stderr."""
    return _run(*arguments).stderr


def _run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hpc_es", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def status(paths: RunPaths) -> Status | None:
    try:
        answer = ask(paths, StatusRequest(), 1.0)
    except TransportError:
        return None
    return answer if isinstance(answer, Status) else None


def seats(paths: RunPaths) -> set[str]:
    """The workers that the head knows."""
    now = status(paths)
    return {worker.seat for worker in now.workers} if now else set()


def workers(paths: RunPaths) -> set[str]:
    """Incarnations that the head knows."""
    now = status(paths)
    return {worker.worker for worker in now.workers} if now else set()


def wait_for_work(submission: Submission, *names: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait until these incarnations (12_0.1 is the second of 12_0) work on something, calling `meanwhile`
    repeatedly."""

    def busy() -> bool:
        meanwhile()
        assert not submission.head.status()[0].is_final, "the head has ended"
        now = status(submission.paths)
        there = [worker.worker for worker in now.workers if worker.state == "busy"] if now else []
        return all(any(worker.startswith(f"{name}.") for worker in there) for name in names)

    wait_until(busy, f"not all of {names} came to work")


def node_of(job: str) -> str:
    """The node where a job runs."""
    return Slurm().statuses([job])[0].node


def process_of(paths: RunPaths, seat: str) -> int:
    """The id of a worker's process; all nodes are this machine."""
    return next(record.pid for record in reversed(joined(paths)) if record.seat == seat)


def joined(paths: RunPaths) -> list[Joined]:
    return [record for record in read_journal(paths.root) if isinstance(record, Joined)]


def is_alive(pid: int) -> bool:
    return process_start(pid) is not None


def wait_for_generation(paths: RunPaths, generation: int) -> None:
    wait_until(
        lambda: (now := status(paths)) is not None and now.generation == generation, f"no head {generation} came"
    )


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True)


def dependencies() -> dict[str, str]:
    """What each pending job waits for."""
    command = ["squeue", "--noheader", "--array", "--states=PENDING", "--format=%i %E"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: what for name, _, what in (line.partition(" ") for line in lines) if what not in ("", "(null)")}


def preempt(node: str, folder: Path) -> None:
    """Occupy a whole node for a moment with a job of higher priority."""
    high = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
    Slurm().submit(script(folder, "sleep 1"), *high)


def cluster(command: str, node: str) -> None:
    subprocess.run([TOOL, command, node], check=True)


def digests(paths: RunPaths) -> dict[int, int]:
    return {record.version: record.digest for record in read_journal(paths.root) if isinstance(record, Digested)}


def assert_as_if_nothing_had_happened(submission: Submission, undisturbed: Submission) -> None:
    """Check that two runs have the same commits and bits, with every evaluation counted once."""
    assert submission.wait(LIMIT_S) == "COMPLETED"
    assert digests(submission.paths) == digests(undisturbed.paths)
    commits = [record.commit for record in read_journal(submission.paths.root) if isinstance(record, Committed)]
    assert [commit.version for commit in commits] == [1, 2, 3, 4]
    times = Counter(each.eval_id for commit in commits for each in commit.consumed)
    assert (len(times), set(times.values())) == (24, {1})
    assert verify(submission.paths.root, say=lambda text: None).ok


def wait_for_version(submission: Submission, version: int) -> None:
    def there() -> bool:
        assert not submission.head.status()[0].is_final, "the head has ended"
        now = status(submission.paths)
        return now is not None and now.version >= version

    wait_until(there, f"version {version} was not reached")


def script(folder: Path, text: str, *directives: str) -> Path:
    path = folder / "job.sh"
    path.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), text, ""]))
    return path


def children(pid: int) -> list[int]:
    return [int(word) for word in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True).stdout.split()]
