"""A parent process, the witness, that reports how a process which runs environments ended.

An environment runs inside the worker and can end it with any exit code: after os._exit(0) the worker would seem to have
finished. So a forked child does the work, and its parent, the witness, runs no environment and imports nothing heavy.
Invariants: if the child decided to end (`Calls.decide_to_end`), the witness ends with the same code, otherwise with one
that means failure; the child never outlives the witness; signals that are sent to the witness reach the child.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpc_es.calls import CALLS, EXIT_DIED, cause, during
from hpc_es.errors import TransportError
from hpc_es.paths import RunPaths
from hpc_es.worker.seat import note

_POLL_S = 0.5
_PAUSE_S = 5.0
"""A longer time between two checks means that the machine or this process was suspended."""
_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_FROM_TERMINAL = 128
"""si_code of a signal from the kernel, such as Ctrl-C: the child has received it too."""
_GOODBYE_S = 5.0
EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1


def stand_witness(tell: Callable[[str], int]) -> None:
    """Fork. Returns only in the child, which does the work; the parent stays here and ends after the child.

    If the child did not decide to end, the parent calls `tell` with what happened; `tell` returns the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # otherwise both processes write what is still in the buffers
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child:
        _watch(child, tell)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_DIED)  # the witness ended before it could be followed
    CALLS.is_watched = True
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def died_as_command(what: str) -> int:
    """`tell` for a command that runs environments in a terminal."""
    print(f"error: the process of this command {what}", file=sys.stderr)
    return EXIT_FAILED


def died_as_worker(paths: RunPaths, seat: str) -> Callable[[str], int]:
    """`tell` for a worker: report to its log, RUN/seats and the head, which need not wait for a timeout then."""

    def tell(what: str) -> int:
        print(f"error: worker {seat} {what}", file=sys.stderr, flush=True)
        now = note(paths, seat, "died", what)
        if now is not None and now.worker:
            from hpc_es.transport.messages import Goodbye  # imported late: most commands need no ZeroMQ
            from hpc_es.transport.observer import tell as tell_head

            with contextlib.suppress(TransportError):  # a head that is gone needs no goodbye
                tell_head(paths, Goodbye(now.worker, what, died=True), _GOODBYE_S, sender=now.worker)
        return EXIT_DIED

    return tell


def _watch(child: int, tell: Callable[[str], int]) -> NoReturn:
    stood_still, overdue, looked = 0.0, None, time.monotonic()
    while (ended := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        received = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, _POLL_S)
        if received is not None and received.si_signo in _PASSED_ON and received.si_code != _FROM_TERMINAL:
            os.kill(child, received.si_signo)
        now = time.monotonic()
        if now - looked > _PAUSE_S or _is_stopped(child):
            stood_still += now - looked
        looked = now
        if overdue is None and (overdue := CALLS.overdue(now - stood_still)) is not None:
            os.kill(child, signal.SIGKILL)
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    if CALLS.wanted_code is not None:
        os._exit(code if code > 0 else CALLS.wanted_code)  # 120: what was printed could not be written
    if -code in _PASSED_ON:  # somebody asked it to end, so no environment is at fault
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    code = tell(_what_happened(code, overdue))
    sys.stderr.flush()
    os._exit(code)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _what_happened(code: int, overdue: str | None) -> str:
    if overdue is not None:
        return f"was ended: {overdue} did not return within its time limit, and blocked the whole process"
    if CALLS.last_words:
        return f"had to end: {CALLS.last_words}"
    return cause(code) + during(CALLS.running())
