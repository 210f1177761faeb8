"""Disturb a run by repeated faults, and compare it with an undisturbed run.

    python tools/chaos.py configs/chaos.yaml --moments 10 --seed 1 [key=value ...]
    python tools/chaos.py configs/chaos_modes.yaml --modes all --faults head --moments 20
    tools/slurm_cluster.sh start && eval "$(tools/slurm_cluster.sh env)"
    python tools/chaos.py configs/chaos.yaml --slurm run.num_updates=40 [key=value ...]

It makes two runs of one configuration, one after the other: `undisturbed` and `disturbed`. At random moments, the
second one loses a worker, the head, both, or all processes including the launcher (by SIGKILL), or its head is stopped
(SIGSTOP), replaced by a second head, and continued. Each time the command that started the run restarts it. At the end
both runs must have the same digest for every version. Natural asynchrony consumes results in the order in which they
arrive, so there is only the disturbed run. For every run: `verify` must find no fault (bound on the lag, composition of
cohorts, noise, coefficients); every result that was ever in the journal must still be there, and must be counted by
exactly one update, discarded with a lag above the bound, voided because of its digest, or (natural asynchrony) unused
at the end; no reported evaluation may be dispatched again; no process may be left. Otherwise the exit code is 1.

--modes runs several schedules one after the other, or `all`: see MODES.

--slurm submits the disturbed run once to the cluster of tools/slurm_cluster.sh. The faults are then those of a cluster,
in a fixed order: a slurmd that dies under the head (so that there are two heads), a preemption, a node that fails,
requeues of a worker and of the head. Choose run.num_updates so that the run lasts longer than the faults.
"""

import argparse
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import chaos_local
from chaos_checks import complaints
from chaos_local import Fault, Run

from hpc_es import methods
from hpc_es.config import load
from hpc_es.records import EvalId, Result

SITE = Path(__file__).resolve().parent.parent / "configs" / "sites" / "test-cluster.yaml"

MODES = {
    "sync": "mode: sync",
    "natural-discard": "mode: natural, max_lag: 1, overdue: discard",
    "natural-hold": "mode: natural, max_lag: 1, overdue: hold",
    "controlled": "mode: controlled, lag: 3, share: 0.5",
    "tail": "mode: tail, counts: {0: 3, 1: 1, 2: 1, 4: 1}",
    "staircase": "mode: staircase, steps: [[1, 0], [4, 3], [8, 7], [15, 14]]",
}
"""Settings of `staleness` for runs of about 20 updates; `tail` needs a population of 6."""


