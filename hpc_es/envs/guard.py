"""Check after every call that an environment has not damaged the process that runs it.

Invariant: damage that can be repaired is repaired and reported; otherwise the process ends, and its last message names
the call (hpc_es/calls.py).
"""

import os
import signal
import threading
from functools import cache
from typing import Any

from hpc_es.calls import CALLS

_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals that a worker handles."""


class Guard:
    """The checks of one process, before and after each call of an environment."""

    def __init__(self) -> None:
        self.is_copy = False
        """Whether the environment forked this process."""
        os.register_at_fork(after_in_child=self._note_fork)
        self._file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """A file that shows whether the environment has closed all files of this process, and so this one too."""
        self._identity = _identity(self._file)
        self._handlers: list[Any] | None = None

    def begin(self) -> None:
        """Note the signal handlers before an environment is called."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = [signal.getsignal(number) for number in _OURS]

    def end_copy(self) -> None:
        """Exit if this process is a fork made by the environment, which must not continue as a second worker."""
        if self.is_copy:
            os._exit(0)

    def check(self, what: str) -> str | None:
        """Check after a call; return a description of the damage that was repaired, if any.

        Signal handlers are checked in the main thread, since only that thread can change them.
        """
        self.end_copy()
        self.end_if_damaged(what)
        if self._handlers is None or threading.current_thread() is not threading.main_thread():
            return None
        replaced = []
        for number, handler in zip(_OURS, self._handlers, strict=True):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                replaced.append(number.name)
        if not replaced:
            return None
        return f"{what} replaced the handler of {' and '.join(replaced)}, which the process that runs it needs"

    def end_if_damaged(self, what: str = "") -> None:
        """Exit with the name of the call, by default of the running ones, if it has closed this process's files.

        Also called when an error occurs elsewhere: the event loop may fail on a closed file before the call returns.
        """
        if _identity(self._file) != self._identity:
            what = what or "; ".join(CALLS.running()) or "a call of an environment"
            CALLS.die(f"{what} closed files and sockets of the process that runs it; it may close only its own")

    def _note_fork(self) -> None:
        self.is_copy = True


@cache
def process_guard() -> Guard:
    """The guard of this process, created at the first call."""
    return Guard()


def _identity(file: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino
