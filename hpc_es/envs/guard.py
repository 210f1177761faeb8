"""What an environment may not do to the process that plays it, looked at after its calls.

Invariant: harm that can be undone is undone and told; otherwise the process ends, with the call as its last words
(hpc_es/calls.py).
"""

import os
import signal
import threading
from functools import cache
from typing import Any

from hpc_es.calls import CALLS

_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals that a worker listens to."""


class Guard:
    """Of one process."""

    def __init__(self) -> None:
        self.is_copy = False
        """This process is one that the environment forked."""
        os.register_at_fork(after_in_child=self._note_fork)
        self._file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Stands for all files and sockets of this process: closed along with them."""
        self._identity = _identity(self._file)
        self._handlers: list[Any] | None = None

    def begin(self) -> None:
        """Before an environment is called: the signal handlers are as they should be."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = [signal.getsignal(number) for number in _OURS]

    def end_copy(self) -> None:
        """After every call: a copy of this process that the environment forked must not play on as a second worker."""
        if self.is_copy:
            os._exit(0)

    def check(self, what: str) -> str | None:
        """After a call. What it did and was undone, in words. Signals are looked at in the main thread, which alone can
        change their handlers."""
        self.end_copy()
        if _identity(self._file) != self._identity:
            CALLS.die(f"{what} closed files and sockets of the process that plays it; an environment may close its own")
        if self._handlers is None or threading.current_thread() is not threading.main_thread():
            return None
        replaced = []
        for number, handler in zip(_OURS, self._handlers, strict=True):
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                replaced.append(number.name)
        if not replaced:
            return None
        return f"{what} replaced the handler of {' and '.join(replaced)}, which the process that plays it needs"

    def _note_fork(self) -> None:
        self.is_copy = True


@cache
def process_guard() -> Guard:
    """The one of this process, from the first call on."""
    return Guard()


def _identity(file: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino
