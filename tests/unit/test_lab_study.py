"""tools/lab/staleness_study.py: which runs it makes, what it keeps, and what it writes."""

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from repository import ROOT

from hpc_es import methods
from hpc_es.config import load
from hpc_es.config.schema import Config

TOOL = ROOT / "tools" / "lab" / "staleness_study.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("staleness_study", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["staleness_study"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def config_of(command: list[str]) -> Config:
    config, *overrides = command[command.index("run") + 1 :]
    return load(Path(config), overrides).config


def test_every_condition_comes_once_per_seed_and_seeds_one_after_the_other(study: ModuleType, tmp_path: Path) -> None:
    jobs = list(study.jobs(tmp_path, 5))
    assert set(Counter(job.condition for job in jobs).values()) == {5}
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert len({job.name for job in jobs}) == len(jobs) == 5 * 13
    presets = {path.stem for path in (study.CONFIGS / "staleness" / "16x16").glob("*.yaml")}
    assert set(study.CONDITIONS) == presets


def test_the_conditions_differ_in_their_schedules_and_in_nothing_else(study: ModuleType, tmp_path: Path) -> None:
    others, schedules = set(), set()
    for job in study.jobs(tmp_path, 1):
        config = config_of(job.command([]))
        schedules.add((str(methods.make(config).schedule()), config.es.control))
        plain = config.model_copy(update={"es": config.es.model_copy(update={"control": "none"})})
        others.add(plain.model_dump_json(exclude={"staleness": True, "launch": True, "slurm": True, "run": {"name"}}))
    assert len(schedules) == 13
    assert len(others) == 1


def test_a_finished_run_is_kept_and_a_failed_one_ends_the_study(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no such model")

    monkeypatch.setattr(study.subprocess, "run", run)
    job = study.Job("sync", 0, tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        study.perform(job, ["run.num_updates=3"])
    assert config_of(asked[0]).run.num_updates == 3
    (tmp_path / job.name).mkdir()
    monkeypatch.setattr("hpc_es.launch.prepare.is_finished", lambda paths: paths.root == tmp_path / job.name)
    study.perform(job, [])
    assert len(asked) == 1


def test_steps_of_the_staircase_are_averaged_over_seeds(study: ModuleType) -> None:
    rows = [(33, 32, 0.5, 0.7, 0.52), (33, 32, 0.6, 0.8, 0.58), (65, 64, 0.5, 0.7, 0.5)]
    text = study.stairs_markdown(pd.DataFrame(rows, columns=["update", "lag", "start", "before", "at"]))
    assert "| 33 | 32 | 0.550 ± 0.071 | 0.750 ± 0.071 | 0.550 ± 0.042 |" in text.splitlines()
