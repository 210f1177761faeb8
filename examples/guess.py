"""Guess a number: a task of one's own in one file. Each turn the model guesses and hears whether to go higher or lower.

Try it from the folder that holds examples/:

    hpc-es env check examples.guess:Guess
    hpc-es env play examples.guess:Guess highest=20
    hpc-es run examples/guess.yaml
"""

import random
import re
from typing import Literal

from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import EnvError


class Guess(Env):
    """Find a number in as few guesses as halving needs."""

    history = None  # the prompt of a turn is the whole talk so far; 0 would be: only what an observation shows
    strip_thinking = True  # what stands in <think>...</think> is neither read here nor shown again
    instant = True  # no thread and no time limit: a step takes microseconds

    def __init__(self, *, highest: int = 100, split: Literal["train", "eval"] = "train", num_tasks: int = 256) -> None:
        self.highest, self.split, self.num_tasks = highest, split, num_tasks
        self.guesses_left = 0

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        self.number = random.Random(f"{self.split} {task}").randint(1, self.highest)  # the same in every process
        self.guesses_left = self.highest.bit_length()
        rules = f"I think of a number from 1 to {self.highest}. You have {self.guesses_left} guesses."
        return Observation((Message("system", rules), Message("user", "Your first guess? Answer with a number.")))

    def step(self, text: str) -> StepResult:
        if not self.guesses_left:
            raise EnvError("no episode is running; call reset first")
        self.guesses_left -= 1
        found = re.findall(r"\d{1,9}", text)
        guess = int(found[-1]) if found else None
        if guess == self.number:
            self.guesses_left = 0
            return StepResult(None, reward=1.0, terminated=True, truncated=False, success=True)
        if not self.guesses_left:  # a limit of the task: an outcome, with partial credit for coming close
            close = 0.0 if guess is None else max(0.0, 1 - abs(guess - self.number) / self.highest)
            return StepResult(None, reward=0.5 * close, terminated=False, truncated=True, invalid=guess is None)
        hint = "That is not a number." if guess is None else "Higher." if guess < self.number else "Lower."
        shown = Observation((Message("user", hint),))
        return StepResult(shown, reward=0.0, terminated=False, truncated=False, invalid=guess is None)
