"""Run head and workers as processes of this machine and look after them until the run is done.

Invariants: a process that dies is started again, at most `launch.max_restarts` times; whatever way this ends, no
process is left. Head and workers speak the real transport over loopback, so this is how a cluster runs, without Slurm.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from hpc_es.calls import EXIT_DIED
from hpc_es.config import Config
from hpc_es.errors import ConfigError, LaunchError, RunFailed, TransportError
from hpc_es.launch import prepare
from hpc_es.launch.process import Child, Family, last_lines
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import Status, StatusRequest
from hpc_es.transport.observer import ask
from hpc_es.worker import seat as seats

EXIT_FINISHED, EXIT_FAILED, EXIT_HOPELESS, EXIT_STOPPED = 0, 1, 2, 3
"""How head and workers end: all is done; failed; failed in a way that a restart repeats; stopped in good order."""

ROLE_COMMAND = (sys.executable, "-m", "hpc_es")

_POLL_S = 0.2
_STATUS_EVERY_S = 1.0
_STATUS_TIMEOUT_S = 0.5
_RESTART_DELAY_S = 1.0
_LEAVING_S = 2.0
_FULL_BYTES = 2**16
"""A disk with less room than this is full: a record or a line of a log may not fit."""


@dataclass(frozen=True)
class Outcome:
    """How a local run ended. It stands for its run folder wherever a path is expected."""

    paths: RunPaths
    finished: bool
    """All updates and evaluations are done."""
    reason: str
    """finished, already finished, or what stopped it."""

    def __fspath__(self) -> str:
        return str(self.paths.root)


def run_local(
    config: Config,
    *,
    on_status: Callable[[Status], None] = lambda status: None,
    on_event: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Start the run, or resume it, and return when it is finished or was stopped (SIGINT, SIGTERM, SIGHUP).

    Waits for head and workers; `on_status` is called about once a second while the head answers. Signals are only
    caught in the main thread. Errors: ConfigError, ModelError, EnvError before anything starts; LaunchError, RunFailed,
    or ConfigError for a mistake that only the head could find, with the end of the log of the process that failed.
    """
    with prepare.launcher_lock(config):
        paths, changed = prepare.write_folder(config)
        if prepare.is_finished(paths):
            from hpc_es.store.hdf5 import rebuild_if_damaged  # h5py, which nothing else here needs

            rebuild_if_damaged(paths.root, locking=config.store.hdf5_locking, warn=on_event)
            return Outcome(paths, True, "already finished")
        prepare.check(config)
        _refuse_head_in_slurm(paths)
        for difference in changed:
            on_event(f"changed since the run began: {difference}")
        with Family() as family, _stop_signals() as stop:
            return _Supervisor(config, paths, family, stop, on_status, on_event).run()


def _refuse_head_in_slurm(paths: RunPaths) -> None:
    """Errors: LaunchError when the run's head is a Slurm job that has not ended. Where Slurm is out of sight, as with
    a folder that was copied to a laptop, two heads would still exclude each other by the journal."""
    if paths.slurm.is_dir() and shutil.which("squeue"):
        from hpc_es.launch.slurm import refuse_second_head  # submitit, which only clusters need

        refuse_second_head(paths)


