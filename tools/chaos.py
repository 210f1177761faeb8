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


if __name__ == "__main__":
    sys.exit(main())
