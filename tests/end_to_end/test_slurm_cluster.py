"""Runs on a real Slurm cluster (tools/slurm_cluster.sh): nothing here is played."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gated
import pytest
import rogue
from on_cluster import (
    LIMIT_S,
    assert_as_if_nothing_had_happened,
    children,
    cluster,
    dependencies,
    hpc_es,
    is_alive,
    joined,
    node_of,
    preempt,
    process_of,
    scontrol,
    script,
    seats,
    status,
    told,
    wait_for_generation,
    wait_for_version,
    wait_for_work,
    wait_until,
    workers,
)
from repository import ROOT, SUPPORT

from hpc_es import store, submit
from hpc_es.config import Config, load
from hpc_es.errors import LaunchError
from hpc_es.launch import slurm
from hpc_es.launch.slurm import Job, Submission
from hpc_es.launch.slurm_commands import Slurm
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import verify
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Started
from hpc_es.transport.rendezvous import read_rendezvous

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("slurm_cluster")]

CONFIG = ROOT / "configs" / "slurm_smoke.yaml"


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Set the environment of every job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
        yield


def overrides(folder: Path) -> list[str]:
    """Of CONFIG: a model and a folder of this test's own, an engine that starts in a moment and whose answers do not
    depend on the batch, and tasks that last and can be held up."""
    return [
        f"model.path={write_lab_model(folder / 'model', LAB_MODELS['lab-10k'])}",
        f"run.dir={folder}",
        "engine.kind=lab",
        "engine.max_concurrent=1",
        "es.sigma=0.5",
        "es.alpha=0.5",
        "task.chat=false",
        "task.env=gated:Sudoku",
        "task.step_timeout=10m",
    ]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(gated.GATE, str(tmp_path / "gate"))
    monkeypatch.setenv(gated.PACE, "0.1")
    return overrides(tmp_path)


@pytest.fixture
def gate(own: list[str], tmp_path: Path) -> Iterator[Path]:
    """While this file exists, no evaluation ends."""
    file = tmp_path / "gate"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, slurm_cluster: None) -> Iterator[Submission]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gated.GATE, str(folder / "gate"))
        patch.setenv(gated.PACE, "0.1")
        submission = submit(CONFIG, *overrides(folder))
        try:
            assert submission.wait(LIMIT_S) == "COMPLETED"
            yield submission
        finally:
            submission.cancel()


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


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_a_submitted_run_completes_and_verifies(undisturbed: Submission) -> None:
    submission = undisturbed
    assert submission.finished
    assert submission.workers.state == "COMPLETED"
    assert verify(submission.paths.root, say=lambda text: None).ok

    run = submission.result()
    assert set(run.evaluations.slurm_job) == {submission.workers.job_id}
    assert set(run.evaluations.array_task) <= {"0", "1"}
    assert set(run.workers.host) <= {"node1", "node2", "node3", "node4"}
    shown = json.loads(hpc_es("status", submission.paths.root, "--json"))
    assert {job["state"] for job in shown["jobs"]} == {"COMPLETED"}
    assert f"attempt 0: {submission.paths.logs}" in hpc_es("logs", submission.paths.root, "0")

    tasks = submission.workers.tasks
    assert [task.job_id for task in tasks] == [f"{submission.workers.job_id}_{i}" for i in range(2)]
    assert [(task.state, task.done(), task.exception()) for task in tasks] == [("COMPLETED", True, None)] * 2
    assert "worker ends: all updates" in tasks[0].stdout()
    assert submission.stdout() == submission.head.stdout() != ""


def test_a_run_queued_by_hand_completes_and_its_waiting_workers_go_with_it(own: list[str], queue: Slurm) -> None:
    run = hpc_es("prepare", CONFIG, *own, "es.tasks_per_member=2", "slurm.workers=4", "slurm.max_parallel=1").strip()
    jobs = {}
    for role in ("head", "worker"):
        command = f"sbatch --parsable $(hpc-es sbatch-flags {role} {run}) slurm/{role}.sbatch {run}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        jobs[role] = Job(done.stdout.strip(), role, queue, RunPaths(Path(run)))
    assert jobs["head"].wait(LIMIT_S) == "COMPLETED"
    jobs["worker"].wait(60)
    states = {element.name: element.state for element in jobs["worker"].status()}
    assert states.pop(f"{jobs['worker'].job_id}_0") == "COMPLETED"
    assert set(states.values()) <= {"CANCELLED", "COMPLETED"}
    assert [job.job_id for job in slurm.recorded_jobs(RunPaths(Path(run)))] == [job.job_id for job in jobs.values()]
    assert verify(Path(run), say=lambda text: None).ok


def test_a_worker_is_added_another_drained_and_a_cancelled_run_resumes(
    settings: Callable[..., Config], queue: Slurm
) -> None:
    submission = slurm.submit(settings("run.num_updates=1000", "slurm.workers=1"))
    root = submission.paths.root
    wait_for_version(submission, 1)
    added = queue.submit(ROOT / "slurm" / "worker.sbatch", "--chdir=" + str(ROOT), f"--output={root}/logs/added.out")
    assert Job(added, "worker", queue, submission.paths).wait(60) == "FAILED", "the script was given no run folder"
    command = ["sbatch", "--parsable", "--output=/dev/null", "slurm/worker.sbatch", str(root)]
    added = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    wait_until(lambda: added in seats(submission.paths), "it did not join")
    shown = json.loads(hpc_es("status", root, "--json"))
    running = {job["name"]: job for job in shown["jobs"] if job["state"] == "RUNNING"}
    assert set(running) == {submission.head.job_id, f"{submission.workers.job_id}_0", added}
    assert all(job["node"].startswith("node") and job["seconds_left"] > 0 for job in running.values())

    with pytest.raises(LaunchError, match=f"has a head already: job {submission.head.job_id} is RUNNING"):
        slurm.submit(settings("run.num_updates=1000", "slurm.workers=1"))
    assert f"{submission.workers.job_id}_0 " in hpc_es("drain", root, "0")
    assert submission.workers.wait(60) == "COMPLETED"
    assert seats(submission.paths) == {added}
    assert added in hpc_es("cancel", root)
    assert submission.wait(60) == "CANCELLED"
    assert Job(added, "worker", queue, submission.paths).wait(60) == "CANCELLED"
    assert "the head exits: SIGTERM" in hpc_es("logs", root), "the signal did not reach the head"

    before = list(store.read(root).updates.version)
    again = slurm.submit(settings("run.num_updates=1000", "slurm.workers=1"))
    wait_for_version(again, before[-1] + 1)
    again.cancel()
    assert again.wait(60) == "CANCELLED"
    assert verify(root, say=lambda text: None).ok
    updates = list(store.read(root).updates.version)
    assert updates == list(range(1, len(updates) + 1))
    assert len(updates) > len(before)


def test_jobs_near_their_time_limit_are_requeued_and_workers_do_not_outlive_their_head(
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


def test_workers_may_be_preempted_requeued_frozen_cancelled_or_lose_their_node(
    gate: Path, settings: Callable[..., Config], undisturbed: Submission, queue: Slurm, tmp_path: Path
) -> None:
    submission = slurm.submit(settings())
    first, second = (f"{submission.workers.job_id}_{i}" for i in range(2))
    wait_for_work(submission, f"{first}.0", f"{second}.0")
    assert len({node_of(job) for job in (submission.head.job_id, first, second)}) == 3

    preempt(node_of(first), tmp_path)
    queue.requeue(second)
    wait_for_work(submission, f"{first}.1", f"{second}.1")
    assert "requeueing" in hpc_es("logs", submission.paths.root, f"{first}.0"), "it was not told of its preemption"
    gate.unlink()
    wait_for_version(submission, 1)
    gate.touch()

    wait_for_work(submission, f"{first}.1", f"{second}.1")
    failed = node_of(first)
    cluster("fail-node", failed)
    try:
        frozen = process_of(submission.paths, second)
        os.kill(frozen, signal.SIGSTOP)  # so only SIGKILL, when the grace time is over, ends it
        preempt(node_of(second), tmp_path)
        one, seen = Job(first, "worker", queue, submission.paths), set()
        wait_for_work(submission, f"{first}.2", f"{second}.2", meanwhile=lambda: seen.add(one.state))
        assert seen <= {"RUNNING", "COMPLETING", "PENDING", "REQUEUED", "CONFIGURING"}, "a failed node is no end"
    finally:
        cluster("restore-node", failed)
    queue.cancel([second])
    wait_until(lambda: seats(submission.paths) == {first}, "a cancelled worker stays")
    gate.unlink()
    assert_as_if_nothing_had_happened(submission, undisturbed)
    assert {one.name: one.state for one in submission.workers.status()} == {first: "COMPLETED", second: "CANCELLED"}


def test_a_head_may_move_to_another_node_or_have_a_double(
    gate: Path, settings: Callable[..., Config], undisturbed: Submission, queue: Slurm
) -> None:
    submission = slurm.submit(settings())
    paths, head = submission.paths, submission.head.job_id
    first, second = (f"{submission.workers.job_id}_{i}" for i in range(2))
    wait_for_work(submission, f"{first}.0", f"{second}.0")

    nodes = [node_of(head)]
    scontrol("update", f"nodename={nodes[0]}", "state=drain", "reason=test")
    try:
        queue.requeue(head)
        wait_for_generation(paths, 2)
    finally:
        scontrol("update", f"nodename={nodes[0]}", "state=resume")
    nodes.append(node_of(head))
    wait_for_work(submission, f"{first}.0", f"{second}.0")

    older = read_rendezvous(paths.rendezvous)
    assert older is not None
    cluster("fail-slurmd", nodes[1])
    try:
        wait_for_generation(paths, 3)
        wait_until(lambda: not is_alive(older.pid), "the older of two heads goes on")
    finally:
        cluster("restore-node", nodes[1])
    nodes.append(node_of(head))
    assert "a newer head" in hpc_es("logs", paths.root, f"{head}.1")
    gate.unlink()
    assert_as_if_nothing_had_happened(submission, undisturbed)
    starts = [record.host for record in read_journal(paths.root) if isinstance(record, Started)]
    assert starts == nodes
    assert nodes[0] != nodes[1] != nodes[2]


def test_a_failed_worker_returns_and_workers_queue_again_behind_a_head_that_waits(
    gate: Path, settings: Callable[..., Config], undisturbed: Submission, queue: Slurm
) -> None:
    submission = slurm.submit(settings("transport.head_timeout=10s"))
    paths, head = submission.paths, submission.head.job_id
    first, second = (f"{submission.workers.job_id}_{i}" for i in range(2))
    wait_for_work(submission, f"{first}.0", f"{second}.0")
    queue.cancel([second], "--batch", "--signal=KILL")
    wait_until(lambda: queue.statuses([second])[0].state == "FAILED", "it lives")
    shown = json.loads(hpc_es("status", paths.root, "--json"))
    assert [job["explanation"] for job in shown["jobs"] if job["name"] == second] == ["killed by SIGKILL"]
    wait_for_work(submission, f"{first}.0", f"{second}.1")

    scontrol("requeuehold", head)
    behind = f"after:{head}(unfulfilled)"
    wait_until(lambda: dependencies() == {first: behind, second: behind}, "the workers do not wait behind the head")
    assert f"the head waits in the queue: job {head} is PENDING" in hpc_es("logs", paths.root, f"{first}.0")
    assert f"the head waits in the queue: job {head} is PENDING" in told("status", paths.root)
    scontrol("release", head)
    wait_for_work(submission, f"{first}.1", f"{second}.2")
    gate.unlink()
    assert_as_if_nothing_had_happened(submission, undisturbed)
    assert {one.state for one in submission.workers.status()} == {"COMPLETED"}


def test_several_workers_of_one_job_in_a_container_without_slurm_leave_and_return_together(
    gate: Path, settings: Callable[..., Config], undisturbed: Submission, queue: Slurm
) -> None:
    container = f"slurm.container=env PATH={Path(sys.executable).parent}"
    whole_node = ("slurm.worker.gres=null", "slurm.worker.gpus_per_task=1", "slurm.worker.flags=['--exclusive']")
    submission = slurm.submit(settings(container, "slurm.workers=1", "slurm.workers_per_job=2", *whole_node))
    element = f"{submission.workers.job_id}_0"
    wait_for_work(submission, f"{element}-0.0.0", f"{element}-0.1.0")
    queue.cancel([submission.head.job_id, element], "--batch", "--signal=USR2")
    wait_for_generation(submission.paths, 2)
    assert "there is no scontrol here" in hpc_es("logs", submission.paths.root, f"{submission.head.job_id}.0")
    wait_for_work(submission, f"{element}-0.0.1", f"{element}-0.1.1")
    gate.unlink()
    assert_as_if_nothing_had_happened(submission, undisturbed)
    assert submission.workers.state == "COMPLETED"
    assert submission.workers.stdout().count("worker ends: all updates") == 2


@pytest.mark.vllm
def test_the_smoke_configuration_completes_with_vllm_though_a_worker_is_killed(
    gate: Path, own: list[str], queue: Slurm, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "slurm-smoke")
    llama = (f"model.path={write_tiny_llama(tmp_path / 'llama')}", "es.sigma=0.05", "task.chat=true")
    settings = (*own, *llama, "engine.kind=vllm", "slurm.max_restarts=0")
    command = [sys.executable, "-m", "hpc_es", "submit", str(CONFIG), *settings, "--wait", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as submit:
        wait_until(lambda: submit.poll() is not None or len(seats(paths)) == 2, "the workers did not come")
        killed = joined(paths)[-1]
        engine = children(killed.pid)
        assert engine, "vLLM has processes of its own"
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in engine), "vLLM outlives its worker")
        gate.unlink()
        facts = json.loads(submit.communicate()[0])
    assert facts["state"] == "COMPLETED"
    assert facts["finished"]
    states = {status.name: status.state for _, status in slurm.job_statuses(paths)}
    assert (states[killed.seat], sorted(states.values())) == ("FAILED", ["COMPLETED", "COMPLETED", "FAILED"])
    hpc_es("verify", facts["run"])


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_run_whose_workers_die_in_an_environment_or_fail_before_they_begin_ends_with_the_cause(
    settings: Callable[..., Config], queue: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "slurm.worker.setup=['echo no module cuda/13', 'false']"
    unable = slurm.submit(settings(setup, "run.name=unable"), slurm=queue)
    monkeypatch.setenv(rogue.ROGUE, "step:exit")
    submission = slurm.submit(settings("task.env=rogue:Sudoku", "slurm.workers=1", "slurm.max_restarts=0"), slurm=queue)
    assert submission.wait(LIMIT_S) == "FAILED"
    assert submission.workers.state == "FAILED"
    words = submission.paths.log(f"head-{submission.head.job_id}.0").read_text()
    assert "no worker is left, and none is queued; the last one" in words
    assert "ended with code 0 in a call of an environment: rogue:Sudoku: step 1 of task" in words

    assert unable.wait(LIMIT_S) == "FAILED"
    words = unable.paths.log(f"head-{unable.head.job_id}.0").read_text()
    assert "is FAILED; its log ends with: no module cuda/13" in words
    assert "exit code 1" in hpc_es("status", unable.paths.root)


def test_a_wrong_partition_is_reported_and_queues_nothing(settings: Callable[..., Config], queue: Slurm) -> None:
    before = _queued()
    with pytest.raises(LaunchError, match=r"(?s)invalid partition.*slurm.worker.partition=gpu.*here: batch, high"):
        slurm.submit(settings("slurm.worker.partition=gpu"))
    assert _queued() == before


def test_heads_and_workers_that_cannot_connect_fail_with_a_remedy(
    settings: Callable[..., Config], own: list[str], queue: Slurm
) -> None:
    submission = slurm.submit(settings("transport.host=192.0.2.1", "run.name=no-address"))
    lonely = hpc_es("prepare", CONFIG, *own, "transport.head_timeout=3s", "run.name=no-head").strip()
    words = ["sbatch", "--parsable", "--output=/dev/null", "slurm/worker.sbatch", lonely]
    job = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    assert Job(job, "worker", queue, RunPaths(Path(lonely))).wait(LIMIT_S) == "FAILED"
    (last,) = Path(lonely, "logs", f"worker-{job}.0.log").read_text().splitlines()[-1:]
    assert last.startswith("error: no message from a head for ")
    assert f"(transport.head_timeout): {lonely}/rendezvous.json does not exist" in last
    assert f"start it again (`hpc-es submit {lonely}`" in last

    assert submission.wait(LIMIT_S) == "FAILED"
    assert "the head cannot listen on 192.0.2.1" in hpc_es("logs", submission.paths.root)
    assert submission.workers.state in ("FAILED", "CANCELLED")
    if submission.workers.state == "FAILED":
        assert f"the head is gone: job {submission.head.job_id} is FAILED" in hpc_es(
            "logs", submission.paths.root, "worker"
        )


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
    job_id = queue.submit(script(tmp_path, "sleep 600", "--output=/dev/null", "--array=0-2%2"))
    job = Job(job_id, "worker", queue, RunPaths(tmp_path))
    wait_until(lambda: job.state == "RUNNING", "it did not start")
    tasks, waiting = job.tasks, job.status()[2]
    assert [task.job_id for task in tasks] == [f"{job_id}_0", f"{job_id}_1", f"{job_id}_2"]
    assert (waiting.state, waiting.reason) == ("PENDING", "JobArrayTaskLimit")
    tasks[2].cancel()
    job.cancel()
    assert job.wait(30) == "CANCELLED"
    assert tasks[2].wait(30) in ("GONE", "CANCELLED")
