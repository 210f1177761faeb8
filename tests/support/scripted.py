"""Environments and an engine whose behaviour a test sets; named `scripted:Steps` and so on."""

import gc
import threading
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

from hpc_es.engine.base import Completion
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.params import Arena

FAULTS: Counter[str] = Counter()
"""How many more times each kind of environment misbehaves in this process."""


class Steps(Env):
    """Three turns, then a reward equal to the task's number; every answer must fit its prompt."""

    num_tasks = 100
    limit = 3

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def reset(self, task: int) -> Observation:
        self.task, self.turn = task, 0
        return self._ask()

    def _ask(self) -> Observation:
        return Observation((Message("user", f"task {self.task} turn {self.turn}"),))

    def step(self, text: str) -> StepResult:
        assert text == f"task {self.task} turn {self.turn}"
        self.turn += 1
        if self.turn < self.limit:
            return StepResult(self._ask(), 0.0, False, False)
        return StepResult(None, self.reward(), True, False, success=True)

    def reward(self) -> float:
        return float(self.task)


class NanReward(Steps):
    def reward(self) -> float:
        return float("nan")


class Odd(Steps):
    """Breaks the contract in one place: `reset`, `step`, `reward` or `close` gives ODD[place], or calls it."""

    def reset(self, task: int) -> Observation:
        observation = super().reset(task)
        return odd("reset", observation)

    def step(self, text: str) -> StepResult:
        return odd("step", super().step(text))

    def reward(self) -> float:
        return odd("reward", super().reward())

    def close(self) -> None:
        odd("close", None)


ODD: dict[str, object] = {}


def odd(place: str, usual):
    given = ODD.get(place, usual)
    return given() if callable(given) else given


class Raises(Steps):
    """Raises while FAULTS["raises"] lasts."""

    def step(self, text: str) -> StepResult:
        if FAULTS["raises"]:
            FAULTS["raises"] -= 1
            raise ValueError("the tool server is unreachable")
        return super().step(text)


class Instant(Raises):
    """Records the thread of each call."""

    instant = True
    threads: ClassVar[set[str]] = set()

    def reset(self, task: int) -> Observation:
        self.threads.add(threading.current_thread().name)
        return super().reset(task)

    def step(self, text: str) -> StepResult:
        self.threads.add(threading.current_thread().name)
        return super().step(text)


class AlwaysRaises(Steps):
    def reset(self, task: int) -> Observation:
        raise OSError("no such sandbox")


class NeverReturns(Steps):
    def step(self, text: str) -> StepResult:
        time.sleep(3600)
        raise AssertionError("unreachable")


class TooLong(Steps):
    def _ask(self) -> Observation:
        return Observation((Message("user", "x" * (10 if self.turn == 0 else 10_000)),))

    def step(self, text: str) -> StepResult:
        self.turn += 1
        return StepResult(self._ask(), 0.25, False, False)


class LongChoices(Steps):
    """An environment whose choices do not fit into the context from the second turn on."""

    def _ask(self) -> Observation:
        return Observation((Message("user", "x" * (10 if self.turn == 0 else 480)),), choices=("go", "y" * 20))

    def step(self, text: str) -> StepResult:
        self.turn += 1
        return StepResult(self._ask(), 0.25, False, False)


class Letters:
    """A tokenizer of one token per character."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


class Echo:
    """An engine that answers with its prompt, and records its maximum number of concurrent requests."""

    tokenizer = Letters()

    def __init__(self) -> None:
        self.in_flight, self.most = 0, 0
        self.seeds: list[int] = []

    async def generate(self, prompt, sampling, *, seed, choices=None) -> Completion:
        import asyncio

        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.seeds.append(seed)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return Completion("".join(map(chr, prompt)), len(prompt), 1, truncated=False)


class Fickle(Env):
    """One turn, for real models: whatever they answer, the reward is the answer's length, or a fault."""

    num_tasks = 50

    def __init__(self, split: str = "train", fault: str = "none") -> None:
        self.fault = fault

    def reset(self, task: int) -> Observation:
        return Observation((Message("user", f"Say {task}."),))

    def step(self, text: str) -> StepResult:
        if self.fault == "raises":
            raise ValueError("the tool server is unreachable")
        if self.fault == "never returns":
            time.sleep(3600)
        reward = float("nan") if self.fault == "nan" else float(sum(text.encode()))
        return StepResult(None, reward, True, False)


class Corrupts(Fickle):
    """Changes one value of the arena in its own process, as bad memory would: once, where theta_1 is first met."""

    def __init__(self, split: str = "train", marker: str = "") -> None:
        super().__init__(split)
        self.marker = Path(marker)

    def step(self, text: str) -> StepResult:
        for arena in [thing for thing in gc.get_objects() if isinstance(thing, Arena)]:
            if arena.version == 1 and not self.marker.exists():
                self.marker.touch()
                arena.tensor(arena.names[0])[0] += 1
        return super().step(text)
