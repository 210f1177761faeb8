"""A run on this machine, and the faults that chaos.py causes in it."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpc_es.config import Config
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId, Result
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal
from hpc_es.transport.rendezvous import read_rendezvous

POLL_S = 0.1


@dataclass
class Run:
    """One run, its launcher, and the processes that belong to it."""

    config_path: Path
    overrides: list[str]
    config: Config
    limit_s: float
    poll_s: float = POLL_S
    launcher: subprocess.Popen[bytes] | None = None
    extra_heads: list[subprocess.Popen[bytes]] = field(default_factory=list)
    starts: int = 0

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.config.run.dir / self.config.run.name)

    @property
    def is_up(self) -> bool:
        """Whether the started launcher still controls the run."""
        return self.launcher is not None and self.launcher.poll() is None

    def start(self) -> None:
        self.starts += 1
        log = open(self.paths.root.with_suffix(".log"), "ab")  # noqa: SIM115 - the child writes to it
        command = [sys.executable, "-m", "hpc_es", "run", str(self.config_path), *self.overrides]
        self.launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def pids(self, role: str) -> list[int]:
        """Processes of this run: role is head, worker, or "" for any."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                words = _command_line(folder)
                if str(self.paths.root) in words and (not role or role in words):
                    found.append(int(folder.name))
        return found

    def kill(self, role: str) -> None:
        for pid in self.pids(role):
            _signal(pid, signal.SIGKILL)

    def records(self) -> list[journal.AnyRecord]:
        return list(read_journal(self.paths.root, warn=lambda text: None)) if self.paths.segments() else []

    def version(self) -> int:
        return sum(isinstance(record, journal.Committed) for record in self.records())

    def results(self) -> dict[EvalId, Result]:
        """Number of results in the journal."""
        reported = (record.result for record in self.records() if isinstance(record, journal.Reported))
        return {result.eval_id: result for result in reported}

    def num_results(self) -> int:
        return len(self.results())

    def digests(self) -> dict[int, int]:
        return {record.version: record.digest for record in self.records() if isinstance(record, journal.Digested)}

    def finished(self) -> bool:
        return any(isinstance(record, journal.Stopped) and record.finished for record in self.records())

    def wait(self, until: Callable[[], bool]) -> None:
        """Keep the run going until `until` holds; start it again whenever it has ended too early."""
        deadline = time.monotonic() + self.limit_s
        while not until():
            if time.monotonic() > deadline:
                self.kill("")
                sys.exit(f"{self.paths.root} hangs at version {self.version()}; see its logs")
            if not self.is_up and not self.finished():
                self.start()
            time.sleep(self.poll_s)

    def end(self) -> list[int]:
        """Wait for the launcher and extra heads to exit; returns the processes that are left."""
        for process in [self.launcher, *self.extra_heads]:
            if process is not None:
                process.wait(timeout=self.limit_s)
        return self.pids("")


Fault = Callable[[Run, random.Random], None]

# --- faults -----------------------------------------------------------------------------------------------------


def kill_worker(run: Run, rng: random.Random) -> None:
    pids = run.pids("worker")
    if pids:
        _signal(rng.choice(pids), signal.SIGKILL)


def kill_head(run: Run, rng: random.Random) -> None:
    """Kill a process of this role, whatever it is doing; if it is dead already, kill its successor."""
    run.wait(lambda: bool(run.pids("head")) or run.finished())
    run.kill("head")


def kill_both(run: Run, rng: random.Random) -> None:
    kill_head(run, rng)
    run.kill("worker")


def kill_everything(run: Run, rng: random.Random) -> None:
    if run.launcher is not None:
        run.launcher.kill()
        run.launcher.wait()
    run.kill("")


def freeze_head(run: Run, rng: random.Random) -> None:
    """Stop the head, let a second one take over, continue the first: it must exit without writing anything."""
    before = read_rendezvous(run.paths.rendezvous)
    if before is None or before.pid not in run.pids("head"):
        return
    _signal(before.pid, signal.SIGSTOP)
    segment = run.paths.segment(before.generation)
    second = subprocess.Popen(
        [sys.executable, "-m", "hpc_es", "head", str(run.paths.root), "--local"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    run.extra_heads.append(second)
    deadline = time.monotonic() + run.limit_s
    while time.monotonic() < deadline:
        now = read_rendezvous(run.paths.rendezvous)
        if (now is not None and now.generation > before.generation) or second.poll() is not None:
            break
        time.sleep(POLL_S)
    size = segment.stat().st_size
    time.sleep(rng.uniform(0, 2))
    _signal(before.pid, signal.SIGCONT)
    while time.monotonic() < deadline and before.pid in run.pids("head"):
        time.sleep(POLL_S)
    if segment.stat().st_size != size:
        sys.exit(f"{segment} grew after its head had been replaced")


FAULTS: dict[str, Fault] = {
    "worker": kill_worker,
    "head": kill_head,
    "both": kill_both,
    "everything": kill_everything,
    "freeze": freeze_head,
}


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return []  # it ended meanwhile


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        print(f"process {pid} had ended already")
