"""Submission, scripts, logs and the place of a process, without a cluster: Slurm is played by `Cluster`."""

import heapq
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from repository import ROOT

from hpc_es.cli.arguments import run_paths
from hpc_es.cli.output import console, jobs_line, jobs_report
from hpc_es.config import Config, load, save
from hpc_es.errors import ConfigError, LaunchError
from hpc_es.launch import prepare, slurm
from hpc_es.launch.head_watch import HeadWatch
from hpc_es.launch.logs import find_log, follow
from hpc_es.launch.pool import Pool
from hpc_es.launch.slurm_commands import Answer, JobStatus, Slurm, run
from hpc_es.params.layout import memory_limit
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.place import Place
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION, Started, Stopped
from hpc_es.worker import lookout, seat


class Cluster:
    """Accepts every job but those of `refused` roles; jobs are RUNNING until they are cancelled."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.submitted: list[tuple[str, ...]] = []
        self.asked: list[tuple[str, ...]] = []
        """Calls of squeue."""
        self.requeued: list[str] = []
        self.states: dict[str, str] = {}
        self.slurm = Slurm(self.answer)

    def answer(self, command: Sequence[str]) -> Answer:
        program, *arguments = command
        if program == "sbatch" and arguments != ["--version"]:
            if self.refused and self.refused in arguments[-1]:
                return Answer(1, "", "sbatch: error: invalid partition specified: gpuu")
            if "--test-only" in arguments:
                return Answer(0, "", "sbatch: Job 1 to start at ...")
            self.submitted.append(tuple(arguments))
            self.states[str(100 + len(self.submitted))] = "RUNNING"
            return Answer(0, f"{100 + len(self.submitted)}\n", "")
        if program == "scontrol" and arguments[0] == "requeue":
            self.requeued.append(arguments[1])
        if program == "squeue":
            self.asked.append(tuple(command))
            asked = next(word.removeprefix("--jobs=") for word in arguments if word.startswith("--jobs=")).split(",")
            return Answer(0, "".join(f"{job}|{self.states[job]}|n1|1:00|None\n" for job in self.known(asked)), "")
        if program == "scancel":
            self.states.update((job, "CANCELLED") for job in self.known(arguments))
        if program == "sinfo":
            return Answer(
                0, "batch*|1-00:00:00\nhigh|infinite\n" if "%l" in command[-1] else "batch\nhigh\nbatch\n", ""
            )
        return Answer(0, "", "")

    def known(self, jobs: Sequence[str]) -> list[str]:
        """The jobs among these, and the tasks of the arrays among these."""
        return [job for job in self.states if job in jobs or job.partition("_")[0] in jobs]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "play", "dir": tmp_path / "runs", "num_updates": 1},
            "model": {"path": str(write_tiny_llama(tmp_path / "model"))},
            "task": {"env": "sudoku", "options": {"size": 4}},
        }
    )


def with_slurm(config: Config, **settings: object) -> Config:
    values = config.model_dump(mode="json")
    return Config.model_validate({**values, "slurm": {**values["slurm"], **settings}})


def sbatch_lines(config: Config, role: slurm.Role) -> list[str]:
    return slurm.flags(config, prepare.run_paths(config), role)


# --- scripts --------------------------------------------------------------------------------------------------------


def test_a_script_runs_the_role_by_exec_so_that_signals_reach_it(config: Config) -> None:
    for role, text in slurm.scripts(config, prepare.run_paths(config)).items():
        assert f"exec {sys.executable} -m hpc_es {role} {prepare.run_paths(config).root}" in text.splitlines()
        assert "--signal=B:USR2@120" in sbatch_lines(config, role)
        assert {"--requeue", "--open-mode=append", "--time=60"} <= set(sbatch_lines(config, role))


def test_the_workers_are_an_array_with_a_limit(config: Config) -> None:
    assert "--array=0-63%32" in sbatch_lines(with_slurm(config, workers=64, max_parallel=32), "worker")
    assert "--array=0-0%1" in sbatch_lines(with_slurm(config, workers=1), "worker")
    assert not any(line.startswith("--array") for line in sbatch_lines(config, "head"))


def test_each_role_requests_its_own_resources(config: Config) -> None:
    worker = {"partition": "gpu", "gres": "gpu:a100:2", "cpus": 8, "memory": "96G", "time": 90, "qos": "long"}
    config = with_slurm(config, account="es", signal_lead=30, worker={**worker, "flags": ["--exclusive", "--nice=5"]})
    asked = set(sbatch_lines(config, "worker"))
    own = {"--partition=gpu", "--gres=gpu:a100:2", "--cpus-per-task=8", "--mem=96G", "--qos=long", "--time=2"}
    assert own | {"--account=es", "--exclusive", "--nice=5"} <= asked
    assert "--account=es" in sbatch_lines(config, "head")
    assert not own & set(sbatch_lines(config, "head"))


def test_setup_lines_come_before_the_role_and_a_container_around_it(config: Config) -> None:
    config = with_slurm(config, setup=["module load cuda"], container="apptainer exec --nv x.sif")
    lines = slurm.scripts(config, prepare.run_paths(config))["worker"].splitlines()
    role = next(line for line in lines if line.startswith("apptainer"))
    assert role.startswith("apptainer exec --nv x.sif hpc-es worker ")
    assert lines.index("set -e") < lines.index("module load cuda") < lines.index("set +e") < lines.index(role)


def test_setup_container_and_python_can_differ_between_the_roles(config: Config) -> None:
    worker = {"setup": ["source /w/activate"], "container": "apptainer exec w.sif", "python": "python"}
    config = with_slurm(config, setup=["module load x"], python="/shared/venv/bin/python", worker=worker)
    texts = slurm.scripts(config, prepare.run_paths(config))
    root = prepare.run_paths(config).root
    assert f"exec /shared/venv/bin/python -m hpc_es head {root}" in texts["head"].splitlines()
    assert "module load x" in texts["head"]
    assert f"apptainer exec w.sif python -m hpc_es worker {root} &" in texts["worker"].splitlines()
    assert "module load x" not in texts["worker"]


def test_several_workers_share_a_job_and_each_has_its_gpus(config: Config) -> None:
    worker = {"gpus_per_task": 1, "cpus": 8, "memory": "0", "flags": ["--exclusive"]}
    config = with_slurm(config, workers=4, workers_per_job=8, worker=worker)
    text = slurm.scripts(config, prepare.run_paths(config))["worker"]
    root = prepare.run_paths(config).root
    command = f"{sys.executable} -m hpc_es worker {root} &"
    assert f"srun --ntasks=8 --cpus-per-task=8 --kill-on-bad-exit=0 {command}" in text.splitlines()
    assert {"--ntasks-per-node=8", "--gpus-per-task=1", "--exclusive", "--array=0-3%4"} <= set(
        sbatch_lines(config, "worker")
    )
    assert config.slurm.num_at_once == 32
    assert "--ntasks-per-node=1" in sbatch_lines(config, "head")


@pytest.mark.parametrize(("code", "requeues"), [(0, 0), (3, 0), (4, 3)])
def test_outside_a_container_the_script_passes_signals_on_and_queues_the_job_again(
    config: Config, tmp_path: Path, code: int, requeues: int
) -> None:
    """The role is played by a shell that ends with `code` when it gets USR2; scontrol works at the third attempt."""
    role = tmp_path / "bin" / "hpc-es"
    role.parent.mkdir()
    role.write_text(
        f"#!/bin/bash\ntrap 'sleep 0.3; exit {code}' USR2\ntouch {tmp_path}/up\nwhile :; do sleep 0.05; done\n"
    )
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/asked\n[ $(wc -l <{tmp_path}/asked) -ge 3 ]\n')
    quick = tmp_path / "bin" / "sleep"
    quick.write_text("#!/bin/bash\n[[ $1 == 0.* ]] && exec /bin/sleep $1; exit 0\n")
    for program in (role, scontrol, quick):
        program.chmod(0o755)
    script = tmp_path / "worker.sbatch"
    script.write_text(slurm.scripts(with_slurm(config, container="env X=1"), prepare.run_paths(config))["worker"])
    job = {"SLURM_JOB_ID": "21", "SLURM_ARRAY_JOB_ID": "19", "SLURM_ARRAY_TASK_ID": "1"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", str(script)], env=environment) as batch:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        batch.send_signal(signal.SIGUSR2)
    assert batch.returncode == code
    asked = (tmp_path / "asked").read_text().splitlines() if requeues else []
    assert asked == ["requeue 19_1"] * requeues


@pytest.mark.parametrize("role", ["head", "worker"])
def test_scripts_for_use_by_hand_hold_no_number(role: str) -> None:
    text = (ROOT / "slurm" / f"{role}.sbatch").read_text()
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives
    assert not any(re.search(r"\d", line) for line in directives)
    assert f'exec hpc-es {role} "${{1:?' in text


def test_a_dry_run_shows_the_jobs_and_writes_nothing(config: Config, tmp_path: Path) -> None:
    save(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "hpc_es", "submit", str(tmp_path / "config.yaml"), "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not prepare.run_paths(config).root.exists()
    submission = slurm.submit(config, slurm=Cluster().slurm)
    for role in ("head", "worker"):
        assert submission.paths.slurm_script(role).read_text() in shown


# --- submission -----------------------------------------------------------------------------------------------------


def test_workers_wait_in_the_queue_until_the_head_has_started(config: Config) -> None:
    cluster = Cluster()
    submission = slurm.submit(config, slurm=cluster.slurm)
    head, worker = cluster.submitted
    assert head[-1].endswith("head.sbatch")
    assert worker[-1].endswith("worker.sbatch")
    assert f"--dependency=after:{submission.head.job_id}" in worker
    assert submission.state == "RUNNING"


def test_a_refusal_names_the_settings_and_leaves_nothing_in_the_queue(config: Config) -> None:
    cluster = Cluster(refused="worker.sbatch")
    with pytest.raises(LaunchError) as caught:
        slurm.submit(with_slurm(config, worker={"partition": "gpuu"}), slurm=cluster.slurm)
    assert "invalid partition specified: gpuu" in str(caught.value)
    assert "slurm.worker.partition=gpuu" in str(caught.value)
    assert "slurm.workers=2" in str(caught.value), "an array may be too large"
    assert "Partitions here: batch, high" in str(caught.value)
    assert "RUNNING" not in cluster.states.values()


def test_a_refusal_after_the_check_takes_the_head_back(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slurm, "check", lambda self, script: None)
    cluster = Cluster(refused="worker.sbatch")
    with pytest.raises(LaunchError):
        slurm.submit(config, slurm=cluster.slurm)
    assert cluster.states == {"101": "CANCELLED"}


@pytest.mark.parametrize(
    ("worker", "refused"),
    [
        ({"time": "25h"}, True),
        ({"time": "25h", "partition": "batch"}, True),
        ({"time": "25h", "partition": "high"}, False),
        ({"time": "25h", "qos": "long"}, False),
        ({"time": "23h"}, False),
    ],
)
def test_a_time_above_the_limit_of_the_partition_is_refused(config: Config, worker: dict, refused: bool) -> None:
    config, cluster = with_slurm(config, worker=worker), Cluster()
    if not refused:
        slurm.submit(config, slurm=cluster.slurm)
        return
    with pytest.raises(LaunchError, match=r"slurm.worker.time=90000 is above the limit of partition .*, 86400 s"):
        slurm.submit(config, slurm=cluster.slurm)
    assert not cluster.submitted


def test_a_handle_cancels_workers_that_were_added_later(config: Config) -> None:
    cluster = Cluster()
    submission = slurm.submit(config, slurm=cluster.slurm)
    cluster.states["200"] = "RUNNING"
    slurm.record(submission.paths, "200", "worker")
    submission.cancel()
    assert set(cluster.states.values()) == {"CANCELLED"}


def test_handles_can_be_had_again_from_the_run_folder(config: Config) -> None:
    cluster = Cluster()
    first = slurm.submit(config, slurm=cluster.slurm)
    with_it = slurm.attach(first.paths.root, slurm=cluster.slurm)
    assert with_it == first
    first.cancel()
    second = slurm.submit(config, slurm=cluster.slurm)
    slurm.record(second.paths, "200", "worker")  # added later
    assert slurm.attach(second.paths.root, slurm=cluster.slurm) == second
    with pytest.raises(LaunchError, match="has no jobs"):
        slurm.attach(second.paths.logs, slurm=cluster.slurm)


def test_a_log_is_followed_into_the_next_attempt(logs: RunPaths) -> None:
    logs.log("worker-19_3.1").write_text("old\n")
    words = follow(logs, "19_3")
    with open(logs.log("worker-19_3.1"), "a") as file:
        next_words = threading.Timer(0.2, lambda: (file.write("more\n"), file.flush()))
        next_words.start()
        assert next(words) == "more"
    logs.log("worker-19_3.2").write_text("again\n")
    os.utime(logs.log("worker-19_3.2"), (2e9, 2e9))
    assert next(words) == f"==> {logs.log('worker-19_3.2')} <=="
    assert next(words) == "again"


def test_very_many_jobs_are_summed_up_and_those_that_failed_are_named() -> None:
    jobs: list[tuple[slurm.Role, JobStatus]] = [("head", JobStatus("1", "RUNNING", node="n1"))]
    jobs += [("worker", JobStatus(f"2_{i}", "RUNNING")) for i in range(60)]
    jobs += [("worker", JobStatus("2_60", "FAILED", "NonZeroExitCode", "n9", exit_code="7:0"))]
    for whole, num_lines in ((False, 4), (True, 63)):
        out = console()
        with out.capture() as shown:
            out.print(jobs_report(jobs, whole=whole))
        lines = shown.get().splitlines()
        assert len(lines) == num_lines
        assert any("2_60" in line and "n9" in line and "exit code 7" in line for line in lines)
    assert "61 RUNNING, 1 FAILED (exit code 7)" in jobs_line([job for _, job in jobs])


def test_a_run_folder_that_a_node_does_not_see_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "node3")
    with pytest.raises(ConfigError, match="node node3 may not see the file system that it is on"):
        run_paths(tmp_path)


def test_memory_is_compared_with_what_each_job_asks_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_es.params.layout.memory_limit", lambda: 1)  # a small login node
    with pytest.raises(ConfigError, match=r"slurm.worker.memory=64K is 0.00 GiB, but the arena of .* takes"):
        slurm.submit(with_slurm(config, worker={"memory": "64K"}), slurm=Cluster().slurm)
    slurm.submit(with_slurm(config, workers=500, worker={"memory": "64G"}), slurm=Cluster().slurm)


@pytest.mark.parametrize(
    ("text", "size"), [("64G", 64 * 2**30), ("4000", 4000 * 2**20), ("8gb", 8 * 2**30), ("0", None), ("most", None)]
)
def test_memory_is_read_as_slurm_reads_it(text: str, size: int | None) -> None:
    assert prepare.slurm_bytes(text) == size


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_batch",
            {"system.slice/slurmstepd.scope/job_7/memory.max": 77},
            77,
        ),
        ("4:memory:/slurm/uid_0/job_7", {"memory/slurm/uid_0/job_7/memory.limit_in_bytes": 78}, 78),
        ("0::/", {"memory.max": 79}, 79),
    ],
)
def test_the_memory_limit_of_a_job_counts(tmp_path: Path, own: str, files: dict, limit: int) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{size}\n")
    assert memory_limit(tmp_path / "own", tmp_path) == limit


def test_a_run_has_one_head_at_a_time(config: Config) -> None:
    cluster = Cluster()
    first = slurm.submit(config, slurm=cluster.slurm)
    with pytest.raises(LaunchError, match="has a head already: job 101 is RUNNING"):
        slurm.submit(config, slurm=cluster.slurm)
    first.cancel()
    assert first.state == "CANCELLED"
    assert slurm.submit(config, slurm=cluster.slurm).head.job_id == "103"


def test_a_finished_run_is_not_queued_again(config: Config) -> None:
    paths, _ = prepare.write_folder(config)
    text = config.model_dump_json()
    journal = JournalWriter.create(paths, lambda g, n: Started(0.0, SCHEMA_VERSION, "play", g, n, text, 0, {}, "h"))
    journal.sync()
    assert not prepare.seems_finished(paths)
    journal.append(Stopped(1.0, "all updates are done", True))
    journal.sync()
    assert not prepare.seems_finished(RunPaths(paths.root / "nothing"))
    assert prepare.seems_finished(paths), "also while the journal has no end mark"
    journal.close()
    assert prepare.seems_finished(paths)
    with pytest.raises(LaunchError, match="is finished"):
        slurm.submit(config, slurm=Cluster().slurm)


def test_workers_that_outlive_their_head_are_cancelled(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LEAVING_S", 0.0)
    cluster = Cluster()
    submission = slurm.submit(config, slurm=cluster.slurm)
    cluster.states[submission.head.job_id] = "FAILED"
    assert submission.wait() == "FAILED"
    assert cluster.states[submission.workers.job_id] == "CANCELLED"


def test_cancel_ends_every_job_of_the_run_also_those_queued_by_hand(config: Config) -> None:
    cluster = Cluster()
    submission = slurm.submit(config, slurm=cluster.slurm)
    cluster.states["200"] = "PENDING"
    slurm.record(submission.paths, "200", "worker")
    assert slurm.cancel(submission.paths, cluster.slurm) == ["101", "102", "200"]
    assert set(cluster.states.values()) == {"CANCELLED"}
    with pytest.raises(LaunchError, match="no Slurm job of"):
        slurm.cancel(submission.paths, cluster.slurm)


def test_status_shows_the_last_submission_and_whatever_still_runs(config: Config) -> None:
    cluster = Cluster()
    slurm.submit(config, slurm=cluster.slurm).cancel()
    cluster.states["102"] = "RUNNING"  # a worker that does not end
    second = slurm.submit(config, slurm=cluster.slurm)
    second.head.cancel()
    shown = [(role, job.name, job.state) for role, job in slurm.job_statuses(second.paths, cluster.slurm)]
    assert shown == [("worker", "102", "RUNNING"), ("head", "103", "CANCELLED"), ("worker", "104", "RUNNING")]


def test_a_job_queued_from_within_a_job_has_an_identity_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    names = run(["env"]).out
    assert "SLURM_CONF=x" in names
    assert not re.search("SLURM_ARRAY|SBATCH|SQUEUE", names)


# --- site files -----------------------------------------------------------------------------------------------------


def test_a_site_file_overrides_extended_files_and_not_the_config_itself(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("slurm: {workers: 1, account: base, head: {cpus: 1}}\n")
    (tmp_path / "site.yaml").write_text("slurm: {workers: 2, account: site, max_parallel: 2}\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        "extends: base.yaml\nrun: {name: a, num_updates: 1}\nmodel: {path: m}\ntask: {env: sudoku}\n"
        "slurm: {account: own}\n"
    )
    settings = load(config, ["slurm.max_parallel=1"], site=tmp_path / "site.yaml").config.slurm
    assert (settings.head.cpus, settings.workers, settings.account, settings.max_parallel) == (1, 2, "own", 1)


def test_a_site_file_cannot_change_the_result(tmp_path: Path, config: Config) -> None:
    save(config, tmp_path / "config.yaml")
    (tmp_path / "site.yaml").write_text("slurm: {workers: 2}\nes: {sigma: 1}\n")
    with pytest.raises(ConfigError, match=r"es.sigma \(.*site.yaml:2\) must not be in a site file"):
        load(tmp_path / "config.yaml", site=tmp_path / "site.yaml")


@pytest.mark.parametrize("site", sorted((ROOT / "configs" / "sites").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_site_files_of_the_project_hold(site: Path) -> None:
    load(str(ROOT / "configs" / "chaos.yaml"), site=str(site))  # as a notebook names them


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"worker": {"gres": "gpu:1", "gpus_per_task": 1}}, "ask twice for GPUs"),
        ({"worker": {"flags": ["-p gpu"]}}, "must look like --name or --name=value"),
        ({"worker": {"flags": ["--ntasks-per-node=8"]}}, "each job has one node"),
        ({"workers_per_job": 8, "worker": {"gres": "gpu:8"}}, "set slurm.worker.gpus_per_task instead"),
        ({"head": {"flags": ["--time=1:00:00"]}}, "set slurm.<role>.time"),
        ({"head": {"time": "1m"}}, "slurm.head.time=60 must be above slurm.signal_lead=120"),
    ],
)
def test_mistakes_in_the_slurm_section_are_explained(settings: dict, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        json.dumps({"run": {"name": "a", "num_updates": 1}, "model": {"path": "m"}, "task": {"env": "e"}})
    )
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load(tmp_path / "config.yaml", [f"slurm={json.dumps(settings)}"])


# --- the place of a process, and its logs ---------------------------------------------------------------------------


def test_an_element_of_an_array_sits_where_squeue_says() -> None:
    place = Place.here(
        {
            "SLURM_JOB_ID": "21",
            "SLURM_ARRAY_JOB_ID": "19",
            "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_RESTART_COUNT": "2",
            "SLURMD_NODENAME": "node3",
            "SLURM_CPUS_PER_TASK": "8",
        }
    )
    assert (place.seat, place.attempt, place.cpus) == ("19_1", 2, 8)
    assert place.facts == {"slurm_job": "19", "array_task": "1", "restart_count": "2", "node": "node3"}


def test_tasks_of_one_step_sit_apart() -> None:
    seats = {Place.here({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(i)}).seat for i in range(3)}
    assert len(seats) == 3


def test_outside_slurm_every_process_has_its_own_seat() -> None:
    place = Place.here({})
    assert place.seat.endswith(f"-{os.getpid()}")
    assert place.facts == {}


@pytest.fixture
def logs(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    for age, name in enumerate(("head-18.0", "worker-19_3.0", "worker-19_3.1", "worker-22_3.0", "head-18.1")):
        paths.log(name).touch()
        os.utime(paths.log(name), (age, age))
    (paths.logs / "slurm-19_3.out").touch()
    return paths


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("head", "head-18.1"),
        ("19_3", "worker-19_3.1"),
        ("19_3.0", "worker-19_3.0"),
        ("worker-19_3", "worker-19_3.1"),
        ("3", "worker-22_3.0"),
        ("worker", "worker-22_3.0"),
    ],
)
def test_the_newest_log_that_is_meant_is_found(logs: RunPaths, name: str, found: str) -> None:
    assert find_log(logs, name).path.stem == found


def test_slurms_own_output_belongs_to_a_log(logs: RunPaths) -> None:
    assert find_log(logs, "19_3").slurm_output == logs.logs / "slurm-19_3.out"
    assert find_log(logs, "head").slurm_output is None


def test_a_job_whose_role_never_began_has_slurms_output_for_a_log(logs: RunPaths) -> None:
    slurm.record(logs, "31", "worker")
    (logs.logs / "slurm-31_0.out").write_text("hpc-es: command not found\n")
    found = find_log(logs, "31_0")
    assert (found.path.name, found.role, found.slurm_output) == ("slurm-31_0.out", "worker", None)


def test_a_missing_log_is_reported_with_the_existing_ones(logs: RunPaths) -> None:
    with pytest.raises(ConfigError, match=r"no log of '7'; there are: head-18.0, .*head-18.1"):
        find_log(logs, "7")


@pytest.mark.parametrize(
    ("states", "state", "detail"),
    [
        ({"101": "CANCELLED"}, "gone", "job 101 is CANCELLED"),
        ({"101": "PENDING"}, "queued", "job 101 is PENDING"),
        ({"101": "COMPLETING"}, "ending", "job 101 is COMPLETING"),
        ({"101": "CANCELLED", "104": "RUNNING"}, "running", "job 104 is RUNNING"),
        ({"101": "RUNNING", "104": "FAILED"}, "gone", "job 104 is FAILED"),
        ({}, "unknown", ""),
    ],
)
def test_the_newest_head_says_what_becomes_of_the_run(tmp_path: Path, states: dict, state: str, detail: str) -> None:
    cluster, paths = Cluster(), RunPaths(tmp_path)
    cluster.states.update(states)
    for job_id in states:
        slurm.record(paths, job_id, "head")
    slurm.record(paths, "50", "worker")
    outlook = HeadWatch(paths, cluster.slurm)(60.0)
    assert (outlook.state, outlook.detail) == (state, detail)
    assert all(command[-2] == f"--jobs={outlook.job}" for command in cluster.asked), "one job, not the whole table"


@pytest.mark.parametrize(
    ("state", "seconds_running", "verdict"),
    [
        ("gone", None, "leave"),
        ("queued", None, "requeue"),
        ("ending", None, "wait"),
        ("running", 100.0, "wait"),
        ("running", 700.0, "fail"),
        ("running", None, "fail"),
        ("unknown", None, "fail"),
    ],
)
def test_a_worker_whose_head_is_silent_does_what_slurm_says_of_it(
    state: str, seconds_running: float | None, verdict: str
) -> None:
    assert lookout.verdict(lookout.Outlook(state, seconds_running=seconds_running), 600.0) == verdict


def test_sixty_four_workers_with_a_silent_head_ask_slurm_a_few_times_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played by the rules of worker/lookout.py and launch/head_watch.py, in ten minutes of a virtual clock."""
    cluster, paths = Cluster(), RunPaths(tmp_path)
    for job_id, state in (("101", "CANCELLED"), ("104", "RUNNING")):
        cluster.states[job_id] = state
        slurm.record(paths, job_id, "head")
    now = 0.0
    monkeypatch.setattr(time, "time", lambda: now)
    watches = [(HeadWatch(paths, cluster.slurm), lookout.pauses()) for _ in range(64)]
    looks = [(lookout.SILENCE_S + next(pauses), number) for number, (_, pauses) in enumerate(watches)]
    while (look := heapq.heappop(looks))[0] < 600:
        now, number = look
        ask, pauses = watches[number]
        ask(now)
        heapq.heappush(looks, (now + next(pauses), number))
    assert len(cluster.asked) <= 30, "three a minute"


