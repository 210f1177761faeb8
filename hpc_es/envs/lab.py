"""The ES lab's task: the prompt is a word of `length` letters, and one of `actions` digits is the right answer.

The right digit is the one that a hidden teacher scores highest; its score is a sum of one number per (position, letter,
digit). As in WebShop, the reward is graded (the share of the other digits that the teacher scores lower) and success is
exact. Task, teacher and reward are pure functions of the options. Invariant: a word belongs to one split, whatever the
seed of the tasks, so held-out words never appear in training.
"""

import math
import random
import time
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, validate_call

from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import ConfigError, EnvError
from hpc_es.noise import Array
from hpc_es.seeds import derive

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_ACTIONS = 9
EVAL_SHARE = 4
"""One word in EVAL_SHARE is held out."""
MAX_DRAWS = 1000
_clock = random.Random()
"""Seeded by the operating system in every process, so that an episode's duration is independent of its task."""


class Duration(BaseModel):
    """A lognormal duration in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0, le=3600)
    sigma: float = Field(0.8, ge=0, le=3)
    """Standard deviation of the logarithm; with 0 every episode takes the median."""

    def draw(self) -> float:
        return _clock.lognormvariate(math.log(self.median), self.sigma)


class Lab(Env):
    @validate_call
    def __init__(
        self,
        *,
        length: Annotated[int, Field(ge=1, le=8)] = 6,
        letters: Annotated[int, Field(ge=2, le=len(LETTERS))] = 4,
        actions: Annotated[int, Field(ge=2, le=MAX_ACTIONS)] = 4,
        graded: bool = True,
        split: Literal["train", "eval"] = "train",
        num_tasks: Annotated[int, Field(ge=1)] = 4096,
        seed: Annotated[int, Field(ge=0)] = 0,
        seconds: Duration | None = None,
    ) -> None:
        """The task is generated from these options.

        length: letters per word.
        letters: size of the alphabet.
        actions: number of digits to choose from.
        graded: whether the reward is graded; if not, it is 1 for success, else 0.
        num_tasks: number of tasks; words may repeat.
        seed: seed of the teacher and the tasks.
        seconds: random time that each episode sleeps before its reward, e.g. {kind: lognormal, median: 0.05, sigma:
            0.8}. It makes workers as uneven as real agents and does not change any reward.
        """
        if letters**length < 8 * EVAL_SHARE:
            raise ConfigError(
                f"options length={length} and letters={letters} give only {letters**length} words; raise one of them"
            )
        self.num_tasks = num_tasks
        self.instant = seconds is None
        self._length, self._letters, self._actions = length, letters, actions
        self._graded, self._split, self._seed, self._seconds = graded, split, seed, seconds
        self._word: str | None = None

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        self._word = word(self._seed, self._split, task, self._length, self._letters)
        choices = tuple(str(action) for action in range(1, self._actions + 1))
        return Observation((Message("user", self._word),), choices)

    def step(self, text: str) -> StepResult:
        if self._word is None:
            raise EnvError("no episode is running; call reset first")
        shown, self._word = self._word, None
        if self._seconds is not None:
            time.sleep(self._seconds.draw())
        scores = teacher(self._seed, self._length, self._letters, self._actions)
        score = scores[range(self._length), [LETTERS.index(letter) for letter in shown]].sum(axis=0)
        answered = text.strip()
        if not (len(answered) == 1 and answered in "123456789"[: self._actions]):
            return StepResult(None, 0.0, terminated=True, truncated=False, invalid=True)
        below = int((score < score[int(answered) - 1]).sum())
        success = below == self._actions - 1
        reward = below / (self._actions - 1) if self._graded else float(success)
        return StepResult(None, reward, terminated=True, truncated=False, success=success)


@lru_cache(maxsize=8)
def teacher(seed: int, length: int, letters: int, actions: int) -> Array:
    """The teacher's scores [length, letters, actions], centred over the letters so that all actions are right about
    equally often."""
    scores = np.random.default_rng(derive(seed, "teacher")).standard_normal((length, letters, actions))
    return scores - scores.mean(axis=1, keepdims=True)


@lru_cache(maxsize=2**14)
def word(seed: int, split: str, task: int, length: int, letters: int) -> str:
    """The word of a task. Errors: EnvError if no word of the split is found."""
    for attempt in range(MAX_DRAWS):
        drawn = derive(seed, "word", split, task, attempt)
        found = "".join(LETTERS[drawn // letters**place % letters] for place in range(length))
        if (derive(0, "split", found) % EVAL_SHARE == 0) == (split == "eval"):
            return found
    raise EnvError(f"no word of {length} letters out of {letters} belongs to the split {split}; make words longer")
