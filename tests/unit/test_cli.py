"""The command line without a run: exit codes, streams, and messages instead of tracebacks."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.table import Table
from typer.testing import CliRunner, Result

from hpc_es import __version__
from hpc_es.cli import app
from hpc_es.cli.arguments import output_file
from hpc_es.cli.output import console, excerpt, progress, status_line, status_table
from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import SeatStatus, Status, WorkerStatus
from hpc_es.worker import seat

CONFIG = """\
run: {name: test, num_updates: 5}
model: {path: no/such/model}
task: {env: sudoku, options: {size: 4}}
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("config.yaml")
    path.write_text(CONFIG)
    return path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_version_is_printed() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"hpc-es {__version__}\n")


def test_a_warning_is_one_plain_line() -> None:
    script = (
        "import warnings, hpc_es.cli as cli\n"
        "cli.app = lambda prog_name: warnings.warn('a torn tail was cut', stacklevel=1)\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: a torn tail was cut\n"


def test_the_process_ends_as_python_would_end_it_with_threads_joined_and_exit_functions_called() -> None:
    code = (
        "import atexit, threading, time; from hpc_es import cli\n"
        "class Part:\n"
        "    def __del__(self): print('taken apart', flush=True)\n"
        "part = Part(); atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\n"
        "cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code, "--nonsense"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split("\n")) == (2, ["thread", "at exit", ""])
    assert "No such option" in ended.stderr


def test_python_m_hpc_es_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hpc_es", "--help"], capture_output=True, text=True, check=True)
    assert all(f"\n  {command} " in done.stdout for command in ("run", "status", "verify", "replay", "eval", "config"))
    assert "\n  head " not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "none.yaml"], "none.yaml: no such config file"),
        (["run", "config.yaml", "es.populaton=3"], "es.populaton: unknown key (override); did you mean es.population?"),
        (["run", "config.yaml", "es.population=1"], "es.population=1 (override) must be above 1"),
        (["run", "config.yaml"], "model.path=no/such/model: no such folder"),
        (["config", "show", "config.yaml", "nonsense"], "must have the form section.key=value"),
        (["status", "nowhere"], "nowhere is not a run folder"),
        (["verify", "."], ". is not a run folder"),
        (["eval", "nowhere"], "nowhere is not a run folder (with config.yaml), a model folder"),
        (["replay", "nowhere", "--out", "x"], "nowhere is not a run folder"),
        (["model", "get", "smollm2-135"], "smollm2-135m"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_exit_code_2(
    config_file: Path, arguments: list[str], complaint: str
) -> None:
    if arguments[0] == "verify":
        config_file.rename("other.yaml")  # the folder would pass for a run folder
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_folder_that_was_moved_does_not_begin_another_run(config_file: Path) -> None:
    moved = Path("elsewhere/test")
    moved.mkdir(parents=True)
    config_file.rename(moved / "config.yaml")
    result = invoke("run", "elsewhere/test")
    assert result.exit_code == 2
    assert "belongs to the run folder runs/test" in result.stderr
    assert "add run.dir=elsewhere" in result.stderr
    assert "no such folder" in invoke("run", "elsewhere/test", "run.dir=elsewhere").stderr  # of the model: it goes on
    assert not Path("runs").exists()


@pytest.mark.parametrize("arguments", [["rnu"], ["run"], ["replay", "x"], ["status", "x", "--jsn"]])
def test_wrong_usage_has_exit_code_2(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_a_worker_without_its_launcher_ends_at_once(config_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpc_es", "worker", ".", "--parent", "1"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "the launcher (process 1) has ended" in done.stderr


def test_a_file_needs_a_folder_to_lie_in(tmp_path: Path) -> None:
    assert output_file(tmp_path / "new.csv") == tmp_path / "new.csv"
    assert output_file(None) is None
    with pytest.raises(ConfigError, match=r"there is no folder .*/none"):
        output_file(tmp_path / "none" / "new.csv")
    with pytest.raises(ConfigError, match="it is a folder"):
        output_file(tmp_path)
    assert not (tmp_path / "none").exists()


def test_a_long_table_shows_its_ends_and_notable_rows() -> None:
    rows = list(range(40))
    assert excerpt(rows, lambda row: row == 20, whole=False) == [0, 1, 2, 3, None, 20, None, 36, 37, 38, 39]
    assert excerpt(rows, lambda row: False, whole=True) == rows
    assert excerpt(rows[:24], lambda row: False, whole=False) == rows[:24]


def test_tables_keep_whole_cells_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = console()
    table = Table()
    for _ in range(5):
        table.add_column("a column that is long", no_wrap=True)
    with out.capture() as shown:
        out.print(table)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.get()


def test_config_show_prints_overrides_that_give_the_same_config(config_file: Path) -> None:
    result = invoke("config", "show", "config.yaml", "es.sigma=2e-3", "task.options.note=no")
    assert result.exit_code == 0
    lines = [line.partition("  #") for line in result.stdout.splitlines()]
    shown = {text.strip(): origin.strip() for text, _, origin in lines}
    assert shown["es.sigma.start=0.002"] == "override"
    assert shown["task.options.size=4"] == "config.yaml:3"
    assert shown["run.seed=0"] == "default"
    again = invoke("config", "show", "config.yaml", *shown)
    assert {line.partition("  #")[0].strip() for line in again.stdout.splitlines()} == set(shown)


# --- progress -----------------------------------------------------------------------------------------------------


def a_status(version: int = 3, num_workers: int = 1, fitness: float | None = 0.25) -> Status:
    worker = WorkerStatus("local-0.ab", "local-0", "here", "busy", version, 0.9, 0.8, 7, "3.1")
    return Status(
        run_id="test", generation=1, state="running", version=version, num_updates=10, fitness=fitness,
        eval_fitness=0.5, eval_version=0, cohort_done=2, cohort_size=6, seconds_elapsed=61.0, seconds_left=3725.4,
        tokens_per_second=152.3, workers=(worker,) * num_workers, events=("a worker joined",),
    )  # fmt: skip


def test_a_status_fits_in_a_line_and_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_line(a_status()) == (
        "version 3 of 10, running, fitness 0.2500, held out 0.5000 (version 0), 1 worker, 152 tokens/s, 1:02:05 left"
    )
    console().print(status_table(a_status()))
    shown = capsys.readouterr().out
    for text in ("cohort 2 of 6", "local-0", "90%", "80%", "a worker joined", "0:01:01 since start"):
        assert text in shown


def test_very_many_workers_are_shown_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(status_table(a_status(num_workers=64)))
    shown = capsys.readouterr().out
    assert "64 busy; busy 90%, useful 80% on average, 448 results" in shown
    assert "versions: 64 at 3" in shown
    assert "local-0" not in shown
    console().print(status_table(a_status(num_workers=64), whole=True))
    assert capsys.readouterr().out.count("local-0") == 64


def test_workers_that_are_not_connected_are_shown_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    for name in ("local-0", "a/b", "local-1", "local-2"):
        seat.begin(paths, name)
    seat.note(paths, "local-1", "died", "ended with code 0 in sudoku: step 1 of task 7", worker="local-1.ab")
    seat.begin(paths, "local-1")
    seat.note(paths, "local-2", "ended", "with code 0")
    seat.note(paths, "a/b", "failed", "the model is quantised")
    status = seat.with_absent(a_status(), paths)
    assert [(each.seat, each.state) for each in status.absent] == [("a/b", "failed"), ("local-1", "starting")]
    console().print(status_table(status))
    shown = capsys.readouterr().out
    assert "1 failed, 1 starting" in shown
    assert "worker a/b failed 0:00:00 ago: the model is quantised" in shown
    assert "worker local-1 starting 0:00:00: before: ended with code 0 in sudoku: step 1 of task 7" in shown
    at_rest = seat.with_absent(msgspec.structs.replace(a_status(), seconds_elapsed=0.0), paths)
    assert [each.state for each in at_rest.absent] == ["failed"]


def test_a_log_says_now_and_then_that_a_worker_is_still_starting(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(console()) as shown:
        for seconds in (1.0, 2.0, 16.0):
            absent = (SeatStatus("local-1", "starting", seconds, ""),)
            shown.status(msgspec.structs.replace(a_status(), absent=absent))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("; ")[2] for line in lines] == [
        "worker local-1 starting 0:00:01",
        "worker local-1 starting 0:00:16",
    ]


def test_without_a_terminal_each_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(console()) as shown:
        for status in (a_status(3), a_status(3), a_status(3, fitness=0.3), a_status(4), a_status(4, num_workers=2)):
            shown.status(status)
        shown.event("worker-local-0 was killed")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1].split(",")[0] for line in lines] == [
        "version 3 of 10", "version 4 of 10", "version 4 of 10", "worker-local-0 was killed",
    ]  # fmt: skip


def test_a_run_folder_copied_to_another_name_lists_the_overrides_it_needs(config_file: Path) -> None:
    copied = Path("runs/other")
    copied.mkdir(parents=True)
    config_file.rename(copied / "config.yaml")
    assert "add run.dir=runs run.name=other" in invoke("run", "runs/other").stderr
    assert "no such folder" in invoke("run", "runs/other", "run.dir=runs", "run.name=other").stderr  # of the model
