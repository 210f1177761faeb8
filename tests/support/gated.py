"""Sudoku that waits while a file exists, so that a test controls how long evaluations take. Results are unchanged."""

import os
import time
from pathlib import Path

from hpc_es.envs import sudoku
from hpc_es.envs.base import Observation

GATE = "TEST_GATE"
"""Environment variable with the name of that file."""
PACE = "TEST_PACE"
"""Environment variable with the minimum duration of an episode in seconds."""


class Sudoku(sudoku.Sudoku):
    instant = False  # a waiting worker must still handle signals

    def reset(self, task: int) -> Observation:
        time.sleep(float(os.environ.get(PACE, 0.0)))
        while (gate := os.environ.get(GATE)) and Path(gate).exists():
            time.sleep(0.05)
        return super().reset(task)
