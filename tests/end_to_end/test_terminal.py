"""Output of commands: every locale can show it, a pipe may close, and no text can control the terminal."""

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_run
import pytest
from rich.text import Text
from typer.testing import CliRunner

import hpc_es
from hpc_es.analysis.figures import canvas
from hpc_es.cli import app
from hpc_es.cli.output import console, jobs_table, print_json, progress, status_table, tables
from hpc_es.cli.terminal import harmless
from hpc_es.config import load
from hpc_es.launch.slurm_commands import JobStatus
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import Status, WorkerStatus

EVIL = "[/a][red]:smile: \x1b[2J\x07\x9b1m\N{RIGHT-TO-LEFT OVERRIDE}\r"
SHOWN = r"[/a][red]:smile: \x1b[2J\x07\x9b1m\u202e\r"
CONFIG = """\
run: {name: run, dir: ., num_updates: 4}
model: {path: model}
task: {env: lab, options: {note: "déjà vu \N{SNOWMAN}"}}
engine: {kind: lab}
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = {
    "C": ASCII,
    "POSIX, unset": {"LC_ALL": "", "LANG": "", "LC_CTYPE": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with config.yaml and a made-up finished run."""
    folder = tmp_path_factory.mktemp("terminal")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        patch.setattr(fake_run, "CONFIG", load(Path("config.yaml")).config.model_dump_json())
        fake_run.write_run(folder / "run")
        (folder / "run" / "config.yaml").write_text(CONFIG, encoding="utf-8")
        yield folder


