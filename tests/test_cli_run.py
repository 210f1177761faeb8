"""The command line on a real run: two workers with a tiny Llama, started, stopped, finished, checked and replayed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_es.params import Arena
from hpc_es.params.checkpoint import read_manifest
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Committed

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CONFIG = """\
run: {name: small, num_updates: 6}
model: {path: tiny, dtype: float32}
task:
  env: sudoku
  options: {size: 4, blanks: 2, partial_credit: true, action: digit}
es: {population: 4, sigma: 0.05, alpha: 0.02, tasks_per_member: 2}
sampling: {max_tokens: 1}
eval: {every: 0, num_tasks: 4}
engine: {kind: transformers, max_concurrent: 1, max_model_len: 1024, threads: 1}
launch: {workers: 2, stop_timeout: 30s}
"""


def hpc_es(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hpc_es", *arguments], cwd=folder, capture_output=True, text=True)


def hpc_es_json(folder: Path, *arguments: str) -> dict[str, Any]:
    done = hpc_es(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which runs/small is finished, after a stop by Ctrl-C on the way."""
    folder = tmp_path_factory.mktemp("work")
    write_tiny_llama(folder / "tiny")
    (folder / "small.yaml").write_text(CONFIG)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "hpc_es", "run", "small.yaml"], cwd=folder, stdout=subprocess.PIPE
    )
    wait_for_commit(folder / "runs/small", launcher)
    launcher.send_signal(signal.SIGINT)
    output = launcher.communicate()[0].decode()
    assert launcher.returncode == 3, output
    assert "go on with: hpc-es run runs/small" in output
    assert processes_of(folder / "runs/small") == []
    assert hpc_es_json(folder, "status", "runs/small")["state"] == "no head answers"
    done = hpc_es(folder, "run", "small.yaml")
    assert done.returncode == 0, done.stderr
    assert "fitness of the final theta" in done.stdout
    assert "hpc-es verify runs/small" in done.stdout
    assert processes_of(folder / "runs/small") == []
    return folder


def wait_for_commit(run: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Until head and workers have made a version together."""
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
    answer = hpc_es_json(folder, "run", "small.yaml")
    assert (answer["finished"], answer["reason"]) == (True, "already finished")
    assert answer["summary"]["num_commits"] == 6
    assert RunPaths(folder / "runs/small").segments() == before
    assert (folder / "runs/small/report/learning_curve.png").stat().st_size > 1000


def test_status_of_a_finished_run_comes_from_its_journal(folder: Path) -> None:
    answer = hpc_es_json(folder, "status", "runs/small")
    assert (answer["state"], answer["version"], answer["num_updates"]) == ("finished", 6, 6)
    assert answer["eval_version"] == 6


def test_another_configuration_is_refused_with_the_difference(folder: Path) -> None:
    done = hpc_es(folder, "run", "small.yaml", "es.sigma=0.1", "launch.workers=1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:-1] == ["  es.sigma.start: 0.05 -> 0.1"]


def test_verify_finds_nothing_wrong(folder: Path) -> None:
    answer = hpc_es_json(folder, "verify", "runs/small")
    assert answer["ok"]
    assert [line["version"] for line in answer["versions"]] == list(range(7))


def test_verify_fails_when_the_base_model_is_another(folder: Path) -> None:
    write_tiny_llama(folder / "other", seed=1)
    done = hpc_es(folder, "verify", "runs/small", "--model", "other")
    assert done.returncode == 1
    assert "WRONG: " in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", [0, 2])
def test_replay_writes_the_bits_that_the_run_had(folder: Path, version: int) -> None:
    digests = {line["version"]: line["recorded"] for line in hpc_es_json(folder, "verify", "runs/small")["versions"]}
    out = folder / f"replayed-{version}"
    answer = hpc_es_json(folder, "replay", "runs/small", "--version", str(version), "--out", str(out))
    assert answer["digest"] == digests[version]
    assert Arena.from_pretrained(out).digest() == digests[version]
    served = hpc_es_json(
        folder, "replay", "runs/small", "--version", str(version), "--out", f"{out}-base", "--dtype", "base"
    )
    assert served["digest"] == read_manifest(folder / f"{out}-base").digest == digests[version]
    assert hpc_es(folder, "replay", "runs/small", "--out", str(out)).returncode == 2


def test_a_version_that_does_not_exist_is_named(folder: Path) -> None:
    done = hpc_es(folder, "replay", "runs/small", "--version", "9", "--out", "nowhere")
    assert done.returncode == 2
    assert done.stderr == "error: runs/small has no version 9; it has 0 to 6\n"
    assert not (folder / "nowhere").exists()


def test_eval_scores_an_old_version_and_keeps_the_result(folder: Path) -> None:
    answer = hpc_es_json(folder, "eval", "runs/small", "--version", "1", "--num-tasks", "3")
    assert (answer["version"], answer["num_tasks"]) == (1, 3)
    assert 0 <= answer["fitness"] <= 1
    assert list((folder / "runs/small/evals").iterdir())
