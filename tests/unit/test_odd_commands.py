"""Command lines that no one means: each ends with a right answer or with one plain message, never with a traceback.

All of them run in this process, and none starts a run.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import fake_run
import pytest
import typer
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.config import load
from hpc_es.params import Arena
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model

LONG, DIGITS = "a" * 5000, "9" * 5000
ALIASES = ", ".join(f"&{new} [{','.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefg", "bcdefgh", strict=True))

VALUES = (
    *(DIGITS, "9" * 30, f"-{DIGITS}", f"0.{DIGITS}", "0x" + "f" * 5000, "1e999999", ".inf", ".nan", "-1", "1.5"),
    *("[" * 3000, "[" * 400 + "]" * 400, "{a: " * 300 + "1" + "}" * 300, "&a [*a]", "{a: 1, a: 2}", "{a: ", "{a: b}"),
    *('"a\\0b"', '"\\ud800"', "a\udc80", "a\x1b[2J", "\N{RIGHT-TO-LEFT OVERRIDE}", LONG, "", "[/a]", "a\n---\nb"),
    "!!python/object/apply:os.system [x]",
)
KEYS = ("run.seed", "run.name", "run.dir", "es.sigma", "task.options.x", "transport.heartbeat", "staleness")
ODD_KEYS = (LONG, "a." * 3000 + "b", "run.\udc80", ".", "a..b", "run.seed.x", "\x1b[2J", "[/a]", "", "es." + "a." * 99)
NUMBERS = ("-1", DIGITS, "9" * 30, "x", "", "1e3", "nan", "0x10", "\N{ARABIC-INDIC DIGIT THREE}")
NAMES = (LONG, "a/b", "..", "", "a\udc80", "[/a]", "a\nb", "\x1b[2J")
PATHS = (LONG, "config.yaml/below", "a\udc80", "/proc/none/a", "\N{SNOWMAN}" * 200, "[/a]")


def overrides() -> Iterator[list[str]]:
    for key in KEYS:
        yield from (["config", "show", "config.yaml", f"{key}={value}"] for value in VALUES)
    yield from (["config", "show", "config.yaml", f"{key}=1"] for key in ODD_KEYS)
    yield ["config", "show", "config.yaml", f"task.options.x=[&a [x], {ALIASES}]"]
    for value in VALUES:
        yield ["env", "check", "lab", f"length={value}"]
        yield ["plan", "config.yaml", "--set", f"prefill_share={value}"]
        yield ["retention", "run", "--chat-options", value]


def paths() -> Iterator[list[str]]:
    for path in PATHS:
        for command in ("run", "status", "verify", "report", "evals", "logs", "eval", "prepare", "worker", "head"):
            yield [command, path]
        yield from (["config", "show", path], ["config", "show", "config.yaml", f"{path}.yaml"])
        yield from (["compare", path, "run"], ["retention", path], ["eval", "run", "--task", path])
        yield from (["model", "get", "lab-10k", "--out", path], ["verify", "run", "--model", path])
        yield ["replay", "run", "--version", "0", "--out", f"{path}/model"]
        yield ["fork", "run", "--version", "0", "--name", "other", "--base", f"{path}/base"]
        yield ["prepare", "config.yaml", f"run.dir={path}/below"]
        yield from (["simulate", "config.yaml", option, path] for option in ("--csv", "--durations"))
        yield from (["plan", "config.yaml", option, path] for option in ("--gpu", "--model-config", "--like"))


def names() -> Iterator[list[str]]:
    for name in NAMES:
        yield from (["model", "get", name], ["env", "list", name], ["env", "check", name], ["logs", "run", name])
        yield from (["fork", "run", "--name", name], ["episodes", "run", "--eval", name], ["drain", "run", name])
        yield from (["worker", "run", "--parent", "1", "--seat", name], ["report", f"{name}=run", "--base", "x"])
        yield from (["simulate", "config.yaml", "--modes", name], ["retention", "run", "--tasks", name])
        yield from (["counterfactual", "run", option, name] for option in ("--drop", "--lag-weight"))


def numbers() -> Iterator[list[str]]:
    for number in NUMBERS:
        yield from ([role, "run", "--parent", number] for role in ("worker", "head"))
        yield from (["episodes", "run", option, number] for option in ("--version", "--member", "--task"))
        yield from (["replay", "run", "--out", "out", "--version", number], ["logs", "run", "-n", number])
        yield from (["simulate", "config.yaml", option, number] for option in ("--workers", "--seed", "--lifetime"))
        for option, value in {"--durations": "constant:{}", "--modes": "natural:{}"}.items():
            yield ["simulate", "config.yaml", option, value.format(number)]
        yield from (["plan", "config.yaml", option, number] for option in ("--workers", "--parameters", "--turns"))
        yield from (["plan", "config.yaml", "--set", f"{key}={number}"] for key in ("x", "prefill_share"))
        yield from (["eval", "run", option, number, "--name", "../x"] for option in ("--versions", "--repeats"))
        yield from (["compare", f"run@{number}", "run"], ["evals", "run", "--against", f"run@{number}"])
        yield from (["probe", "stale", "run", "--lags", number], ["probe", "noise", "run", "--version", number])
        yield from (["retention", "run", option, number] for option in ("--versions", "--limit"))
        yield from (["counterfactual", "run", "--drop", f"stale:{number}"], ["fork", "run", "--version", number])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with config.yaml, model, and a made-up run of that model in run."""
    folder = tmp_path_factory.mktemp("odd")
    text = "run: {name: run, dir: ., num_updates: 4}\nmodel: {path: model}\ntask: {env: lab}\nengine: {kind: lab}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_lab_model(folder / "model", LAB_MODELS["lab-10k"])
        (folder / "config.yaml").write_text(text)
        patch.setattr(fake_run, "CONFIG", load(Path("config.yaml")).config.model_dump_json())
        patch.setattr(fake_run, "BASE_DIGEST", Arena.from_pretrained("model").base_digest)
        fake_run.write_run(folder / "run")
        (folder / "run" / "config.yaml").write_text(text)
        yield folder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lines", [overrides, paths, names, numbers])
