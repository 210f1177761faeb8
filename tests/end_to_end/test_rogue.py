"""Environments that end, block or spoil the process that plays them, with real processes.

A run is never left standing: the worker is named with environment, task and call, restarts are counted, and the run
ends with the cause. Before a run starts nothing of this can end the process that asks, or pass for success.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rogue
from repository import SUPPORT

from hpc_es.calls import CALLS, Calls
from hpc_es.config import Config
from hpc_es.envs import sudoku
from hpc_es.envs.inspection import inspect
from hpc_es.envs.manifest import count_tasks, eval_tasks
from hpc_es.errors import ConfigError, EnvError
from hpc_es.launch import witness
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Digested, Left

CONFIG = """
run: {name: play, num_updates: 1}
model: {path: model, dtype: float32}
task:
  env: rogue:Sudoku
  options: {size: 4, blanks: 2, action: digit, prompt: short}
  chat: false
es: {population: 2, sigma: 0.5, alpha: 0.5, tasks_per_member: 2}
sampling: {max_tokens: 1}
eval: {num_tasks: 0}
engine: {kind: lab, max_concurrent: 1, max_model_len: 512, threads: 1}
transport: {heartbeat: 0.5, heartbeat_timeout: 10, backend: none}
launch: {workers: 1, max_restarts: 1, stop_timeout: 5}
"""


def execute(command: list[str], deed: str, once: bool = False) -> tuple[int, str]:
    """(exit code, all that it says)."""
    environment = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}", rogue.ROGUE: deed}
    if once:
        environment[rogue.ROGUE_ONCE] = os.path.abspath("done")
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, *command], env=environment, text=True, timeout=120, **both)
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def hpc_es(*arguments: str, deed: str = "", once: bool = False) -> tuple[int, str]:
    return execute(["-m", "hpc_es", *arguments], deed, once)


# --- while it is played -------------------------------------------------------------------------------------------


def play(deed: str, env: str = "Sudoku", step_timeout: float = 60.0) -> tuple[int, str]:
    """Play as a worker does, in front of a witness."""
    return execute([str(SUPPORT / "play_rogue.py"), env, str(step_timeout)], deed)


@pytest.mark.parametrize(
    ("deed", "what"),
    [
        ("reset:exit2", "ended with code 2 in a call of an environment: rogue:Sudoku: reset(0)"),
        ("close:kill", "was killed by SIGKILL (out of memory, or somebody killed it) in a call"),
        ("step:exit", "ended with code 0 in a call of an environment: rogue:Sudoku: step 1 of task 0"),
        ("step:files", "rogue:Sudoku: step 1 of task 0 closed files and sockets of the process that runs it"),
    ],
)
def test_a_call_that_ends_its_process_is_named(deed: str, what: str) -> None:
    code, said = play(deed)
    assert code == 1
    assert what in said


@pytest.mark.parametrize("deed", ["spin", "hold"])
def test_an_instant_call_that_holds_the_whole_process_is_ended_after_its_time(deed: str) -> None:
    code, said = play(f"step:{deed}", env="Instant", step_timeout=0.5)
    assert code == 1
    assert "rogue:Instant: step 1 of task 0 did not return within its time limit" in said


@pytest.mark.parametrize(
    ("deed", "env", "said"),
    [
        ("step:fork", "Instant", "played 2, handlers kept\n"),
        ("step:signals", "Instant", "rogue:Instant: task 0 replaced the handler of SIGTERM and SIGINT, which"),
        ("step:sys.exit", "Sudoku", "void: rogue:Sudoku: step 1 of task 0 raised SystemExit: 0"),
        ("close:raise", "Sudoku", "void: rogue:Sudoku: close after task 0 raised OSError: busy"),
    ],
)
def test_harm_that_can_be_undone_costs_no_process(deed: str, env: str, said: str) -> None:
    code, all_said = play(deed, env)
    assert code == 0
    assert said in all_said
    assert all_said.count("\nplayed") + all_said.startswith("played") + all_said.count("void") == 1  # no second player
    assert "lost" not in all_said


def test_calls_are_noted_while_they_run_and_forgotten_afterwards() -> None:
    calls = Calls()
    with calls.noted("outer"):
        slot = calls.begin("step ½ " + "x" * 1000, limit_s=10.0)
        outer, inner = sorted(calls.running(), key=len)
        assert (outer, inner[:8]) == ("outer", "step ½ x")
        assert calls.overdue(time.monotonic() + 10) is None
        assert str(calls.overdue(time.monotonic() + 30)).startswith("step ½")
        calls.give_up(slot)
        assert calls.overdue(time.monotonic() + 1e9) is None
        calls.end(slot)
        calls.give_up(slot)  # too late: nothing is noted there any more
        assert calls.running() == ["outer"]
    assert calls.running() == []


def test_more_calls_at_once_than_there_is_room_for_are_not_noted_and_harm_nothing() -> None:
    calls = Calls()
    slots = [calls.begin(f"step {i}") for i in range(600)]
    assert len(calls.running()) == 512
    for slot in slots:
        calls.end(slot)
    assert calls.running() == []
    assert calls.begin("one more") >= 0


def test_an_error_that_follows_from_closed_files_names_the_call_that_closed_them() -> None:
    program = (
        "import os, sys\n"
        "from hpc_es.calls import CALLS\n"
        "from hpc_es.cli.failures import end_with_message\n"
        "from hpc_es.envs.guard import process_guard\n"
        "from hpc_es.launch.witness import died_as_command, stand_witness\n"
        "stand_witness(died_as_command)\n"
        "process_guard()\n"
        "try:\n"
        "    with CALLS.noted('mine: step 1', 60.0):\n"
        "        os.closerange(3, 4096)\n"
        "        try:\n"
        "            os.fstat(3)\n"  # as the event loop does: it may meet a closed file before the call returns
        "        except OSError as error:\n"
        "            end_with_message(error, is_role=True)\n"
        "finally:\n"
        "    print('not reached')\n"
    )
    code, said = execute(["-c", program], "")
    assert (code, said) == (
        1,
        "error: the process of this command had to end: mine: step 1 closed files and sockets of the process that "
        "runs it; it may close only its own\n",
    )


def test_a_witness_passes_signals_on_and_ends_as_its_child_does(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from hpc_es.calls import CALLS\n"
        "from hpc_es.launch.witness import died_as_command, stand_witness\n"
        "stand_witness(died_as_command)\n"
        "def asked(*_):\n    CALLS.decide_to_end(4); os._exit(4)\n"
        "if sys.argv[1] == 'hears': signal.signal(signal.SIGUSR2, asked)\n"
        "print(os.getpid(), flush=True); time.sleep(60)\n"
    )

    def start(how: str) -> tuple["subprocess.Popen[str]", int]:
        command = [sys.executable, "-c", program, how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    process, _ = start("hears")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 4
    process, _ = start("is deaf")
    process.terminate()
    assert process.communicate(timeout=20) == ("", "")  # whoever asked for the end needs no explanation
    assert process.returncode == -signal.SIGTERM
    process, child = start("is deaf")
    process.kill()
    process.wait(20)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and witness_state(child) != "Z":
        assert time.monotonic() < deadline, "the child outlives its witness"
        time.sleep(0.02)


def witness_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_process_that_is_stopped_is_not_taken_for_one_that_hangs() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert witness._is_stopped(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not witness._is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()


# --- before a run starts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deed", "code", "what"),
    [
        ("constructor:exit", 1, "ended with code 0 in a call of an environment: making the environment"),
        ("step:crash", 1, "was killed by SIGSEGV in a call of an environment: step"),
        ("step:signals", 1, "step replaced the handler of SIGTERM and SIGINT"),
        ("close:raise", 1, "rogue:Sudoku breaks the contract: close raised OSError: busy"),
        ("constructor:sys.exit", 1, "cannot be created: SystemExit: 0"),
        ("step:interrupt", 1, "raised KeyboardInterrupt"),
    ],
)
def test_env_check_fails_whatever_the_environment_does_to_it(deed: str, code: int, what: str) -> None:
    found, said = hpc_es("env", "check", "rogue:Sudoku", "size=4", "blanks=2", deed=deed)
    assert (found, what in said) == (code, True), said


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "raise KeyboardInterrupt"])
def test_a_module_that_exits_at_its_import_never_passes_for_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("leaver.py").write_text(f"import os, sys\n{end}\n")
    code, said = hpc_es("env", "list", "leaver:Leaver")
    assert code in (1, 2)
    assert "importing leaver" in said or "cannot be imported: " in said
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((ConfigError, EnvError), match="leaver:Leaver"):
        count_tasks(config("leaver:Leaver"))


def config(env: str = "rogue:Sudoku", step_timeout: float = 60.0) -> Config:
    options = {"size": 4, "blanks": 2} if env.startswith("rogue") else {}
    return Config.model_validate(
        {
            "run": {"name": "play", "num_updates": 1},
            "model": {"path": "model"},
            "task": {"env": env, "options": options, "step_timeout": step_timeout},
            "eval": {"num_tasks": 2},
        }
    )


@pytest.mark.parametrize(
    ("deed", "what"),
    [
        ("constructor:exit", "rogue:Sudoku: .* ended with code 0 in a call of an .*: making the environment"),
        ("constructor:sleep", r"rogue:Sudoku: making the environment did not return within task.step_timeout=0.5 s"),
        ("close:sleep", r"rogue:Sudoku: close did not return within task.step_timeout=0.5 s"),
        ("close:raise", "rogue:Sudoku: close raised OSError: busy"),
    ],
)
def test_the_tasks_of_a_rogue_are_asked_for_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, deed: str, what: str
) -> None:
    monkeypatch.setenv(rogue.ROGUE, deed)
    with pytest.raises(EnvError, match=what):
        inspect(config(step_timeout=0.5 if "sleep" in deed else 60.0), "train")
    assert CALLS.running() == []


def test_side_effects_of_an_environment_stay_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.getcwd()
    monkeypatch.setenv(rogue.ROGUE, "constructor:files")
    assert inspect(config(), "eval", 2).num_tasks > 2
    monkeypatch.setenv(rogue.ROGUE, "close:chdir")
    ours = sudoku.Sudoku(size=4, blanks=2)
    assert eval_tasks(config()).tasks == [ours.facts(task) for task in (0, 1)]
    assert os.getcwd() == folder


# --- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lab_model(Path("model"), LAB_MODELS["lab-10k"])
    Path("play.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.slow
def test_a_run_whose_workers_die_in_an_environment_ends_with_the_cause(folder: Path) -> None:
    code, said = hpc_es("run", "play.yaml", deed="step:exit")
    assert code == 1, said
    death = "worker-local-0 ended with code 0 in a call of an environment: rogue:Sudoku: step 1 of task "
    assert "starting it again (1 of at most 1 times)" in said
    assert f"error: {death}" in said
    assert "after launch.max_restarts=1 restarts" in said
    left = [record.reason for record in read_journal(Path("runs/play")) if isinstance(record, Left)]
    assert any("rogue:Sudoku: step 1 of task" in reason for reason in left), left
    code, said = hpc_es("status", "runs/play")
    assert "worker local-0 died" in said
    assert "rogue:Sudoku: step 1 of task" in said


def digest() -> int:
    return next(record.digest for record in read_journal(Path("runs/play")) if isinstance(record, Digested))


@pytest.mark.slow
def test_a_death_that_happens_once_costs_a_restart_and_no_bit(folder: Path) -> None:
    code, said = hpc_es("run", "play.yaml")
    assert code == 0, said
    undisturbed = digest()
    shutil.rmtree("runs")
    code, said = hpc_es("run", "play.yaml", deed="step:exit", once=True)
    assert code == 0, said
    assert "rogue:Sudoku: step 1 of task" in said
    assert digest() == undisturbed


@pytest.mark.slow
def test_an_evaluation_that_an_environment_ends_does_not_pass_for_success(folder: Path) -> None:
    assert hpc_es("run", "play.yaml")[0] == 0
    code, said = hpc_es("eval", "runs/play", "--num-tasks", "2", deed="step:exit")
    assert code == 1
    assert "error: the process of this command ended with code 0 in a call of an environment: rogue:Sudoku" in said