class _Role:
    """The head or one worker, over all its starts. `seat`: the worker's."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], seat: str = "") -> None:
        self.name, self.arguments, self.environment, self.seat = name, arguments, environment, seat
        self.restarts = 0
        self.child: Child | None = None
        self.ended_at: float | None = None
        """Monotonic time at which it was seen to have ended."""
        self.has_joined = False

    def poll(self) -> int | None:
        return self.child.poll() if self.child else None

    def terminate(self) -> None:
        if self.child:
            self.child.terminate()

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.poll() is None


class _Supervisor:
    """One launch: starts, restarts and ends the processes."""

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        family: Family,
        stop: "_Stop",
        on_status: Callable[[Status], None],
        on_event: Callable[[str], None],
    ) -> None:
        self.config, self.paths, self.family, self.stop = config, paths, family, stop
        self.on_status, self.on_event = on_status, on_event
        self.head = _Role("head", ["head", str(paths.root), "--local"], {})
        self.workers = [
            _Role(f"worker-{seat}", ["worker", str(paths.root), "--seat", seat], _devices(config, i), seat)
            for i, seat in enumerate(f"local-{i}" for i in range(config.launch.workers))
        ]

    def run(self) -> Outcome:
        try:
            return self._look_after()
        except LaunchError:
            self._stop_in_order()
            raise

    def _look_after(self) -> Outcome:
        next_status = 0.0
        for role in self.workers:
            self.paths.seat(role.seat).unlink(missing_ok=True)  # of an earlier launch
        for role in (self.head, *self.workers):
            self._start(role)
        while not self.stop.signal and self.head.poll() not in (EXIT_FINISHED, EXIT_STOPPED):
            for role in (self.head, *self.workers):
                self._consider(role)
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + _STATUS_EVERY_S
                self._ask_status()
            time.sleep(_POLL_S)
        if self.head.running:
            self._stop_in_order()
        else:
            self._wind_down(time.monotonic() + self.config.launch.stop_timeout, self.stop.count)
        if self.head.poll() == EXIT_FINISHED:
            return Outcome(self.paths, True, "finished")
        return Outcome(
            self.paths, False, f"stopped by {self.stop.signal}" if self.stop.signal else "the head was stopped"
        )

    def _start(self, role: _Role) -> None:
        command = [*ROLE_COMMAND, *role.arguments, "--parent", str(os.getpid())]
        role.child = self.family.start(command, log=self.paths.log(role.name), environment=role.environment)
        role.ended_at = None

    def _consider(self, role: _Role) -> None:
        """Start a process that has died again, if that can help. Errors: LaunchError, RunFailed."""
        code = role.poll()
        if code is None or (code == EXIT_FINISHED and role is not self.head):
            return
        role.ended_at = role.ended_at or time.monotonic()
        if time.monotonic() < role.ended_at + _RESTART_DELAY_S:
            return  # workers that the head told to leave may be seen to end before the head does
        cause = self._cause(role, code)
        evidence = self._last_words(role)
        if code == EXIT_HOPELESS and role is self.head:
            raise ConfigError(f"head failed; {evidence}")  # only a mistake ends it so, and it is still one here
        if code == EXIT_HOPELESS or (code == EXIT_FAILED and not role.has_joined):
            raise (RunFailed if role is self.head else LaunchError)(f"{role.name} {cause}; {evidence}")
        bound = self.config.launch.max_restarts
        if role.restarts >= bound:
            raise LaunchError(f"{role.name} {cause}, after launch.max_restarts={bound} restarts; {evidence}")
        role.restarts += 1
        self.on_event(f"{role.name} {cause}; starting it again ({role.restarts} of at most {bound} times)")
        self._start(role)

    def _cause(self, role: _Role, code: int) -> str:
        """How it ended. A worker that did not decide to end has a witness who says more than its exit code."""
        told = seats.read(self.paths, role.seat) if role.seat else None
        role.has_joined |= told is not None and bool(told.worker)
        if told is not None and (told.state, code) == ("died", EXIT_DIED):
            return told.detail
        if code in (EXIT_FAILED, EXIT_HOPELESS):
            return f"failed: {told.detail}" if told is not None and told.state == "failed" else "failed"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def _last_words(self, role: _Role) -> str:
        """The end of its log; on a full disk, which may have kept them from being written, that the disk is full."""
        log, free = self.paths.log(role.name), shutil.disk_usage(self.paths.root).free
        words = f"the end of {log}:\n{last_lines(log)}"
        if free >= _FULL_BYTES or "No space left" in words:
            return words
        return f"{words}\nNo space left on the disk of {self.paths.root}: make room and run the same command again"

    def _ask_status(self) -> None:
        with contextlib.suppress(TransportError):  # the head has not started yet, or is busy: ask again later
            status = ask(self.paths, StatusRequest(), _STATUS_TIMEOUT_S)
            if isinstance(status, Status):
                self.on_status(seats.with_absent(status, self.paths))

    def _stop_in_order(self) -> None:
        """Have the head write a checkpoint and dismiss the workers. Another signal ends the wait."""
        limit = self.config.launch.stop_timeout
        self.on_event(f"stopping in good order, within {limit:g} s; signal once more to stop at once")
        deadline = time.monotonic() + limit
        tolerated = self.stop.count
        self.head.terminate()
        self._wait_for([self.head], deadline, tolerated)
        self._wind_down(deadline, tolerated)

    def _wind_down(self, deadline: float, tolerated: int) -> None:
        """Wait for the workers, which the head has told to leave unless they had not joined yet; then terminate them.

        What is left at the deadline is killed when the family is left.
        """
        self._wait_for(self.workers, min(time.monotonic() + _LEAVING_S, deadline), tolerated)
        for role in self.workers:
            role.terminate()
        self._wait_for(self.workers, deadline, tolerated)

    def _wait_for(self, roles: list[_Role], deadline: float, tolerated: int) -> None:
        """Until they have ended, the time is up, or there were more signals than `tolerated`."""
        while any(role.running for role in roles) and time.monotonic() < deadline and self.stop.count <= tolerated:
            time.sleep(_POLL_S)


class _Stop:
    """Which signal asked for an end, and how often."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self.count += 1


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Catch the signals that ask for an end, where Python allows it: in the main thread."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _devices(config: Config, index: int) -> dict[str, str]:
    """The environment that gives worker `index` its share of the GPUs, in turn; nothing where there are none."""
    gpus = _visible_gpus()
    if not gpus:
        return {}
    count = min(config.engine.tensor_parallel, len(gpus))
    own = [gpus[(index * count + i) % len(gpus)] for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _visible_gpus() -> list[str]:
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, encoding="utf-8", timeout=60)
    return [str(i) for i, _ in enumerate(listed.stdout.splitlines())] if listed.returncode == 0 else []
