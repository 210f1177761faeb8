"""examples/guess.py, the task of docs/tasks.md: short, keeps the contract, and can be trained on as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from hpc_es import envs
from hpc_es.config import load
from hpc_es.envs.check import check_env
from hpc_es.params.lab_model import write_lab_model

NAME = "examples.guess:Guess"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(ROOT)


def test_the_example_has_less_than_60_lines_and_keeps_the_contract() -> None:
    assert len((ROOT / "examples" / "guess.py").read_text().splitlines()) < 60
    check_env(lambda: envs.make(NAME, highest=20))


def test_the_readme_shows_the_example_as_it_is() -> None:
    assert (ROOT / "examples" / "guess.py").read_text() in (ROOT / "docs" / "tasks.md").read_text()


def test_halving_always_finds_the_number_and_guessing_the_same_does_not() -> None:
    env = envs.make(NAME, highest=20, num_tasks=30)
    for task in range(30):
        env.reset(task)
        low, high, result = 1, 20, None
        while result is None or not result.done:
            middle = (low + high) // 2
            result = env.step(f"I say {middle}.")
            if result.observation is not None:
                higher = result.observation.messages[0].content == "Higher."
                low, high = (middle + 1, high) if higher else (low, middle - 1)
        assert (result.success, result.reward) == (True, 1.0)
    env.reset(0)
    last = [env.step("no idea") for _ in range(5)][-1]
    assert (last.truncated, last.reward, last.invalid) == (True, 0.0, True)


def test_its_configuration_loads_and_makes_it_with_held_out_tasks() -> None:
    config = load(ROOT / "examples" / "guess.yaml").config
    train, held_out = (envs.make_for(config, kind) for kind in ("train", "eval"))
    numbers = [[env.reset(task) and env.number for task in range(20)] for env in (train, held_out)]
    assert numbers[0] != numbers[1]


@pytest.mark.slow
def test_a_run_on_it_goes_through_from_the_working_directory(tmp_path: Path) -> None:
    """The laboratory's model guesses at random; the installed command finds the file by itself."""
    model = write_lab_model(tmp_path / "model", 16, seed=2)
    settings = [f"run.dir={tmp_path}", "run.num_updates=2", f"model.path={model}", "engine.kind=lab", "task.chat=false"]
    sizes = ["es.population=4", "es.tasks_per_member=4", "eval.num_tasks=4", "sampling.max_tokens=2"]
    command = Path(sys.executable).with_name("hpc-es")
    done = subprocess.run(
        [command, "run", "examples/guess.yaml", *settings, *sizes], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    shown = subprocess.run([command, "episodes", tmp_path / "guess"], capture_output=True, text=True, timeout=60)
    assert "kept episodes\nread one with" in shown.stdout
