"""tools/chaos.py with few moments: random kills, and the bits of an undisturbed run."""

import re
import subprocess
import sys
from pathlib import Path

import gated
import pytest

from hpc_es.params.tiny_llama import write_tiny_llama

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def chaos(folder: Path, *arguments: str) -> str:
    model = write_tiny_llama(folder / "tiny")
    command = [sys.executable, "tools/chaos.py", "configs/chaos.yaml", "--out", str(folder / "runs"), *arguments]
    overrides = [f"model.path={model}", "task.options.prompt=short"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def paced(monkeypatch) -> None:
    """Episodes that last, so that a run outlasts its faults on a fast machine too."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    monkeypatch.setenv(gated.PACE, "0.2")


@pytest.mark.timeout(900)
def test_random_kills_of_everything_change_no_bit(tmp_path, paced):
    output = chaos(tmp_path, "--moments", "5", "--seed", "3", "run.num_updates=8", "task.env=gated:Sudoku")
    assert len(re.findall(r"^ +\d+\. ", output, re.MULTILINE)) >= 3


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_faults_of_a_cluster_change_no_bit(tmp_path, slurm_cluster, paced):
    script = ("--slurm", "--faults", "double,preempt,head")
    output = chaos(tmp_path, *script, "run.num_updates=14", "task.env=gated:Sudoku")
    assert re.findall(r"^ +\d+\. (\w+)", output, re.MULTILINE) == ["double", "preempt", "head"]


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_kills_of_vllm_workers_and_of_the_head_change_no_bit(tmp_path):
    output = chaos(
        tmp_path, "--moments", "2", "--seed", "0", "--faults", "worker,both", "engine.kind=vllm", "run.num_updates=4"
    )
    assert re.search(r"^ +1\. ", output, re.MULTILINE)
