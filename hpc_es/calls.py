"""Record which environment calls are running, in memory that a process shares with its parent.

An environment can end the process that runs it: os._exit, a crash in C code, a kill by the kernel when memory is short.
That process can then no longer report what happened, so its parent reads it here (hpc_es/launch/witness.py).
Invariant: recording a call takes a microsecond or two and never fails, since it happens at every step.
"""

import contextlib
import math
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from hpc_es.errors import EngineError

NUM_SLOTS = 512
"""Calls that can be recorded at the same time; further ones are not recorded."""
SLOT_BYTES = 256
MAX_LAST_MESSAGE_BYTES = 1000
"""Maximum length of the last message of a process."""
MAX_NAMED = 5
"""Maximum number of calls in a message."""
EXIT_DIED = 5
"""Exit code of a process that did not end by its own decision."""

_END = struct.Struct("<?i")
"""Whether the process decided to end, and its exit code."""
_LENGTH = struct.Struct("<H")
_SLOT = struct.Struct("<dH")
"""Deadline by the monotonic clock, which is the same in every process of a machine (0: no call), and the length of the
text behind it."""
_DEADLINE = struct.Struct("<d")
_MESSAGE_AT = 16
_SLOTS_AT = 2048
_SIZE = _SLOTS_AT + NUM_SLOTS * SLOT_BYTES


def grace_s(limit_s: float) -> float:
    """Seconds after its time limit during which the process itself should still end a call."""
    return min(limit_s, 30.0) + 1.0


class Calls:
    """The running calls of one process, and how the process ended. Thread-safe."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._free = list(range(NUM_SLOTS))  # append and pop are atomic
        self.is_watched = False
        """Whether a parent reads this when the process ends."""

    # --- used by the process that makes the calls --------------------------------------------------------------

    def begin(self, what: str, limit_s: float = math.inf) -> int:
        """Record a call that may take `limit_s`; pass the returned slot to `end`."""
        try:
            slot = self._free.pop()
        except IndexError:
            return -1
        text = what.encode(errors="replace")[: SLOT_BYTES - _SLOT.size]
        start = _SLOTS_AT + slot * SLOT_BYTES
        self._memory[start + _SLOT.size : start + _SLOT.size + len(text)] = text
        _SLOT.pack_into(self._memory, start, time.monotonic() + limit_s + grace_s(limit_s), len(text))
        return slot

    def end(self, slot: int) -> None:
        """Record that a call has ended."""
        if slot >= 0:
            self._set_deadline(slot, 0.0)
            self._free.append(slot)

    def give_up(self, slot: int) -> None:
        """Record that the process no longer waits for this call; it stays recorded until it returns, if ever."""
        if slot >= 0 and self._deadline(slot):
            self._set_deadline(slot, math.inf)

    @contextlib.contextmanager
    def noted(self, what: str, limit_s: float = math.inf) -> Iterator[None]:
        """Record a call for the duration of the block."""
        slot = self.begin(what, limit_s)
        try:
            yield
        finally:
            self.end(slot)

    def decide_to_end(self, code: int) -> None:
        """Record that this process intends to exit with this code, however it ends from here on."""
        self._memory[: _END.size] = _END.pack(True, code)

    def die(self, words: str) -> NoReturn:
        """Exit at once with a last message for the parent. Errors: EngineError when no parent is watching."""
        if not self.is_watched:
            raise EngineError(words)
        text = words.encode(errors="replace")[:MAX_LAST_MESSAGE_BYTES]
        record = _LENGTH.pack(len(text)) + text
        self._memory[_MESSAGE_AT : _MESSAGE_AT + len(record)] = record
        os._exit(EXIT_DIED)

    def share(self, path: Path) -> None:
        """Record calls in a file from now on, for a parent that did not fork this process."""
        with path.open("r+b") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self.is_watched = True

    # --- used by its parent ------------------------------------------------------------------------------------

    @classmethod
    def of(cls, path: Path) -> "Calls":
        """The calls that another process records in a file."""
        calls = cls()
        with path.open("r+b") as file:
            file.truncate(_SIZE)  # the process may have ended before it did so itself
            calls._memory = mmap.mmap(file.fileno(), _SIZE)
        return calls

    @property
    def wanted_code(self) -> int | None:
        """Exit code with which the process decided to end; None if it did not."""
        decided, code = _END.unpack_from(self._memory)
        return code if decided else None

    @property
    def last_words(self) -> str:
        """Message of a process that called `die`; empty otherwise."""
        (length,) = _LENGTH.unpack_from(self._memory, _MESSAGE_AT)
        return self._text(_MESSAGE_AT + _LENGTH.size, length)

    def running(self) -> list[str]:
        """Descriptions of the calls that have not ended."""
        return [self._text(start + _SLOT.size, length) for start, deadline, length in self._slots() if deadline]

    def overdue(self, now: float) -> str | None:
        """A call that the process itself should have ended by now; None if there is none."""
        late = ((start, length) for start, deadline, length in self._slots() if 0 < deadline < now)
        return next((self._text(start + _SLOT.size, length) for start, length in late), None)

    def _slots(self) -> Iterator[tuple[int, float, int]]:
        for start in range(_SLOTS_AT, _SIZE, SLOT_BYTES):
            yield start, *_SLOT.unpack_from(self._memory, start)

    def _deadline(self, slot: int) -> float:
        deadline, _ = _SLOT.unpack_from(self._memory, _SLOTS_AT + slot * SLOT_BYTES)
        return float(deadline)

    def _set_deadline(self, slot: int, deadline: float) -> None:
        _DEADLINE.pack_into(self._memory, _SLOTS_AT + slot * SLOT_BYTES, deadline)

    def _text(self, start: int, length: int) -> str:
        return bytes(self._memory[start : start + length]).decode(errors="replace")


CALLS = Calls()
"""The calls of this process."""


def cause(code: int) -> str:
    """How a process ended that did not decide to end. A negative code is the signal that killed it."""
    if code >= 0:
        return f"ended with code {code}"
    hint = " (out of memory, or somebody killed it)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def during(calls: list[str]) -> str:
    """The part of a message that names the running calls."""
    if not calls:
        return "; no call of an environment was running"
    more = f" and {len(calls) - MAX_NAMED} more" if len(calls) > MAX_NAMED else ""
    return f" in a call of an environment: {'; '.join(calls[:MAX_NAMED])}{more}"