def hpc_es_in(locale: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-W", "ignore", "-m", "hpc_es", *arguments]
    return subprocess.run(command, capture_output=True, env={**os.environ, **locale})


# --- locales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("locale", LOCALES)
def test_every_locale_can_show_a_configuration(folder: Path, locale: str) -> None:
    done = hpc_es_in(LOCALES[locale], "config", "show", "config.yaml")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("latin-1")
    assert r"\u2603" in text
    assert ("déjà" if locale == "latin-1" else r"d\xe9j\xe0") in text


def test_a_finished_run_shows_its_summary_in_a_locale_without_its_characters(folder: Path) -> None:
    script = (
        "from hpc_es.cli import main, app, output\n"
        "from hpc_es.paths import RunPaths\n"
        "from pathlib import Path\n"
        "main.__globals__['app'] = lambda prog_name: output.report(RunPaths(Path('run')), output.console())\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env={**os.environ, **ASCII})
    assert b"learning curve: run/report/learning_curve.png" in done.stdout, done.stderr
    assert rb"\xb1" in done.stdout  # the plus-minus sign


def test_errors_are_shown_in_every_locale(folder: Path) -> None:
    done = hpc_es_in(ASCII, "status", "d\N{SNOWMAN}")
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)


def test_json_is_ascii_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text": 'a "\N{SNOWMAN}" \N{GRINNING FACE} \x7f \x9b é', "nan": float("nan"), "path": Path("é")}
    print_json(value)
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert json.loads(shown) == {**value, "nan": None, "path": "é"}


def test_every_text_file_of_the_package_is_opened_as_utf_8() -> None:
    root = Path(hpc_es.__file__).parent
    wrong = [f"{path}:{line}" for path in root.rglob("*.py") for line in _without_encoding(path)]
    assert not wrong, f"the locale would decide: {wrong}"


def _without_encoding(path: Path) -> Iterator[int]:
    """Lines that open a text file without saying how it is written."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        is_text_mode = not any("b" in text for text in texts) and owner not in ("os", "Image", "zipfile", "h5py.h5d")
        opens = name == "open" and is_text_mode and (owner == "" or any(set(text) <= set("rwax+t") for text in texts))
        if name in ("read_text", "write_text") or opens or _as_text(node, name):
            yield node.lineno


def _as_text(call: ast.Call, name: str) -> bool:
    return name in ("run", "Popen", "check_output") and any(word.arg == "text" for word in call.keywords)


# --- pipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["config show config.yaml | head -1", "status run | true", "verify none 2>&1 | true"]
)
def test_a_reader_that_goes_costs_a_command_nothing_but_its_output(folder: Path, command: str) -> None:
    words, _, reader = command.partition(" | ")
    script = f"{sys.executable} -W ignore -m hpc_es {words} | (sleep 0.2; {reader}); echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == ("2" if "none" in command else "0")


def test_a_command_continues_when_its_reader_is_gone(tmp_path: Path) -> None:
    script = (
        "from hpc_es.cli import terminal\n"
        "terminal.prepare_streams()\n"
        "for line in range(20_000): print('x' * 100)\n"
        "open('done', 'w').close()"
    )
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{script}" | head -1'], cwd=tmp_path, check=True)
    assert (tmp_path / "done").exists()


def test_a_full_disk_under_stdout_is_an_error(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-W", "ignore", "-m", "hpc_es", "config", "show", "config.yaml"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert b"No space left on device" in done.stderr


# --- words of others ----------------------------------------------------------------------------------------------


def evil_status(num_workers: int = 1) -> Status:
    worker = WorkerStatus(EVIL, EVIL, EVIL, EVIL, 3, 0.9, 0.8, 7, EVIL)
    return Status(
        run_id=EVIL, generation=1, state=EVIL, version=3, num_updates=10, fitness=0.5, eval_fitness=None,
        eval_version=None, cohort_done=2, cohort_size=6, seconds_elapsed=61.0, seconds_left=None,
        tokens_per_second=None, workers=(worker,) * num_workers, events=(EVIL,), why_idle=EVIL,
    )  # fmt: skip


def test_words_of_others_are_shown_as_they_are_and_never_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "1000"}.items():
        monkeypatch.setenv(name, value)
    jobs = jobs_table([("head", JobStatus("1", EVIL, EVIL, EVIL))])
    for thing in (EVIL, Text(EVIL), status_table(evil_status()), jobs, *tables([(EVIL, [EVIL])], 1000)):
        console().print(thing, style="bold")
    shown = capsys.readouterr().out
    for order in ("\x1b[2J", "\x07", "\x9b", "\N{RIGHT-TO-LEFT OVERRIDE}", "\r"):
        assert order not in shown
    assert shown.count(r"[/a][red]:smile: \x1b[2J") >= 10
    assert SHOWN in shown
    assert "\x1b[1m" in shown  # our own styles are


def test_progress_shows_words_of_others_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(console()) as shown:
        shown.event(EVIL)
        shown.status(evil_status())
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 2
    assert harmless(out) == out


def test_an_error_that_quotes_them_is_one_plain_message(folder: Path) -> None:
    result = CliRunner().invoke(app, ["status", f"none{EVIL}"])
    assert (result.exit_code, result.stderr) == (2, result.stderr)
    assert result.stderr.startswith(f"error: none{SHOWN} is not a run folder")


def test_logs_are_shown_without_their_orders(folder: Path) -> None:
    paths = RunPaths(folder / "run")
    paths.logs.mkdir()
    paths.log("head").write_bytes(f"first\r\n{EVIL}\n".encode() + b"\xff\n")
    shown = CliRunner().invoke(app, ["logs", "run"]).stdout
    assert SHOWN.removesuffix(r"\r") in shown
    assert harmless(shown) == shown


# --- figures ------------------------------------------------------------------------------------------------------


def test_dollar_signs_in_names_are_not_mathematics() -> None:
    name = r"$\frac{$"
    figure, [[axes]] = canvas.panels()
    axes.plot([1, 2], [1, 2], label=name)
    axes.set_xlabel(name)
    axes.set_yticks([1, 2], [name, name])
    canvas.title(axes, name)
    canvas.legend(axes)
    canvas.legend_below(figure, axes)
    assert canvas.png(figure).startswith(b"\x89PNG")
    figure.savefig(io.BytesIO(), format="svg", bbox_inches="tight")  # as notebooks do
