"""Readers of a damaged run folder, each in a child process with a time limit, and what their answers are worth."""

import contextlib
import json
import logging
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fuzzing.base import Base
from hpc_es.errors import HpcEsError

OUTCOMES = ("correct", "repaired", "refused", "silent", "traceback", "hang", "crash")
"""From best to worst."""
WRONG = OUTCOMES[3:]
_MEMORY = 16 * 2**30

Answer = tuple[tuple[int, ...], str]
"""(digests of the versions that the reader knows of, a digest of everything that it says)."""
Reader = Callable[[Base, Path], Answer]


@dataclass(frozen=True)
class Case:
    """One mutation that has been done, and who is to read what came of it."""

    kind: str
    detail: str
    readers: tuple[Reader, ...]


_expected: dict[str, Answer] = {}
"""By the reader's name."""


def judge(base: Base, case: Case, limit: float) -> tuple[str, list[str]]:
    """(the worst outcome of all readers, a line for each)."""
    worst, lines = 0, []
    for name, outcome, detail in _read(base, case, limit):
        worst = max(worst, OUTCOMES.index(outcome))
        lines.append(f"{name}: {outcome} {detail}")
    return OUTCOMES[worst], lines


def learn(base: Base, *readers: Reader) -> None:
    """What the undamaged folder answers, once."""
    for reader in readers:
        if reader.__name__ not in _expected:
            run = base.copy()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _expected[reader.__name__] = reader(base, run)


def _read(base: Base, case: Case, limit: float) -> Iterator[tuple[str, str, str]]:
    """(reader, outcome, detail) of all readers, run one after the other in one child."""
    run = base.folder / "runs" / "first-release"
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        _be_child(base, case, run, there)
    os.close(there)
    deadline, text = time.monotonic() + limit, b""
    try:
        while time.monotonic() < deadline:
            if not select.select([here], [], [], max(deadline - time.monotonic(), 0))[0]:
                break
            if not (more := os.read(here, 65536)):
                break
            text += more
        timed_out = time.monotonic() >= deadline
    finally:
        os.close(here)
        if timed_out:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in text.splitlines()]
    for name, outcome, detail in lines:
        yield name, outcome, detail
    if len(lines) < len(case.readers):
        name = case.readers[len(lines)].__name__
        yield (name, "hang", f"after {limit:g} s") if timed_out else (name, "crash", f"status {status}")


def _be_child(base: Base, case: Case, run: Path, pipe: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        for reader in case.readers:
            outcome, detail = _outcome(base, reader, run)
            os.write(pipe, json.dumps([reader.__name__, outcome, detail[-2000:]]).encode() + b"\n")
    finally:
        os._exit(0)


def _outcome(base: Base, reader: Reader, run: Path) -> tuple[str, str]:
    said: list[str] = []
    try:
        with _listening(said):
            answer = reader(base, run)
    except HpcEsError as error:
        return "refused", str(error)
    except BaseException:
        return "traceback", traceback.format_exc()
    expected = _expected.get(reader.__name__)
    if expected is None or answer == expected:  # None: whatever it answers is right, as long as it answers
        return "correct", ""
    digests, _ = answer
    if said and digests == expected[0][: len(digests)]:
        return "repaired", said[0]
    return "silent", f"{len(digests)} versions, expected {len(expected[0])}; said: {said[:1]}"


@contextlib.contextmanager
def _listening(said: list[str]) -> Iterator[None]:
    """Collect what is told on the way: warnings of Python, and of the log."""
    handler = _Collect(said)
    logging.getLogger().addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            said += [str(warning.message) for warning in caught]
            logging.getLogger().removeHandler(handler)


class _Collect(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def digest_of(value: Any) -> str:
    return blake2b(repr(value).encode(errors="backslashreplace"), digest_size=8).hexdigest()
