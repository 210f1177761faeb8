"""Guess a number: a task of your own in one file. Each turn the model guesses and is told to go higher or lower.

Try it from the directory that holds examples/:

    hpc-es env check examples.guess:Guess
    hpc-es env play examples.guess:Guess highest=20
    hpc-es run examples/guess.yaml
"""

import random
import re
from typing import Literal

from hpc_es.envs import Env, EnvError, Message, Observation, StepResult


class Guess(Env):
    """Find a number in as few guesses as bisection needs."""

    history = None  # each prompt has the whole conversation so far; 0: only the current observation
    strip_thinking = True  # text in <think>...</think> is removed before step() and from later prompts
    instant = True  # steps take microseconds: no thread, no time limit

    def __init__(self, *, highest: int = 100, split: Literal["train", "eval"] = "train", num_tasks: int = 256) -> None:
        self.highest, self.split, self.num_tasks = highest, split, num_tasks
        self.guesses_left = 0

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        self.number = random.Random(f"{self.split} {task}").randint(1, self.highest)  # the same in every process
        self.guesses_left = self.highest.bit_length()
        rules = f"I am thinking of a number from 1 to {self.highest}. You have {self.guesses_left} guesses."
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
        if not self.guesses_left:  # a limit of the task is an outcome; coming close earns partial credit
            close = 0.0 if guess is None else max(0.0, 1 - abs(guess - self.number) / self.highest)
            return StepResult(None, reward=0.5 * close, terminated=False, truncated=True, invalid=guess is None)
        hint = "That is not a number." if guess is None else "Higher." if guess < self.number else "Lower."
        shown = Observation((Message("user", hint),))
        return StepResult(shown, reward=0.0, terminated=False, truncated=False, invalid=guess is None)