@pytest.mark.parametrize(
    ("states", "seats", "gone"),
    [
        ({"50": "COMPLETED"}, {"50_0": "died", "50_1": "ended"}, True),
        ({"50": "FAILED"}, {"50_0": "failed"}, True),
        ({"50": "COMPLETED", "51": "PENDING"}, {"50_0": "died"}, False),
        ({"50": "CANCELLED"}, {"50_0": "ended"}, False),  # somebody ended them, and may send others
        ({"50": "NODE_FAIL"}, {"50_0": "failed"}, True),
        ({}, {"by-hand": "died"}, False),
    ],
)
def test_workers_are_gone_when_the_last_ones_died_and_none_is_queued(
    tmp_path: Path, states: dict, seats: dict, gone: bool
) -> None:
    cluster, paths = Cluster(), RunPaths(tmp_path)
    cluster.states.update(states)
    for job_id in states:
        slurm.record(paths, job_id, "worker")
    pool = Pool(paths, cluster.slurm, max_restarts=3)
    for name, state in seats.items():
        seat.begin(paths, name)
        seat.note(paths, name, state, "ended with code 0 in sudoku: step 1 of task 7")
    reason = pool.why_empty()
    assert (reason is not None) == gone
    if reason is not None:
        assert "step 1 of task 7" in reason


