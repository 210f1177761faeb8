"""Parsing of Slurm's output: old and new formats, with and without accounting, and no answer at all."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.errors import LaunchError
from hpc_es.launch import slurm_commands
from hpc_es.launch.slurm import Job, summarise
from hpc_es.launch.slurm_commands import Answer, JobStatus, Slurm, run
from hpc_es.paths import RunPaths

NO_SUCH_JOB = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")
NO_CONTROLLER = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
NO_ACCOUNTING = Answer(1, "", "Slurm accounting storage is disabled")


def cluster(squeue: Answer | str, sacct: Answer | str = NO_ACCOUNTING) -> Slurm:
    answers = {"squeue": squeue, "sacct": sacct}

    def answer(command: Sequence[str]) -> Answer:
        given = answers[command[0]]
        return Answer(0, given, "") if isinstance(given, str) else given

    return Slurm(answer)


def states(slurm: Slurm, *job_ids: str) -> dict[str, str]:
    return {status.name: status.state for status in slurm.statuses(job_ids)}


def test_a_running_job_has_a_node_and_time_left() -> None:
    slurm = cluster("12|RUNNING|node3|1-00:59:30|None\n")
    assert slurm.statuses(["12"]) == [JobStatus("12", "RUNNING", "", "node3", 86400 + 59 * 60 + 30)]


def test_a_pending_job_says_why() -> None:
    (status,) = cluster("12|PENDING||1:00:00|QOSMaxGRESPerUser\n").statuses(["12"])
    assert status.explanation == "QOSMaxGRESPerUser: your limit of GPUs in this QOS"
    assert status.seconds_left is None


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("12_[0-2]", ["12_0", "12_1", "12_2"]),
        ("12_[0,3-4%2]", ["12_0", "12_3", "12_4"]),
        ("12_7", ["12_7"]),
        ("12_[7]", ["12_7"]),
        ("12.batch", []),
        ("12_[0-2,...]", []),
    ],
)
def test_elements_of_an_array_that_wait_are_listed_one_by_one(name: str, elements: list[str]) -> None:
    slurm = cluster(f"99|RUNNING|||\n{name}|PENDING|||Priority")
    assert [status.name for status in slurm.statuses(["99"]) if status.name != "99"] == elements


def test_elements_stand_in_the_order_of_their_numbers() -> None:
    slurm = cluster("12_10|RUNNING|a|1:00|None\n12_9|RUNNING|a|1:00|None\n")
    assert list(states(slurm, "12")) == ["12_9", "12_10"]


@pytest.mark.parametrize("ended", ["NODE_FAIL", "PREEMPTED"])
def test_a_requeued_job_is_not_over_though_the_accounting_says_so(ended: str) -> None:
    slurm = cluster("12|PENDING||1:00:00|BeginTime\n", f"12|{ended}|node1\n")
    assert states(slurm, "12") == {"12": "PENDING"}


@pytest.mark.parametrize("ended", ["NODE_FAIL", "PREEMPTED"])
def test_without_the_controller_a_job_that_may_be_requeued_is_unknown(ended: str) -> None:
    (status,) = cluster(NO_CONTROLLER, f"12|{ended}|node1\n").statuses(["12"])
    assert status.state == "UNKNOWN"
    assert not status.is_final


def test_the_accounting_knows_jobs_that_the_controller_has_forgotten() -> None:
    assert states(cluster(NO_SUCH_JOB, "12|CANCELLED by 1000|node1\n"), "12") == {"12": "CANCELLED"}
    assert states(cluster(NO_SUCH_JOB, "12|NODE_FAIL|node1\n"), "12") == {"12": "NODE_FAIL"}


def test_an_element_that_the_controller_has_forgotten_is_looked_up_once() -> None:
    asked: list[str] = []

    def answer(command: Sequence[str]) -> Answer:
        asked.append(command[0])
        if command[0] == "squeue":
            return Answer(0, "12_1|RUNNING|node2|1:00|None|0:30\n", "")
        return Answer(0, "12_0|FAILED|node1|7:0\n", "")

    slurm = Slurm(answer)
    for _ in range(3):
        failed, running = slurm.statuses(["12"], elements=["12_0", "12_1"])
        assert (failed.name, failed.state, failed.explanation) == ("12_0", "FAILED", "exit code 7")
        assert (running.state, running.seconds_running) == ("RUNNING", 30.0)
    assert asked.count("sacct") == 1
    assert states(cluster("12_1|RUNNING|node2|1:00|None\n"), "12") == {"12_1": "RUNNING"}
    forgotten = cluster("12_1|RUNNING|node2|1:00|None\n").statuses(["12"], elements=["12_0", "12_1"])
    assert [status.state for status in forgotten] == ["GONE", "RUNNING"], "without accounting"


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        ("7:0", "NonZeroExitCode", "exit code 7"),
        ("0:9", "JobLaunchFailure", "killed by SIGKILL"),
        ("0:9", "RaisedSignal:9(Killed)", "killed by SIGKILL"),
        ("0:125", "OutOfMemory", "OutOfMemory"),
        ("", "JobLaunchFailure", "JobLaunchFailure"),
    ],
)
def test_the_exit_code_says_how_a_job_failed(code: str, reason: str, said: str) -> None:
    show = (
        f"JobId=19 ArrayJobId=12 ArrayTaskId=3 JobName=x JobState=FAILED Reason={reason} ExitCode={code} NodeList=n\n"
    )

    def answer(command: Sequence[str]) -> Answer:
        return Answer(0, show if command[0] == "scontrol" else f"12_3|FAILED|n1|1:00|{reason}|0:00\n", "")

    (status,) = Slurm(answer).with_exit_codes(Slurm(answer).statuses(["12"]))
    assert status.explanation == said


def test_a_job_that_slurm_has_forgotten_is_gone() -> None:
    (status,) = cluster(NO_SUCH_JOB).statuses(["12"])
    assert status.state == "GONE"
    assert status.is_final


def test_a_silent_controller_ends_no_job() -> None:
    (status,) = cluster(NO_CONTROLLER).statuses(["12"])
    assert not status.is_final
    with pytest.raises(LaunchError, match="head 12 is UNKNOWN after 0 s"):
        Job("12", "head", cluster(NO_CONTROLLER), RunPaths(Path())).wait(timeout_s=0)


def test_a_cancelled_element_that_vanished_does_not_keep_the_array_from_ending() -> None:
    slurm = cluster("12_0|COMPLETED|node1|0:00|None\n12_1|CANCELLED|node1|0:00|None\n")
    assert states(slurm, "12_3") == {"12_0": "COMPLETED", "12_1": "CANCELLED", "12_3": "GONE"}
    assert Job("12", "worker", slurm, RunPaths(Path())).wait(timeout_s=0) == "CANCELLED"


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_no_answer_can_break_the_reading(squeue: str, sacct: str) -> None:
    for status in cluster(squeue, sacct).statuses(["12"]):
        assert status.state


@pytest.mark.parametrize(
    ("answer", "job_id"), [("12\n", "12"), ("12;cluster\n", "12"), ("sbatch: some advice\n12\n", "12")]
)
def test_the_job_id_is_found_in_sbatchs_output(answer: str, job_id: str, tmp_path) -> None:
    assert Slurm(lambda command: Answer(0, answer, "")).submit(tmp_path) == job_id


def test_a_refusal_is_reported_in_sbatchs_words(tmp_path) -> None:
    refusal = Answer(1, "", "sbatch: error: invalid partition specified: nope")
    with pytest.raises(LaunchError, match=r"^invalid partition specified: nope$"):
        Slurm(lambda command: refusal).submit(tmp_path)


def test_a_machine_without_slurm_gets_a_clear_error() -> None:
    with pytest.raises(LaunchError, match="there is no sbatch-of-nowhere here"):
        run(["sbatch-of-nowhere"])


def test_a_hanging_command_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "TIMEOUT_S", 0.1)
    assert run(["sleep", "60"]).code != 0
    hanging = Slurm(lambda command: run(["sleep", "60"]))
    assert states(hanging, "12") == {"12": "UNKNOWN"}
    with pytest.raises(LaunchError, match="did not answer"):
        hanging.cancel(["12"])


@pytest.mark.parametrize(
    ("elements", "summary"),
    [
        (["COMPLETED", "RUNNING", "PENDING"], "RUNNING"),
        (["COMPLETED", "PENDING"], "PENDING"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        ([], "UNKNOWN"),
    ],
)
def test_an_array_has_one_state(elements: list[str], summary: str) -> None:
    assert summarise([JobStatus(str(i), state) for i, state in enumerate(elements)]) == summary
