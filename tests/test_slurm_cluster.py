"""Runs on a real Slurm cluster (tools/slurm_cluster.sh): nothing here is played."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_es import store
from hpc_es.analysis.verify import verify
from hpc_es.config import Config, load
from hpc_es.errors import LaunchError, TransportError
from hpc_es.launch import slurm
from hpc_es.launch.slurm import Job, Submission
from hpc_es.launch.slurm_commands import Slurm
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import Status, StatusRequest
from hpc_es.transport.observer import ask

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("slurm_cluster")]

ROOT = Path(__file__).resolve().parent.parent
TOOL = str(ROOT / "tools" / "slurm_cluster.sh")
LIMIT_S = 300.0
"""For anything that takes a minute on a machine that has nothing else to do."""


CONFIG = ROOT / "configs" / "slurm_smoke.yaml"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of CONFIG: a model and a folder of this test's own, and an engine that starts quickly."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return [f"model.path={write_tiny_llama(tmp_path / 'model')}", f"run.dir={tmp_path}", "engine.kind=transformers"]


@pytest.fixture
def settings(own: list[str]) -> Callable[..., Config]:
    return lambda *overrides: load(CONFIG, [*own, *overrides]).config


@pytest.fixture
def queue() -> Iterator[Slurm]:
    """Slurm's commands; whatever a test leaves in the queue is cancelled."""
    slurm = Slurm()
    before = _queued()
    yield slurm
    if left := _queued() - before:
        slurm.cancel(left)


def _queued() -> set[str]:
    return set(subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True, check=True).stdout.split())


def hpc_es(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "hpc_es", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    """Of the workers that the head knows."""
    now = status(paths)
    return {worker.seat for worker in now.workers} if now else set()


def workers(paths: RunPaths) -> set[str]:
    """Incarnations that the head knows."""
    now = status(paths)
    return {worker.worker for worker in now.workers} if now else set()


def wait_for_version(submission: Submission, version: int) -> None:
    def there() -> bool:
        assert not Job(submission.head.job_id, "head", Slurm()).status()[0].is_final, "the head has ended"
        now = status(submission.paths)
        return now is not None and now.version >= version

    wait_until(there, f"version {version} was not reached")


def script(folder: Path, text: str, *directives: str) -> Path:
    path = folder / "job.sh"
    path.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), text, ""]))
    return path


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_a_submitted_run_completes_and_verifies(settings: Callable[..., Config], queue: Slurm) -> None:
    submission = slurm.submit(settings())
    assert submission.wait(LIMIT_S) == "COMPLETED"
    assert submission.finished
    assert submission.workers.state == "COMPLETED"
    assert verify(submission.paths.root, say=lambda text: None).ok

    run = store.read(submission.paths.root)
    assert set(run.evaluations.slurm_job) == {submission.workers.job_id}
    assert set(run.evaluations.array_task) <= {"0", "1"}
    assert set(run.workers.host) <= {"node1", "node2", "node3", "node4"}
    shown = json.loads(hpc_es("status", submission.paths.root, "--json"))
    assert {job["state"] for job in shown["jobs"]} == {"COMPLETED"}
    assert f"attempt 0: {submission.paths.logs}" in hpc_es("logs", submission.paths.root, "0")


def test_a_run_queued_by_hand_completes_and_its_waiting_workers_go_with_it(own: list[str], queue: Slurm) -> None:
    run = hpc_es("prepare", CONFIG, *own, "slurm.workers=4", "slurm.max_parallel=1").strip()
    jobs = {}
    for role in ("head", "worker"):
        command = f"sbatch --parsable $(hpc-es sbatch-flags {role} {run}) slurm/{role}.sbatch {run}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        jobs[role] = Job(done.stdout.strip(), role, queue)
    assert jobs["head"].wait(LIMIT_S) == "COMPLETED"
    jobs["worker"].wait(60)
    states = {element.name: element.state for element in jobs["worker"].status()}
    assert states.pop(f"{jobs['worker'].job_id}_0") == "COMPLETED"
    assert set(states.values()) <= {"CANCELLED", "COMPLETED"}
    assert [job.job_id for job in slurm.recorded_jobs(RunPaths(Path(run)))] == [job.job_id for job in jobs.values()]
    assert verify(Path(run), say=lambda text: None).ok


def test_a_worker_is_added_to_a_live_run_and_cancel_ends_everything(
    settings: Callable[..., Config], queue: Slurm
) -> None:
    submission = slurm.submit(settings("run.num_updates=1000", "slurm.workers=1"))
    root = submission.paths.root
    wait_for_version(submission, 1)
    added = queue.submit(ROOT / "slurm" / "worker.sbatch", "--chdir=" + str(ROOT), f"--output={root}/logs/added.out")
    assert Job(added, "worker", queue).wait(60) == "FAILED", "the script was given no run folder"
    command = ["sbatch", "--parsable", "--output=/dev/null", "slurm/worker.sbatch", str(root)]
    added = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    wait_until(lambda: added in seats(submission.paths), "it did not join")
    shown = json.loads(hpc_es("status", root, "--json"))
    running = {job["name"]: job for job in shown["jobs"] if job["state"] == "RUNNING"}
    assert set(running) == {submission.head.job_id, f"{submission.workers.job_id}_0", added}
    assert all(job["node"].startswith("node") and job["seconds_left"] > 0 for job in running.values())

    with pytest.raises(LaunchError, match=f"has a head already: job {submission.head.job_id} is RUNNING"):
        slurm.submit(settings("run.num_updates=1000", "slurm.workers=1"))
    assert added in hpc_es("cancel", root)
    assert submission.wait(60) == "CANCELLED"
    assert Job(added, "worker", queue).wait(60) == "CANCELLED"
    assert "head ends: SIGTERM" in hpc_es("logs", root), "the signal did not reach the head"
    assert verify(root, say=lambda text: None).ok