@dataclass
class Play:
    """The two runs of one configuration. `name`: its mode, if chosen from MODES."""

    name: str
    arguments: argparse.Namespace
    run_class: type[Run]
    faults: dict[str, Fault]
    kinds: list[str]
    rng: random.Random
    out: Path
    overrides: list[str]
    seen: dict[EvalId, Result] = field(default_factory=dict)
    """Results that were in the journal before a fault."""
    num_faults: int = 0

    def run(self) -> bool:
        """Make both runs and check them; True if no problem was found."""
        disturbed, undisturbed, left = self._make("disturbed", self.run_class), None, list[int]()
        if not methods.make(disturbed.config).schedule().on_demand:
            undisturbed = self._make("undisturbed", Run)
            undisturbed.wait(undisturbed.finished)
            left += undisturbed.end()
        missed = self._disturb(disturbed)
        disturbed.wait(disturbed.finished)
        left += disturbed.end()
        fates, problems = complaints(undisturbed, disturbed, self.seen, left)
        if self.arguments.slurm and missed:
            problems.append(f"the run ended before the fault {missed}: raise run.num_updates")
        for problem in problems:
            print(f"wrong: {problem}")
        verdict = "the same bits as undisturbed" if undisturbed else "every result is accounted for once"
        print(
            f"{self.name or disturbed.config.staleness.mode}: {disturbed.version()} updates, {self.num_faults} faults, "
            f"{len(disturbed.paths.segments())} heads, {disturbed.starts} launches; {fates}: "
            + ("FAILED" if problems else verdict),
            flush=True,
        )
        return not problems

    def _make(self, name: str, run_class: type[Run]) -> Run:
        self.out.mkdir(parents=True, exist_ok=True)
        overrides = [*self.overrides, f"run.dir={self.out}", f"run.name={name}", "launch.max_restarts=100"]
        site = SITE if self.arguments.slurm else None
        config = load(self.arguments.config, overrides, site=site).config
        return run_class(self.arguments.config, overrides, config, self.arguments.limit)

    def _disturb(self, run: Run) -> str | None:
        """Cause all faults; returns the first one that the run's end prevented, if any."""
        moments = self.arguments.moments or (len(self.kinds) if self.arguments.slurm else 10)
        # On a cluster most faults take a long time, during which the run goes on.
        share = 0.2 if self.arguments.slurm else 1.2
        num_results = run.config.run.num_updates * run.config.es.population
        for moment in range(1, moments + 1):
            kind = self.kinds[(moment - 1) % len(self.kinds)] if self.arguments.slurm else self.rng.choice(self.kinds)
            apart = share * max(num_results - run.num_results(), 0) / (moments - moment + 2)
            if not self._inflict(run, kind, moment, apart):
                return kind
        return None

    def _inflict(self, run: Run, kind: str, moment: int, apart: float) -> bool:
        """Cause a fault at a random moment, at most `apart` results from now. False if the run ended before."""
        awaited = run.num_results() + self.rng.uniform(0, apart)  # may be 0: at once, while processes are starting
        run.wait(lambda: run.num_results() >= awaited or run.finished())
        time.sleep(self.rng.uniform(0, 0.2))
        if run.finished():
            print(f"the run ended before fault {moment}", flush=True)
            return False
        print(f"{moment:3d}. {kind:<10} at version {run.version()}, {run.num_results()} results", flush=True)
        self.seen.update(run.results())
        self.faults[kind](run, self.rng)
        self.num_faults += 1
        return True


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--modes", help=f"schedules to play in turn: all, or some of {', '.join(MODES)}")
    parser.add_argument("--slurm", action="store_true", help="disturb a run on the cluster of tools/slurm_cluster.sh")
    parser.add_argument("--moments", type=int, help="faults to inflict; default 10, with --slurm each kind once")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults and moments")
    parser.add_argument("--faults", help="which kinds; with --slurm in this order")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder of the runs; emptied first")
    parser.add_argument("--limit", type=float, default=600, help="seconds without an end that count as hanging")
    return parser.parse_intermixed_args()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    run_class, faults = _on_slurm() if arguments.slurm else (Run, chaos_local.FAULTS)
    kinds = _chosen(parser, "faults", arguments.faults, list(faults))
    modes = _chosen(parser, "modes", arguments.modes, list(MODES)) if arguments.modes else [""]
    out = arguments.out.resolve()  # as it stands in the command lines of jobs
    shutil.rmtree(out, ignore_errors=True)
    all_well = True
    for mode in modes:
        overrides = [*([f"staleness={{{MODES[mode]}}}"] if mode else []), *arguments.overrides]
        rng = random.Random(arguments.seed)
        all_well &= Play(mode, arguments, run_class, faults, kinds, rng, out / mode, overrides).run()
    return 0 if all_well else 1


def _chosen(parser: argparse.ArgumentParser, what: str, given: str | None, there: list[str]) -> list[str]:
    """Split a list of names separated by commas, and check them."""
    names = there if given in (None, "all") else given.split(",")
    if unknown := set(names) - set(there):
        parser.error(f"no such {what}: {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    return names


def _on_slurm() -> tuple[type[Run], dict[str, Fault]]:
    import chaos_slurm

    return chaos_slurm.SlurmRun, chaos_slurm.FAULTS


if __name__ == "__main__":
    sys.exit(main())
