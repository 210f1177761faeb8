"""Kill a run again and again, and compare it with one that nobody disturbed.

    python tools/chaos.py configs/chaos.yaml --moments 10 --seed 1 [key=value ...]

Two runs of one configuration, one after the other: `undisturbed`, and `disturbed`, which at random moments loses a
worker, the head, both, or everything with its launcher (all by SIGKILL), or has its head frozen (SIGSTOP), replaced
by a second one and thawed. It is brought back each time by the command that started it. At the end both must have the
same digest for every version, `verify` must find nothing, no evaluation may be counted twice, and no process may be
left. Exit code 0 only then.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpc_es.analysis.verify import verify
from hpc_es.config import Config, load
from hpc_es.paths import RunPaths
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal
from hpc_es.transport.messages import read_rendezvous

POLL_S = 0.1


@dataclass
class Run:
    """One run, its launcher, and the processes that belong to it."""

    config_path: Path
    overrides: list[str]
    paths: RunPaths
    limit_s: float
    launcher: subprocess.Popen[bytes] | None = None
    extra_heads: list[subprocess.Popen[bytes]] = field(default_factory=list)
    starts: int = 0

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

    def num_results(self) -> int:
        return sum(isinstance(record, journal.Reported) for record in self.records())

    def finished(self) -> bool:
        return any(isinstance(record, journal.Stopped) and record.finished for record in self.records())

    def wait(self, until: Callable[[], bool]) -> None:
        """Keep the run going until `until` holds; start it again whenever its launcher has ended too early."""
        deadline = time.monotonic() + self.limit_s
        while not until():
            if time.monotonic() > deadline:
                self.kill("")
                sys.exit(f"{self.paths.root} hangs at version {self.version()}; see its logs")
            if (self.launcher is None or self.launcher.poll() is not None) and not self.finished():
                self.start()
            time.sleep(POLL_S)

    def end(self) -> list[int]:
        """Wait for the launcher and spare heads; the processes that are left in spite of that."""
        for process in [self.launcher, *self.extra_heads]:
            if process is not None:
                process.wait(timeout=self.limit_s)
        return self.pids("")


# --- what can go wrong ------------------------------------------------------------------------------------------


def kill_worker(run: Run, rng: random.Random) -> None:
    pids = run.pids("worker")
    if pids:
        _signal(rng.choice(pids), signal.SIGKILL)


def kill_head(run: Run, rng: random.Random) -> None:
    run.kill("head")


def kill_both(run: Run, rng: random.Random) -> None:
    run.kill("head")
    run.kill("worker")


def kill_everything(run: Run, rng: random.Random) -> None:
    if run.launcher is not None:
        run.launcher.kill()
        run.launcher.wait()
    run.kill("")


def freeze_head(run: Run, rng: random.Random) -> None:
    """Stop the head, let a second one take over, continue the first: it must end and write nothing more."""
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


FAULTS = {
    "worker": kill_worker,
    "head": kill_head,
    "both": kill_both,
    "everything": kill_everything,
    "freeze": freeze_head,
}


# --- the comparison ---------------------------------------------------------------------------------------------


def digests(run: Run) -> dict[int, int]:
    return {record.version: record.digest for record in run.records() if isinstance(record, journal.Digested)}


def complaints(undisturbed: Run, disturbed: Run, left: list[int]) -> list[str]:
    """Everything that is not as it should be."""
    found = [f"processes are left: {left}"] if left else []
    expected, got = digests(undisturbed), digests(disturbed)
    if not expected:
        found.append("the undisturbed run has no digests")
    for version in sorted(expected.keys() | got.keys()):
        if expected.get(version) != got.get(version):
            found.append(f"digest of version {version}: {expected.get(version)} undisturbed, {got.get(version)} here")
    commits = [record.commit for record in disturbed.records() if isinstance(record, journal.Committed)]
    counted = Counter(member.eval_id for commit in commits for member in commit.members)
    found += [f"evaluation {eval_id} was counted {n} times" for eval_id, n in counted.items() if n != 1]
    for run in (undisturbed, disturbed):
        found += [f"verify {run.paths.root}: {problem}" for problem in verify(run.paths.root).problems]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--moments", type=int, default=10, help="faults to inflict")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults and moments")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"which kinds, of {', '.join(FAULTS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder of both runs; emptied first")
    parser.add_argument("--limit", type=float, default=600, help="seconds without an end that count as hanging")
    arguments = parser.parse_intermixed_args()
    rng = random.Random(arguments.seed)
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)

    def make_run(name: str) -> Run:
        overrides = [*arguments.overrides, f"run.dir={arguments.out}", f"run.name={name}", "launch.max_restarts=100"]
        config: Config = load(arguments.config, overrides).config
        return Run(arguments.config, overrides, RunPaths(config.run.dir / name), arguments.limit)

    undisturbed, disturbed = make_run("undisturbed"), make_run("disturbed")
    undisturbed.wait(undisturbed.finished)
    left = undisturbed.end()
    print(f"undisturbed: {undisturbed.version()} updates, {undisturbed.num_results()} results", flush=True)

    kinds = arguments.faults.split(",")
    results_apart = 1.4 * undisturbed.num_results() / (arguments.moments + 1)
    for moment in range(1, arguments.moments + 1):
        awaited = disturbed.num_results() + rng.uniform(0, results_apart)  # 0: right away, while all is starting
        disturbed.wait(lambda n=awaited: disturbed.num_results() >= n or disturbed.finished())
        time.sleep(rng.uniform(0, 0.5))
        if disturbed.finished():
            print(f"the run ended before fault {moment}", flush=True)
            break
        kind = rng.choice(kinds)
        at = f"version {disturbed.version()}, {disturbed.num_results()} results"
        print(f"{moment:3d}. {kind:<10} at {at}", flush=True)
        FAULTS[kind](disturbed, rng)
    disturbed.wait(disturbed.finished)
    left += disturbed.end()

    problems = complaints(undisturbed, disturbed, left)
    for problem in problems:
        print(f"WRONG: {problem}")
    heads = len(disturbed.paths.segments())
    final = digests(disturbed).get(disturbed.version(), 0)
    print(f"disturbed: {disturbed.version()} updates, {heads} heads, {disturbed.starts} launches, digest {final:016x}")
    print("the bits differ" if problems else "both runs have the same bits, and every evaluation counts once")
    return 1 if problems else 0


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")
    except OSError:
        return []  # it ended meanwhile


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        print(f"process {pid} had ended already")


if __name__ == "__main__":
    sys.exit(main())