def test_workers_that_failed_before_they_began_are_gone_too(tmp_path: Path) -> None:
    cluster, paths = Cluster(), RunPaths(tmp_path)
    cluster.states["50"] = "FAILED"
    slurm.record(paths, "50", "worker")
    paths.logs.mkdir()
    (paths.logs / "slurm-50.out").write_text("module: cuda/13 is unknown\n")
    reason = Pool(paths, cluster.slurm, max_restarts=3).why_empty()
    assert reason is not None
    assert "the last one, 50, is FAILED; its log ends with: module: cuda/13 is unknown" in reason


def test_a_failed_worker_is_queued_again_a_few_times_once_some_worker_has_joined(tmp_path: Path) -> None:
    cluster, paths = Cluster(), RunPaths(tmp_path)
    for job_id in ("50_0", "50_1"):
        cluster.states[job_id] = "FAILED"
    slurm.record(paths, "50", "worker")
    pool = Pool(paths, cluster.slurm, max_restarts=2)
    assert pool.restart_failed() == [], "what every worker fails at is not repeated"
    seat.begin(paths, "50_1")
    seat.note(paths, "50_1", "failed", "out of memory", worker="50_1.0.abc")
    assert pool.restart_failed() == ["50_0", "50_1"]
    assert cluster.requeued == ["50_0", "50_1"]
    later = Pool(paths, cluster.slurm, max_restarts=2)  # of the next head
    assert later.restart_failed() == ["50_0", "50_1"]
    assert later.restart_failed() == []
    assert "failed: out of memory" in str(later.why_empty())


