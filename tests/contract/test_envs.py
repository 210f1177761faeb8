"""Making environments by name, and the checker that every environment goes through."""

import dataclasses
import functools
import shutil
import sys

import numpy as np
import pytest

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.envs import make_for
from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.envs.check import check_env
from hpc_es.errors import ConfigError, EnvError


class Unmakeable(Env):
    """An environment whose data is missing."""

    def __init__(self) -> None:
        raise FileNotFoundError("puzzles.jsonl")

    def reset(self, task: int) -> Observation:
        raise EnvError("never made")

    def step(self, text: str) -> StepResult:
        raise EnvError("never made")


class Countdown(Env):
    """A correct environment of three turns, which the broken ones below differ from in one thing each."""

    def __init__(self, *, turns: int = 3) -> None:
        self.num_tasks = 2
        self.turns = turns
        self.left = 0

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"no task {task}")
        self.left = self.turns
        return self.observation()

    def step(self, text: str) -> StepResult:
        if not self.left:
            raise EnvError("no episode")
        self.left -= 1
        done = not self.left
        return StepResult(None if done else self.observation(), 1.0, terminated=done, truncated=False)

    def observation(self) -> Observation:
        return Observation((Message("user", f"{self.left} left"),))


class StepsAfterTheEnd(Countdown):
    def step(self, text: str) -> StepResult:
        self.left = self.left or 1
        return super().step(text)


class AcceptsAnyTask(Countdown):
    def reset(self, task: int) -> Observation:
        return super().reset(task % 2)


class RaisesOnUnicode(Countdown):
    def step(self, text: str) -> StepResult:
        text.encode("ascii")
        return super().step(text)


class NeverEnds(Countdown):
    def step(self, text: str) -> StepResult:
        super().step(text)
        self.left = self.turns
        return StepResult(self.observation(), 0.0, False, False)


class EndsTwice(Countdown):
    def step(self, text: str) -> StepResult:
        result = super().step(text)
        return dataclasses.replace(result, truncated=result.terminated)


class RewardsNaN(Countdown):
    def step(self, text: str) -> StepResult:
        return dataclasses.replace(super().step(text), reward=float("nan"))


class ForgetsTheObservation(Countdown):
    def step(self, text: str) -> StepResult:
        return dataclasses.replace(super().step(text), observation=None)


class DiffersEachTime(Countdown):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        DiffersEachTime.made += 1
        self.me = DiffersEachTime.made

    def observation(self) -> Observation:
        return Observation((Message("user", f"{self.me}"),))


class SucceedsTooEarly(Countdown):
    def step(self, text: str) -> StepResult:
        return dataclasses.replace(super().step(text), success=True)


class HasNoTasks(Countdown):
    def __init__(self) -> None:
        super().__init__()
        self.num_tasks = 0


class HasMoreTasksThanNumbers(Countdown):
    def __init__(self) -> None:
        super().__init__()
        self.num_tasks = 2**80


class SaysNothingOfItsTasks(Countdown):
    def facts(self, task: int) -> TaskFacts:
        return None  # type: ignore[return-value]


class RewardsTooMuch(Countdown):
    def step(self, text: str) -> StepResult:
        return dataclasses.replace(super().step(text), reward=1e200)


class RewardsInNumpy(Countdown):
    def step(self, text: str) -> StepResult:
        return dataclasses.replace(super().step(text), reward=np.float32(0.5))


class Unspeakable(Exception):
    def __str__(self) -> str:
        sys.exit(0)

    __repr__ = __str__


class RaisesTheUnspeakable(Countdown):
    def observation(self) -> Observation:
        raise Unspeakable


class RepeatsAChoice(Countdown):
    def observation(self) -> Observation:
        return Observation((Message("user", "?"),), choices=("1", "1"))


class RemembersNonsense(Countdown):
    history = -1


class TakesAnything(Countdown):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options


class NeedsAnOption(Countdown):
    def __init__(self, *, corpus: str) -> None:
        super().__init__()


