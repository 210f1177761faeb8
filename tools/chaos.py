"""Kill a run again and again, and compare it with one that nobody disturbed.

    python tools/chaos.py configs/chaos.yaml --moments 10 --seed 1 [key=value ...]
    tools/slurm_cluster.sh start && eval "$(tools/slurm_cluster.sh env)"
    python tools/chaos.py configs/chaos.yaml --slurm run.num_updates=40 [key=value ...]

Two runs of one configuration, one after the other: `undisturbed`, and `disturbed`, which at random moments loses a
worker, the head, both, or everything with its launcher (all by SIGKILL), or has its head frozen (SIGSTOP), replaced
by a second one and thawed. It is brought back each time by the command that started it. At the end both must have the
same digest for every version, `verify` must find nothing, no evaluation may be counted twice, and no process may be
left. Exit code 0 only then.

With --slurm the disturbed run is submitted, once, to the cluster of tools/slurm_cluster.sh; the faults are those of a
cluster, and a script rather than a lottery: a slurmd that dies under the head (so that there are two heads), a
preemption, a node that fails, requeues of a worker and of the head. Choose run.num_updates so that it outlasts them.
"""

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import chaos_local
from chaos_local import Fault, Run

from hpc_es.analysis.verify import verify
from hpc_es.config import load
from hpc_es.store import records as journal

SITE = Path(__file__).resolve().parent.parent / "configs" / "sites" / "test-cluster.yaml"


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


def inflict(run: Run, kind: str, fault: Fault, moment: int, apart: float, rng: random.Random) -> bool:
    """Wait for a random moment, up to `apart` results from now, and let it happen. False when the run has ended."""
    awaited = run.num_results() + rng.uniform(0, apart)  # 0: right away, while all is starting
    run.wait(lambda: run.num_results() >= awaited or run.finished())
    time.sleep(rng.uniform(0, 0.5))
    if run.finished():
        print(f"the run ended before fault {moment}", flush=True)
        return False
    print(f"{moment:3d}. {kind:<10} at version {run.version()}, {run.num_results()} results", flush=True)
    fault(run, rng)
    return True


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--slurm", action="store_true", help="disturb a run on the cluster of tools/slurm_cluster.sh")
    parser.add_argument("--moments", type=int, help="faults to inflict; default 10, with --slurm each kind once")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults and moments")
    parser.add_argument("--faults", help="which kinds; with --slurm in this order")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder of both runs; emptied first")
    parser.add_argument("--limit", type=float, default=600, help="seconds without an end that count as hanging")
    return parser.parse_intermixed_args()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    rng = random.Random(arguments.seed)
    run_class, faults = _on_slurm() if arguments.slurm else (Run, chaos_local.FAULTS)
    kinds = arguments.faults.split(",") if arguments.faults else list(faults)
    if unknown := set(kinds) - set(faults):
        parser.error(f"no such faults: {', '.join(sorted(unknown))}; there are {', '.join(faults)}")
    moments = arguments.moments or (len(kinds) if arguments.slurm else 10)
    out = arguments.out.resolve()  # as it stands in the command lines of jobs
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    def make_run(name: str, run_class: type[Run]) -> Run:
        overrides = [*arguments.overrides, f"run.dir={out}", f"run.name={name}", "launch.max_restarts=100"]
        config = load(arguments.config, overrides, site=SITE if arguments.slurm else None).config
        return run_class(arguments.config, overrides, config, arguments.limit)

    undisturbed, disturbed = make_run("undisturbed", Run), make_run("disturbed", run_class)
    undisturbed.wait(undisturbed.finished)
    left = undisturbed.end()
    print(f"undisturbed: {undisturbed.version()} updates, {undisturbed.num_results()} results", flush=True)

    # On a cluster most faults take long by themselves, and the run goes on meanwhile.
    share = 0.2 if arguments.slurm else 1.4
    num_results = undisturbed.num_results()
    missed = None
    for moment in range(1, moments + 1):
        kind = kinds[(moment - 1) % len(kinds)] if arguments.slurm else rng.choice(kinds)
        apart = share * max(num_results - disturbed.num_results(), 0) / (moments - moment + 2)
        if not inflict(disturbed, kind, faults[kind], moment, apart, rng):
            missed = kind
            break
    disturbed.wait(disturbed.finished)
    left += disturbed.end()

    problems = complaints(undisturbed, disturbed, left)
    if arguments.slurm and missed:
        problems.append(f"the run ended before {missed}, so the script was not played: raise run.num_updates")
    for problem in problems:
        print(f"WRONG: {problem}")
    heads = len(disturbed.paths.segments())
    final = digests(disturbed).get(disturbed.version(), 0)
    print(f"disturbed: {disturbed.version()} updates, {heads} heads, {disturbed.starts} launches, digest {final:016x}")
    print("not as it should be" if problems else "both runs have the same bits, and every evaluation counts once")
    return 1 if problems else 0


def _on_slurm() -> tuple[type[Run], dict[str, Fault]]:
    import chaos_slurm

    return chaos_slurm.SlurmRun, chaos_slurm.FAULTS


if __name__ == "__main__":
    sys.exit(main())
