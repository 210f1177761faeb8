"""Obstacles to a launch are reported at once, with the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_es.config import Config, save
from hpc_es.errors import LaunchError, TransportError
from hpc_es.launch import prepare, slurm
from hpc_es.launch.local import run_local
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.worker.loop import run_worker


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "play", "dir": tmp_path / "runs", "num_updates": 1},
            "model": {"path": str(write_tiny_llama(tmp_path / "model"))},
            "task": {"env": "sudoku", "options": {"size": 4}},
            "transport": {"head_timeout": 1, "host": "127.0.0.1"},
            "engine": {"kind": "transformers", "threads": 1},
        }
    )


def command(folder: Path, name: str, text: str) -> None:
    """A program that says this."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_submitting_without_slurm_writes_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"there is no sbatch here.*`hpc-es run CONFIG` runs on this machine"):
        slurm.submit(config)
    assert not prepare.run_paths(config).root.exists()


def test_a_run_whose_head_is_a_living_job_is_not_run_here_as_well(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = prepare.write_folder(config)
    slurm.record(paths, "12", "head")
    command(tmp_path / "bin", "squeue", "echo '12|PENDING||1:00|Priority'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match=rf"job 12 is PENDING.*`hpc-es cancel {paths.root}`"):
        run_local(config)


def test_a_head_of_which_slurm_says_nothing_may_still_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = prepare.write_folder(config)
    slurm.record(paths, "12", "head")
    command(tmp_path / "bin", "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/nowhere")  # so that sacct, where there is one, is silent as well
    with pytest.raises(LaunchError, match="does not say whether job 12"):
        run_local(config)


def test_a_run_folder_that_cannot_be_made_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, so even root cannot make a folder in it")
    with pytest.raises(LaunchError, match=f"the run folder {tmp_path / 'runs' / 'play'} cannot be written"):
        run_local(config)


def test_a_run_folder_that_a_job_cannot_write_is_named_with_its_node(config: Config) -> None:
    paths, _ = prepare.write_folder(config)
    paths.slurm.write_text("a file, so even root cannot write into it")
    environment = {**os.environ, "SLURM_JOB_ID": "21", "SLURMD_NODENAME": "node3"}
    words = [sys.executable, "-m", "hpc_es", "worker", str(paths.root)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert f"error: the run folder {paths.root} cannot be written on node3: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_refuses_keys_that_others_can_read_before_it_loads_a_model(config: Config) -> None:
    paths, _ = prepare.write_folder(config)
    (paths.secrets / "workers.json").chmod(0o644)
    save(config.model_copy(update={"model": config.model.model_copy(update={"path": "nowhere"})}), paths.config)
    with pytest.raises(TransportError, match=r"workers.json has mode 0644.*chmod 600"):
        run_worker(paths.root, "seat")


@pytest.mark.slow
@pytest.mark.parametrize("port", [None, 9])
def test_a_worker_without_a_head_ends_with_a_remedy(config: Config, port: int | None) -> None:
    paths, _ = prepare.write_folder(config)
    trouble = f"{paths.rendezvous} does not exist"
    if port is not None:
        there = {"run_id": "play", "generation": 1, "host": "127.0.0.1", "port": port, "pid": 1, "head_host": "node1"}
        paths.rendezvous.write_text(str(there).replace("'", '"'))
        trouble = f"nothing listens at 127.0.0.1:{port}"
    words = [sys.executable, "-m", "hpc_es", "worker", str(paths.root)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no message from a head for ")
    assert trouble in last
    assert f"`hpc-es submit {paths.root}`" in last
