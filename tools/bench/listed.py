"""A task of given durations: the k-th episode to begin, over all workers, sleeps for the k-th time of a seeded list.

Two runs with different schedules, which dispatch different members, thus have the same durations in the same order.
"""

import math
import os
import random
import time
from pathlib import Path
from typing import Literal

from hpc_es.envs.base import StepResult
from hpc_es.envs.lab import Lab


class Listed(Lab):
    """The laboratory task with episodes that last as long as listed."""

    def __init__(
        self, *, counter: str, median: float, sigma: float, durations: int, split: Literal["train", "eval"] = "train"
    ) -> None:
        """`counter` is a file of all workers that grows by a byte per episode; `durations` seeds the list."""
        super().__init__(split=split)
        self.instant = False
        self._counter, self._median, self._sigma, self._durations = Path(counter), median, sigma, durations

    def step(self, text: str) -> StepResult:
        time.sleep(duration(self._median, self._sigma, self._durations, _next(self._counter)))
        return super().step(text)


def duration(median: float, sigma: float, seed: int, k: int) -> float:
    """The k-th duration of the list, in lognormal seconds."""
    return random.Random(f"{seed} {k}").lognormvariate(math.log(median), sigma)


def _next(counter: Path) -> int:
    """Count 0, 1, 2, ... over all processes: the kernel appends a byte and reports its position in one step."""
    file = os.open(counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR) - 1
    finally:
        os.close(file)