def test_a_cancelled_run_goes_on_where_it_stopped(settings: Callable[..., Config], queue: Slurm) -> None:
    submission = slurm.submit(settings("run.num_updates=6"))
    wait_for_version(submission, 1)
    submission.cancel()
    assert submission.wait(60) == "CANCELLED"
    again = slurm.submit(settings("run.num_updates=6"))
    assert again.wait(LIMIT_S) == "COMPLETED"
    report = verify(again.paths.root, say=lambda text: None)
    assert report.ok
    assert len(store.read(again.paths.root).updates) == 6


def test_jobs_told_of_their_end_are_queued_again_and_workers_do_not_outlive_their_head(
    settings: Callable[..., Config], queue: Slurm
) -> None:
    submission = slurm.submit(settings("run.num_updates=1000"))
    paths, head, element = submission.paths, submission.head.job_id, f"{submission.workers.job_id}_0"
    wait_for_version(submission, 1)
    queue.cancel([element], "--batch", "--signal=USR2")
    wait_until(lambda: any(name.startswith(f"{element}.1.") for name in workers(paths)), "the worker did not return")
    states = {status.name: status.state for status in submission.workers.status()}
    assert states == {element: "RUNNING", f"{submission.workers.job_id}_1": "RUNNING"}

    queue.cancel([head], "--batch", "--signal=USR2")
    wait_until(lambda: (now := status(paths)) is not None and now.generation == 2, "the head did not return")
    wait_until(lambda: len(workers(paths)) == 2, "the workers did not follow the head")
    submission.head.cancel()
    assert submission.head.wait(60) == "CANCELLED"
    assert submission.workers.wait(60) == "FAILED"
    assert f"the head is gone: job {head} is CANCELLED" in hpc_es("logs", paths.root, element)
    assert verify(paths.root, say=lambda text: None).ok


@pytest.mark.vllm
def test_the_smoke_configuration_completes_with_vllm(own: list[str], queue: Slurm) -> None:
    facts = json.loads(hpc_es("submit", CONFIG, *own, "engine.kind=vllm", "--wait", "--json"))
    assert facts["state"] == "COMPLETED"
    assert facts["finished"]
    hpc_es("verify", facts["run"])


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_wrong_partition_is_told_and_queues_nothing(settings: Callable[..., Config], queue: Slurm) -> None:
    before = _queued()
    with pytest.raises(LaunchError, match=r"(?s)invalid partition.*slurm.worker.partition=gpu.*here: batch, high"):
        slurm.submit(settings("slurm.worker.partition=gpu"))
    assert _queued() == before


# --- what Slurm says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounting", [True, False])
def test_the_end_of_a_killed_job_is_seen(
    accounting: bool, queue: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not accounting:
        text = Path(os.environ["SLURM_CONF"]).read_text()
        (tmp_path / "slurm.conf").write_text(text.replace("accounting_storage/slurmdbd", "accounting_storage/none"))
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        assert subprocess.run(["sacct"], capture_output=True).returncode != 0
    job = Job(queue.submit(script(tmp_path, "sleep 600", "--output=/dev/null", "--array=0-2%2")), "worker", queue)
    wait_until(lambda: job.state == "RUNNING", "it did not start")
    waiting = job.status()[2]
    assert (waiting.state, waiting.reason) == ("PENDING", "JobArrayTaskLimit")
    queue.cancel([f"{job.job_id}_2"])
    job.cancel()
    assert job.wait(30) == "CANCELLED"
    assert Job(f"{job.job_id}_2", "worker", queue).wait(30) in ("GONE", "CANCELLED")


def test_a_failed_node_is_no_end_of_its_job(queue: Slurm, tmp_path: Path) -> None:
    text = f"echo ${{SLURM_RESTART_COUNT:-0}} >>{tmp_path}/attempts; sleep 600"
    job = Job(queue.submit(script(tmp_path, text, "--requeue", "--output=/dev/null")), "worker", queue)
    attempts = tmp_path / "attempts"
    wait_until(attempts.exists, "it did not start")
    node = job.status()[0].node
    subprocess.run([TOOL, "fail-node", node], check=True)
    try:
        seen = set()

        def restarted() -> bool:
            seen.add(job.state)
            return attempts.read_text().split() == ["0", "1"]

        wait_until(restarted, "it was not started again")
        assert seen <= {"RUNNING", "COMPLETING", "PENDING", "REQUEUED", "CONFIGURING"}
    finally:
        subprocess.run([TOOL, "restore-node", node], check=True)
