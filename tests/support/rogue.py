"""Environments that misbehave: in one of its calls, `rogue:Sudoku` does what the variable ROGUE says.

ROGUE=CALL:DEED with a deed of DEEDS. With ROGUE_ONCE=FILE it is done once: the file says that it has been.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_es.envs import sudoku
from hpc_es.envs.base import Observation, StepResult

ROGUE, ROGUE_ONCE = "ROGUE", "ROGUE_ONCE"


def _spin() -> None:
    while True:
        pass


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(3600)  # C code that does not let other threads run


def _fork() -> None:
    os.fork()  # both processes continue


def _raise(error: BaseException) -> Callable[[], None]:
    def deed() -> None:
        raise error

    return deed


DEEDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(0),
    "exit2": lambda: os._exit(2),
    "sys.exit": lambda: sys.exit(0),
    "interrupt": _raise(KeyboardInterrupt()),
    "raise": _raise(OSError("busy")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "files": lambda: os.closerange(3, 4096),
    "signals": lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)],
    "chdir": lambda: os.chdir("/"),
    "fork": _fork,
    "sleep": lambda: time.sleep(3600),
    "spin": _spin,
    "hold": _hold_the_interpreter,
}


def misbehave(call: str) -> None:
    wanted, _, deed = os.environ.get(ROGUE, "").partition(":")
    if wanted != call:
        return
    if once := os.environ.get(ROGUE_ONCE):
        try:
            Path(once).touch(exist_ok=False)
        except FileExistsError:
            return
    DEEDS[deed]()


class Sudoku(sudoku.Sudoku):
    instant = False

    def __init__(self, **options: Any) -> None:
        misbehave("constructor")
        super().__init__(**options)

    def reset(self, task: int) -> Observation:
        misbehave("reset")
        return super().reset(task)

    def step(self, text: str) -> StepResult:
        misbehave("step")
        return super().step(text)

    def close(self) -> None:
        misbehave("close")
        super().close()


class Instant(Sudoku):
    instant = True
