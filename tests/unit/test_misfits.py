"""Warnings where workers and schedule do not fit."""

import inspect
import time
from pathlib import Path

import pytest
from repository import CONFIGS
from theatre import make_config
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.cli.simulate import simulate as simulate_command
from hpc_es.config import load
from hpc_es.simulator.worker_count import DURATIONS, worker_count_warnings

ASYNC_1 = {"mode": "natural", "max_lag": 1}


def told(num_workers: int, population: int = 16, num_updates: int = 200, **staleness: object) -> list[str]:
    config = make_config(
        run={"num_updates": num_updates}, es={"population": population}, staleness=staleness or ASYNC_1
    )
    return worker_count_warnings(config, num_workers)


def test_four_workers_and_a_published_cohort_fit() -> None:
    assert told(4) == told(4, population=30) == []


@pytest.mark.parametrize("population", [16, 30, 1000])
def test_one_worker_makes_nothing_stale(population: int) -> None:
    (warning,) = told(1, population)
    assert "asynchronous in name only with 1 worker" in warning
    assert "launch.workers" in warning
    assert "slurm.workers" in warning
    assert told(1, num_updates=1) == []
    assert told(1, mode="natural", max_lag=0) == told(1, mode="sync") == []


def test_too_many_workers_waste_their_work_and_idle() -> None:
    idle, late = told(64)
    assert "32 of the 64 workers would only idle" in idle
    assert "about 47% of the work would come too late" in late
    assert "at most about 6 workers" in late
    assert told(6) == []
    assert len(told(64, mode="natural", max_lag=1, overdue="hold")) == 1
    assert told(64, population=1000) == []


def test_a_lag_that_a_short_run_never_reaches_is_warned_about() -> None:
    (warning,) = told(4, num_updates=100, mode="tail", counts={0: 15, 128: 1})
    assert "asks for results of lag 128, but run.num_updates=100" in warning
    assert told(4, num_updates=129, mode="tail", counts={0: 15, 128: 1}) == []
    assert len(told(4, num_updates=8, mode="controlled", lag=8, share=0.5)) == 1


@pytest.mark.parametrize("population", [16, 10_000, 1_000_000])
def test_asking_costs_little_whatever_the_population(population: int) -> None:
    told(4)  # imports
    began = time.process_time()
    told(4, population)
    assert time.process_time() - began < 0.3


def test_the_durations_are_those_of_the_simulate_command() -> None:
    assert inspect.signature(simulate_command).parameters["durations"].default == DURATIONS


def test_run_and_submit_warn_each_with_its_own_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = [str(CONFIGS / "lab/10k.yaml"), str(CONFIGS / "staleness/16x16/async-1.yaml")]

    def stderr(command: str, *arguments: str) -> str:
        return CliRunner().invoke(app, [command, *base, *arguments]).stderr.replace("\n", " ")

    assert "warning" not in stderr("run")  # which ends there: the model is not in this folder
    assert "warning: staleness.mode=natural is asynchronous in name only" in stderr("run", "launch.workers=1")
    assert "warning" not in stderr("submit", "--dry-run", "launch.workers=1")
    assert "come too late" in stderr("submit", "--dry-run", "slurm.workers=64")
    assert "warning" not in stderr("submit", "--dry-run", "slurm.workers=64", "slurm.max_parallel=4")


def test_a_site_with_many_workers_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site file may win over the preset's four workers."""
    monkeypatch.chdir(tmp_path)
    arguments = [str(CONFIGS / "tasks/webshop.yaml"), "--site", str(CONFIGS / "sites/example-gpu.yaml"), "--dry-run"]
    done = CliRunner().invoke(app, ["submit", *arguments])
    assert done.exit_code == 0
    assert "come too late and be discarded" in done.stderr


def test_no_configuration_of_ours_is_warned_about() -> None:
    whole = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("lab/*.yaml"), *CONFIGS.glob("tasks/*_*.yaml")]
    whole += [CONFIGS / f"{name}.yaml" for name in ("tasks/webshop", "tasks/docvqa", "methods/endless-terminals")]
    for path in whole:
        config = load(path).config
        assert (
            worker_count_warnings(config, config.launch.workers)
            == worker_count_warnings(config, config.slurm.workers)
            == []
        ), path
