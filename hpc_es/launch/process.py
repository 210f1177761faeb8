"""Child processes that end with their parent and leave nothing behind.

Invariants: every child leads a session of its own, so a Ctrl-C at the terminal reaches the launcher only, and the
child's descendants (vLLM starts some) are found by their session when it ends, however it ends. What left the session
is adopted by the launcher (a subreaper) and killed with the rest. Should the launcher itself be killed, each child
sees it and kills its own process group. Linux only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpc_es.errors import LaunchError
from hpc_es.quoting import quote

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 10.0
MAX_LINE = 400
"""Characters of a log's line that an error message quotes: fifteen of them leave room in it."""


def follow_parent(pid: int) -> None:
    """Called by a child at its start: kill its process group as soon as the process `pid`, its parent, is gone.

    Errors: LaunchError when it is gone already.
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        parent = -1
    # The descriptor was opened first: if `pid` is still the parent now, it is the parent that was opened.
    if parent < 0 or os.getppid() != pid:
        raise LaunchError(f"the launcher (process {pid}) has ended; its processes end with it")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # a child that is stopped must wake up to see it
    threading.Thread(target=_kill_own_group_after, args=(parent,), name="follow-parent", daemon=True).start()


def _kill_own_group_after(parent: int) -> None:
    # Signals are for the main thread, which may have blocked them to wait for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    select.select([parent], [], [])  # a pidfd becomes readable when its process ends
    os.killpg(0, signal.SIGKILL)


@dataclass(frozen=True)
class _Process:
    """One line of the process table."""

    pid: int
    state: str
    parent: int
    session: int


def _processes() -> Iterator[_Process]:
    for folder in os.listdir("/proc"):
        if folder.isdigit() and (process := _process(int(folder))):
            yield process


def _process(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # ended meanwhile
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]  # the name before may hold anything
    return _Process(pid, state, int(parent), int(session))


class Child:
    """One process that leads its own session and appends to its own log."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        try:
            with open(log, "ab") as output:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started with its log in {log}: {error}") from error
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it), after which none of its session lives; None: it runs."""
        if self._popen.returncode is None and self._has_ended():
            # Its id cannot be given to another process before it is reaped, so the session is still its own.
            _end_all(lambda process: process.session == self.pid and process.pid != self.pid)
            self._popen.wait()
        return self._popen.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and its session now. Returns when it is gone."""
        while self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.01)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Family:
    """The children of one launch. Leaving the context ends whatever is left of them and their descendants."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._strangers: set[int] = set()

    def __enter__(self) -> "Family":
        self._strangers = {process.pid for process in _processes() if process.parent == os.getpid()}
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        return self

    def start(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> Child:
        """Start a child. `command` should have it call `follow_parent` with this process's id."""
        child = Child(command, log=log, environment=environment or {})
        self.children.append(child)
        return child

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.kill()
        _end_all(lambda process: process.parent == os.getpid() and process.pid not in self._strangers)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end_all(chosen: Callable[[_Process], bool]) -> None:
    """Kill every chosen process until none is left; reap those that are ours. Errors: LaunchError when one stays."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while members := [process for process in _processes() if chosen(process)]:
        living = [process.pid for process in members if process.state not in "ZX"]
        for process in members:
            _kill(process, chosen)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        if not living:
            return
        if time.monotonic() > deadline:
            raise LaunchError(f"processes {living} do not end after SIGKILL; end them by hand")
        time.sleep(0.01)


def _kill(process: _Process, chosen: Callable[[_Process], bool]) -> None:
    """SIGKILL, unless the id has passed to another process since the table was read."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        now = _process(process.pid)
        if now and chosen(now):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, for an error message: a limited number of lines, each of limited length."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 65_536))
            text = file.read(65_536).decode(errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join(f"  {quote(line, MAX_LINE)}" for line in text.splitlines()[-count:])


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise LaunchError(f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")