@pytest.mark.parametrize(
    ("state", "outside", "abandoned"),
    [("CANCELLED", "", True), ("COMPLETED", "", True), ("RUNNING", "", False), ("CANCELLED", "login-77", False)],
)
def test_a_head_whose_workers_are_all_over_is_not_queued_again(
    tmp_path: Path, state: str, outside: str, abandoned: bool
) -> None:
    cluster, paths = Cluster(), RunPaths(tmp_path)
    cluster.states["50"] = state
    slurm.record(paths, "50", "worker")
    if outside:
        seat.begin(paths, outside)
    assert (Pool(paths, cluster.slurm, max_restarts=3).why_abandoned() is not None) == abandoned


@pytest.mark.parametrize(
    ("outage", "code"), [(0, 0), (2, 0), (99, 4)], ids=["no outage", "short", "longer than slurm.signal_lead"]
)
def test_a_job_warned_of_its_time_limit_while_loading_is_requeued(
    tmp_path: Path, config: Config, outage: int, code: int
) -> None:
    (tmp_path / "run").mkdir()
    save(with_slurm(config, signal_lead=1), tmp_path / "run" / "config.yaml")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ $(wc -l <{tmp_path}/asked) -gt {outage} ]\n')
    scontrol.chmod(0o755)
    program = f"""
import os, signal, time
from pathlib import Path
from hpc_es.launch import slurm_role
from hpc_es.launch.slurm_role import enter
slurm_role.REQUEUE_PAUSES_S = (0.05, 0.1, 0.2)
from hpc_es.paths import RunPaths
from hpc_es.place import Place
paths = RunPaths(Path({str(tmp_path / "run")!r}))
enter(paths, "worker", Place.here())
os.kill(os.getpid(), signal.SIGUSR2)
time.sleep(60)
"""
    job = {"SLURM_JOB_ID": "21", "SLURM_ARRAY_JOB_ID": "19", "SLURM_ARRAY_TASK_ID": "1"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    attempts = (tmp_path / "asked").read_text().splitlines()
    assert set(attempts) == {"requeue 19_1"}
    assert len(attempts) == outage + 1 if code == 0 else len(attempts) > 1
    assert (tmp_path / "run" / "logs" / "worker-19_1.0.log").exists()
    assert (tmp_path / "run" / "slurm" / "19.json").exists()


def test_a_worker_that_is_requeued_while_its_head_waits_goes_behind_it() -> None:
    asked: list[list[str]] = []

    def answer(command: Sequence[str]) -> Answer:
        asked.append(list(command))
        return Answer(0, "", "")

    Slurm(answer).requeue("19_1", after="18")
    assert asked == [
        ["scontrol", "requeue", "19_1"],
        ["scontrol", "update", "jobid=19_1", "dependency=after:18"],
    ]


# --- login nodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["submit", "--dry-run"], ["prepare"], ["status"], ["logs"], ["cancel"]])
def test_commands_of_the_login_node_work_without_torch(arguments: list[str], config: Config, tmp_path: Path) -> None:
    save(config, tmp_path / "config.yaml")
    paths, _ = prepare.write_folder(config)
    paths.log("head").touch()
    target = tmp_path / "config.yaml" if arguments[0] in ("submit", "prepare") else paths.root
    code = f"""
import sys
for name in ("torch", "vllm", "numba", "transformers", "safetensors"):
    sys.modules[name] = None
from hpc_es.cli import app
app({[*arguments, str(target)]!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if arguments == ["cancel"]:
        assert "no Slurm job of" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["9x.json", "9" * 40 + ".json", "123.json"])
def test_a_file_that_is_not_a_job_record_is_ignored_with_a_warning(tmp_path: Path, name: str) -> None:
    paths = RunPaths(tmp_path)
    slurm.record(paths, "77", "head")
    (paths.slurm / name).write_text('{"job_id": "' + "9" * 40 + '", "role": "head", "time": 1.0}')
    with pytest.warns(UserWarning, match="is ignored: it is not the record of a Slurm job"):
        assert [job.job_id for job in slurm.recorded_jobs(paths)] == ["77"]