def test_a_correct_environment_passes_the_check() -> None:
    assert check_env(Countdown) == Countdown().num_tasks
    check_env(RewardsInNumpy)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (StepsAfterTheEnd, "step before the first reset"),
        (AcceptsAnyTask, "reset\\(-1\\)"),
        (RaisesOnUnicode, "an answer is never an error"),
        (NeverEnds, "still running"),
        (EndsTwice, "both terminated and truncated"),
        (RewardsNaN, "finite"),
        (ForgetsTheObservation, "without an observation"),
        (DiffersEachTime, "with the same options"),
        (SucceedsTooEarly, "success although"),
        (HasNoTasks, "num_tasks is 0; it must be an int from 1 to"),
        (HasMoreTasksThanNumbers, "num_tasks is 12"),
        (SaysNothingOfItsTasks, r"facts\(0\) must return TaskFacts"),
        (RewardsTooMuch, r"the reward is 1e\+200; it must be a finite number, at most 1e\+100"),
        (RaisesTheUnspeakable, r"reset\(0\) raised Unspeakable: \(its text cannot be shown\)"),
        (RepeatsAChoice, "repeats an answer"),
        (RemembersNonsense, "history is -1"),
    ],
)
def test_the_check_names_the_rule_that_an_environment_breaks(broken: type[Env], complaint: str) -> None:
    with pytest.raises(EnvError, match=complaint):
        check_env(broken)


@pytest.mark.parametrize("name", envs.registered())
def test_every_built_in_environment_passes_the_check(name: str) -> None:
    try:
        envs.make(name).close()
    except ConfigError as error:
        if all(map(shutil.which, ("bwrap", "tesseract", "java"))):
            raise
        pytest.skip(f"something is not installed here: {error}")
    check_env(functools.partial(envs.make, name))


def test_an_unknown_name_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sudoku'"):
        envs.make("sudoko")


def test_an_environment_of_ones_own_is_made_by_module_and_class() -> None:
    env = envs.make(f"{__name__}:Countdown", turns=1)
    env.reset(0)
    assert env.step("").terminated


@pytest.mark.parametrize(
    "name", [f"{__name__}:Missing", "no_such_package.module:Env", f"{__name__}:EnvError", ":", "a:"]
)
def test_a_class_that_cannot_be_used_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="environment"):
        envs.make(name)


def test_an_unknown_option_lists_the_valid_ones_and_suggests_one() -> None:
    with pytest.raises(ConfigError, match=r"no option 'blank', did you mean 'blanks'\?; valid: size, blanks, split"):
        envs.make("sudoku", blank=5)


def test_a_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match="needs the option 'corpus'"):
        envs.make(f"{__name__}:NeedsAnOption")


def test_options_pass_through_to_an_environment_that_takes_any() -> None:
    env = envs.make(f"{__name__}:TakesAnything", depth=3)
    assert isinstance(env, TakesAnything)
    assert env.options == {"depth": 3}


@pytest.mark.parametrize(
    "options", [{"size": 5}, {"blanks": 0}, {"split": "test"}, {"action": "press"}, {"num_tasks": "many"}, {"seed": -1}]
)
def test_a_value_that_is_not_allowed_names_its_option(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"environment sudoku: option {name}="):
        envs.make("sudoku", **options)


@pytest.mark.parametrize("given", [{}, {"seed": 3}])
def test_a_run_evaluates_on_held_out_tasks_whatever_options_it_gives(given):
    config = Config.model_validate(
        {
            "run": {"name": "splits", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": "sudoku", "options": {"size": 4}, "train": given},
            "eval": {"options": given},
        }
    )
    train, held_out, centre = (make_for(config, kind) for kind in ("train", "eval", "centre"))
    seen = {train.reset(task).messages for task in range(train.num_tasks)}
    assert seen == {centre.reset(task).messages for task in range(centre.num_tasks)}
    assert not seen & {held_out.reset(task).messages for task in range(held_out.num_tasks)}


def test_an_environment_that_cannot_be_made_or_imported_says_why(tmp_path, monkeypatch):
    with pytest.raises(EnvError, match=r"cannot be created: FileNotFoundError: puzzles\.jsonl"):
        envs.make(f"{__name__}:Unmakeable")
    (tmp_path / "broken_env.py").write_text("x = 1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        envs.make("broken_env:Env")
