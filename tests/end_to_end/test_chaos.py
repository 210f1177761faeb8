"""tools/chaos.py with few moments: random kills, and the bits of an undisturbed run."""

import re
import subprocess
import sys
from pathlib import Path

import gated
import pytest
from repository import ROOT, SUPPORT

from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.params.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.slow


def chaos(folder: Path, config: str, *arguments: str) -> str:
    command = [sys.executable, "tools/chaos.py", config, "--out", str(folder / "runs"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_llama(folder: Path, *arguments: str) -> str:
    overrides = [f"model.path={write_tiny_llama(folder / 'tiny')}", "task.options.prompt=short"]
    return chaos(folder, "configs/chaos.yaml", *arguments, *overrides)


def of_lab(folder: Path, *arguments: str) -> str:
    model = write_lab_model(folder / "lab", LAB_MODELS["lab-10k"])
    return chaos(folder, "configs/chaos_modes.yaml", *arguments, f"model.path={model}")


def faults(output: str) -> list[str]:
    return re.findall(r"^ +\d+\. (\w+)", output, re.MULTILINE)


@pytest.fixture
def paced(monkeypatch) -> None:
    """Episodes that last, so that a run outlasts its faults on a fast machine too."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
    monkeypatch.setenv(gated.PACE, "0.2")


@pytest.mark.timeout(900)
def test_random_kills_of_everything_change_no_bit(tmp_path, paced):
    short = ("run.num_updates=6", "es.tasks_per_member=3", "task.env=gated:Sudoku")
    output = of_llama(tmp_path, "--moments", "5", "--seed", "3", *short)
    assert len(faults(output)) >= 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["natural-discard", "natural-hold", "controlled", "tail", "staircase"])
def test_kills_of_the_head_leave_the_bound_and_every_cohort_as_they_are(tmp_path, mode):
    output = of_lab(tmp_path, "--modes", mode, "--faults", "head", "--moments", "3", "run.num_updates=9")
    assert len(faults(output)) >= 2


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_faults_of_a_cluster_change_no_bit(tmp_path, slurm_cluster, paced):
    script = ("--slurm", "--faults", "double,preempt,head")
    output = of_llama(tmp_path, *script, "run.num_updates=14", "task.env=gated:Sudoku")
    assert faults(output) == ["double", "preempt", "head"]


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_faults_of_a_cluster_lose_no_result_of_natural_asynchrony_and_count_none_twice(tmp_path, slurm_cluster):
    script = ("--slurm", "--faults", "preempt,requeue,head,node", "--modes", "natural-discard")
    assert faults(of_lab(tmp_path, *script, "run.num_updates=60")) == ["preempt", "requeue", "head", "node"]


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_kill_of_a_vllm_worker_and_of_the_head_changes_no_bit(tmp_path, paced):
    options = ("--moments", "1", "--faults", "both", "engine.kind=vllm", "launch.workers=1", "run.num_updates=3")
    options += ("task.env=gated:Sudoku",)
    assert faults(of_llama(tmp_path, *options)) == ["both"]
