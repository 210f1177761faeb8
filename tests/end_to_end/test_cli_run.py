"""The command line on a real run: two workers with a tiny Llama, started, stopped, finished, checked and replayed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hpc_es import store
from hpc_es.cli import app
from hpc_es.params import Arena
from hpc_es.params.checkpoint import read_manifest
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Committed

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CONFIG = """\
run: {name: small, num_updates: 4}
model: {path: tiny, dtype: float32}
task:
  env: sudoku
  options: {size: 4, blanks: 2, partial_credit: true, action: digit}
es: {population: 4, sigma: 0.05, alpha: 0.02, tasks_per_member: 3}
sampling: {max_tokens: 1}
eval: {every: 2, num_tasks: 4}
engine: {kind: transformers, max_concurrent: 1, max_model_len: 1024, threads: 1}
launch: {workers: 2, stop_timeout: 30s}
"""


def hpc_es(*arguments: str) -> Result:
    """Run the command in this process; head and workers get processes of their own."""
    return CliRunner().invoke(app, list(arguments))


def hpc_es_json(*arguments: str) -> dict[str, Any]:
    done = hpc_es(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, in which runs/small is finished, after a stop by Ctrl-C on the way."""
    folder = tmp_path_factory.mktemp("work")
    write_tiny_llama(folder / "tiny")
    (folder / "small.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        launcher = subprocess.Popen([sys.executable, "-m", "hpc_es", "run", "small.yaml"], stdout=subprocess.PIPE)
        wait_for_commit(folder / "runs/small", launcher)
        launcher.send_signal(signal.SIGINT)
        output = launcher.communicate()[0].decode()
        assert launcher.returncode == 3, output
        assert "resume with: hpc-es run runs/small" in output
        assert processes_of(folder / "runs/small") == []
        assert hpc_es_json("status", "runs/small")["state"] == "no head answers"
        done = hpc_es("run", "small.yaml")
        assert done.exit_code == 0, done.stderr
        assert "fitness of the final theta" in done.stdout
        assert "hpc-es verify runs/small" in done.stdout
        assert processes_of(folder / "runs/small") == []
        yield folder


def wait_for_commit(run: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Wait until head and workers have made a version together."""
    deadline = time.monotonic() + 300
    while launcher.poll() is None and time.monotonic() < deadline:
        if any(isinstance(record, Committed) for record in read_journal(run, warn=lambda text: None)):
            return
        time.sleep(0.05)
    launcher.terminate()
    raise AssertionError(launcher.communicate()[0])


def processes_of(run: Path) -> list[str]:
    """Command lines of living processes that have the run folder's name in them."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            same_place = os.readlink(file.parent / "cwd") == str(run.parent.parent)
        except OSError:
            continue  # it has ended
        if same_place and f"runs/{run.name}" in line:
            lines.append(line)
    return lines


def test_a_finished_run_is_shown_again_without_a_new_head(folder: Path) -> None:
    before = RunPaths(folder / "runs/small").segments()
    answer = hpc_es_json("run", "small.yaml")
    assert (answer["finished"], answer["reason"]) == (True, "already finished")
    assert answer["summary"]["num_commits"] == 4
    assert RunPaths(folder / "runs/small").segments() == before
    assert (folder / "runs/small/report/learning_curve.png").stat().st_size > 1000


def test_status_of_a_finished_run_comes_from_its_journal() -> None:
    answer = hpc_es_json("status", "runs/small")
    assert (answer["state"], answer["version"], answer["num_updates"]) == ("finished", 4, 4)
    assert answer["eval_version"] == 4


def test_another_configuration_is_refused_with_the_difference() -> None:
    done = hpc_es("run", "small.yaml", "es.sigma=0.1", "launch.workers=1")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[1:-1] == ["  es.sigma.start: 0.05 -> 0.1"]


def test_verify_finds_nothing_wrong() -> None:
    answer = hpc_es_json("verify", "runs/small")
    assert (answer["ok"], answer["problems"]) == (True, [])
    assert [line["version"] for line in answer["versions"]] == list(range(5))


def test_verify_fails_when_the_base_model_is_another(folder: Path) -> None:
    write_tiny_llama(folder / "other", seed=1)
    done = hpc_es("verify", "runs/small", "--model", "other")
    assert done.exit_code == 1
    assert "wrong: " in done.stdout
    assert "Traceback" not in done.output


@pytest.mark.parametrize("version", [0, 2])
def test_replay_writes_the_bits_that_the_run_had(folder: Path, version: int) -> None:
    digests = {line["version"]: line["recorded"] for line in hpc_es_json("verify", "runs/small")["versions"]}
    out = folder / f"replayed-{version}"
    answer = hpc_es_json("replay", "runs/small", "--version", str(version), "--out", str(out))
    assert answer["digest"] == digests[version]
    assert Arena.from_pretrained(out).digest() == digests[version]
    transformers.AutoModelForCausalLM.from_pretrained(out)
    served = hpc_es_json("replay", "runs/small", "--version", str(version), "--out", f"{out}-base", "--dtype", "base")
    assert served["digest"] == read_manifest(folder / f"{out}-base").digest == digests[version]
    assert hpc_es("replay", "runs/small", "--out", str(out)).exit_code == 2


def test_a_version_that_does_not_exist_is_named(folder: Path) -> None:
    done = hpc_es("replay", "runs/small", "--version", "9", "--out", "nowhere")
    assert done.exit_code == 2
    assert done.stderr == "error: runs/small has no version 9; it has 0 to 4\n"
    assert not (folder / "nowhere").exists()


def test_evaluating_a_version_afterwards_repeats_the_runs_results(folder: Path) -> None:
    answer = hpc_es_json("eval", "runs/small", "--version", "2")
    assert (answer["version"], answer["num_tasks"]) == (2, 4)
    assert list((folder / "runs/small/evals").iterdir())
    evals = store.read(folder / "runs/small").evals
    measured = evals[evals.version == 2].reward_mean
    assert len(measured) == 2
    assert list(measured) == pytest.approx([answer["fitness"]] * 2, abs=1e-12)