def test_a_command_line_that_no_one_means_ends_well(
    folder: Path, lines: Callable[[], Iterator[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.testing._get_command", cache(typer.main.get_command))  # not built anew for every line
    wrong = list[str]()
    for line in lines():
        result = CliRunner().invoke(app, line)
        said = result.stderr.strip().splitlines()
        is_plain = result.exit_code == 0 or said[-1].startswith(("error: ", "Error: ")) or "error: " in result.stderr
        has_ended_well = result.exit_code in (0, 2) or (result.exit_code == 1 and line[0] not in ("config", "env"))
        if not is_plain or not has_ended_well or "bug in hpc-es" in result.stderr or "Traceback" in result.output:
            wrong.append(f"{result.exit_code} {str(line)[:200]}: {result.stderr[-500:]}")
    assert not wrong, "\n".join(wrong)


def test_there_are_more_than_500_of_them() -> None:
    lines = [line for group in (overrides, paths, names, numbers) for line in group()]
    assert len(lines) > 500


def test_errors_name_the_place_and_the_remedy(folder: Path) -> None:
    def complaint(value: str) -> str:
        return CliRunner().invoke(app, ["config", "show", "config.yaml", f"task.options.x={value}"]).stderr

    assert "does not fit into 64 bits; quote it if it is meant as text" in complaint("9" * 30)
    assert "too large a number" in complaint(DIGITS)
    assert "too large a number" in complaint("1e999")
    assert "nested too deeply: more than 50" in complaint("[" * 51 + "]" * 51)
    assert "contains a NUL" in complaint('"a\\0b"')
    below_a_file = CliRunner().invoke(app, ["model", "get", "lab-10k", "--out", "config.yaml/x/y"])
    assert below_a_file.stderr == "error: config.yaml/x/y cannot be created (Not a directory): choose another --out\n"


def test_the_largest_numbers_and_depths_that_are_allowed_are_kept(folder: Path) -> None:
    for value in (str(2**64 - 1), str(-(2**63)), "[" * 49 + "]" * 49, f'"{DIGITS}"'):
        shown = CliRunner().invoke(app, ["config", "show", "config.yaml", f"task.options.x={value}"])
        assert shown.exit_code == 0, shown.stderr
        assert value.strip('"') in shown.stdout


def test_a_bug_is_called_a_bug_and_its_traceback_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("hpc_es.config.flatten", lambda config: {}["none"])
    show = ["config", "show", "config.yaml"]
    result = CliRunner().invoke(app, show)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: this is a bug in hpc-es, please report it: KeyError: 'none' (test_odd_")
    (kept,) = folder.glob("hpc-es-traceback-*.txt")
    assert str(kept) in result.stderr
    assert "Traceback" in kept.read_text()
    monkeypatch.setenv("HPC_ES_TRACEBACK", "1")
    assert "Traceback" in CliRunner().invoke(app, show).stderr
