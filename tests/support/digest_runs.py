"""Short runs of every staleness schedule with every method setting, and the digests that identify their bits.

The head's real core plans and commits, a real arena of the laboratory's model applies the commits, and the fitness of
an evaluation is a hash of the perturbed parameters: one changed bit changes everything after it. The workers are those
of theatre.py, and a seeded generator draws which of them finishes next, so the clock decides nothing.

`python tests/support/digest_runs.py --write` writes the list of digests again. A list that differs afterwards means
that bits have changed: say so in the changelog. It holds hashes of plain values, never of our structs, and
test_digests.py uses no name of the package: a refactoring that renames things edits this module and leaves the list
alone.
"""

import hashlib
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import theatre
from builders import counted
from repository import FIXTURES

from hpc_es.params import Arena
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.store import records as journal

LIST = FIXTURES / "digests.json"

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "lag1-50": {"mode": "controlled", "lag": 1, "share": 0.5},
    "lag4-50": {"mode": "controlled", "lag": 4, "share": 0.5},
    "lag4-100": {"mode": "controlled", "lag": 4, "share": 1.0},
    "lag8-25": {"mode": "controlled", "lag": 8, "share": 0.25},
    "tail": {"mode": "tail", "counts": {0: 5, 1: 2, 3: 1}},
    "staircase": {"mode": "staircase", "steps": [[1, 0], [3, 1], [5, 2]]},
    "staircase-isolated": {"mode": "staircase", "steps": [[1, 0], [3, 1], [5, 2]], "isolated": True},
    "natural-discard": {"mode": "natural", "max_lag": 1, "overdue": "discard"},
    "natural-hold": {"mode": "natural", "max_lag": 2, "overdue": "hold"},
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mirrored": {"mirrored": True},
    "subspaces 2": {"subspaces": 2},
    "subspaces 4": {"subspaces": 4},
    "mirrored subspaces 4": {"subspaces": 4, "mirrored": True},
    "ranks": {"shaping": "centred_ranks"},
    "batch baseline": {"baseline": "batch"},
    "centre baseline": {"baseline": "centre"},
    "centre baseline, ranks, mirrored": {"baseline": "centre", "shaping": "centred_ranks", "mirrored": True},
    "momentum": {"optimiser": {"kind": "momentum"}},
    "adam": {"optimiser": {"kind": "adam"}},
    "adam, subspaces 2": {"optimiser": {"kind": "adam"}, "subspaces": 2},
    "inverse lag weight": {"lag_weight": {"kind": "inverse", "rate": 1.0}},
    "exponential lag weight": {"lag_weight": {"kind": "exponential", "rate": 0.5}},
    "random walk": {"control": "random-walk"},
    "cosine sigma, linear alpha": {
        "sigma": {"kind": "cosine", "start": 1e-2, "end": 1e-3},
        "alpha": {"kind": "linear", "start": 5e-3, "end": 1e-3},
    },
    "linear sigma, cosine alpha to 0": {
        "sigma": {"kind": "linear", "start": 1e-2, "end": 1e-3},
        "alpha": {"kind": "cosine", "start": 5e-3, "end": 0.0},
    },
    "null updates": {},
    "null updates, adam": {"optimiser": {"kind": "adam"}},
}
FLAT_UPDATES = (3, 4)
"""With "null updates", all members of these updates have the same fitness, so that the updates are null."""
NUM_UPDATES = {"lag4-50": 7, "lag4-100": 7, "lag8-25": 10, "natural-discard": 8, "natural-hold": 8}
"""Enough for results of the longest lag to be consumed, discarded or waited for; 6 elsewhere."""
SLOW = 28
"""Evaluations that the other workers finish during one of the slow worker: more than two versions."""


class Run(theatre.Stage):
    """One run: the core and its workers on the stage, with parameters instead of made-up digests and fitness."""

    def __init__(self, schedule: str, method: str, model: Path) -> None:
        self.model = model
        self.arenas = dict[int, Arena]()
        self.flat_updates = FLAT_UPDATES if method.startswith("null updates") else ()
        super().__init__(
            theatre.make_config(
                run={"num_updates": NUM_UPDATES.get(schedule, 6)},
                es={"population": 8, "sigma": 1e-2, "alpha": 5e-3, **METHODS[method]},
                staleness=SCHEDULES[schedule],
                eval={"repeats": 2, "batch": 2},
            )
        )
        self.chosen = random.Random(f"{schedule}, {method}")

    def arena(self, version: int) -> Arena:
        """theta of a version, from the base model and the commits."""
        if version not in self.arenas:
            arena = Arena.from_pretrained(self.model, optimiser=self.config.es.optimiser.kind)
            arena.apply(self.commits()[:version])
            self.arenas[version] = arena
        return self.arenas[version]

    def true_digest(self, version: int) -> int:
        return self.arena(version).digest() if version else theatre.BASE_DIGEST

    def rewards(self, assignment: Any) -> list[float]:
        """Drawn by a hash of the bits of the policy. Members get tenths, so that some of them are equally good."""
        if assignment.update in self.flat_updates:
            return [0.7] * len(assignment.tasks)
        arena = self.arena(assignment.version)
        weights = [arena.perturbed(name, assignment.member, "float32").tobytes() for name in arena.names]
        policy = hashlib.blake2b(b"".join(weights)).hexdigest()
        levels = 1000 if assignment.member is None else 10
        return [theatre.hashed(policy, task, assignment.sampling_seed) % levels / levels for task in assignment.tasks]

    def play(self) -> None:
        """Run until the head exits. Messages arrive at once; the first evaluation fails, and the last worker is
        slow."""
        quick, slow = [self.add_worker("w0"), self.add_worker("w1")], self.add_worker("w2")
        quick[0].errors = 1
        num_finished = 0
        while self.exit is None:
            if pending := [move for move in self.moves() if not move.startswith("finish")]:
                self.move(pending[0])
                continue
            busy = [worker for worker in quick if worker.current is not None]
            if slow.current is not None and (not busy or num_finished >= SLOW):
                busy, num_finished = [slow], 0
            self.move(f"finish {self.chosen.choice(busy).name}")
            num_finished += 1

    def planned(self) -> list[Any]:
        return [a for record in self.records if isinstance(record, journal.Planned) for a in record.assignments]


def digests_of(schedule: str, method: str, model: Path) -> dict[str, str]:
    """The digests that identify one run, and a short description of its events."""
    run = Run(schedule, method, model)
    run.play()
    commits = run.commits()
    lags = {commit.version - 1 - member.eval_id.version for commit in commits for member in counted(commit)}
    thetas = [run.arena(version).digest() for version in range(len(commits) + 1)]
    return {
        "theta": " ".join(f"{digest:016x}" for digest in thetas),
        "plans": _hash(sorted(spelled_assignment(assignment) for assignment in run.planned())),
        "commits": _hash([spelled_commit(commit) for commit in commits]),
        "evals": _hash(sorted(run.core.ledger.eval_fitness.items())),
        "lags": " ".join(map(str, sorted(lags))),
        "null": " ".join(str(commit.version) for commit in commits if commit.null),
        "discarded": str(sum(isinstance(record, journal.Discarded) for record in run.records)),
    }


def spelled_assignment(assignment: Any) -> tuple[Any, ...]:
    """An assignment as plain values: kind, version, number within the kind and version, replacements, and the rest."""
    kind, eval_id, member = assignment.purpose, assignment.eval_id, assignment.member
    names = ("seed", "sign", "sigma", "subspace", "num_subspaces", "partition_seed")
    perturbation = () if member is None else tuple(getattr(member, name) for name in names)
    task_batch = (tuple(assignment.tasks), assignment.sampling_seed)
    return (kind, eval_id.version, eval_id.slot, eval_id.replacement, assignment.update, *task_batch, perturbation)


def spelled_commit(commit: Any) -> tuple[Any, ...]:
    """A commit as plain values."""
    names = ("seed", "sign", "sigma", "subspace", "fitness", "utility", "coefficient", "partition_seed")
    members = [
        (m.eval_id.version, m.eval_id.slot, m.eval_id.replacement, *(getattr(m, name) for name in names))
        for m in counted(commit)
    ]
    scalars = ("kind", "rate", "decay_m", "gain_m", "decay_v", "gain_v", "epsilon")
    body = commit.seeds
    step = () if body.step is None else tuple(getattr(body.step, name) for name in scalars)
    return (commit.version, body.alpha, commit.null, body.num_subspaces, body.partition_seed, step, members)


def _hash(value: Any) -> str:
    """Digest of plain Python values, whose repr is exact."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def make_model(folder: Path) -> Path:
    return write_lab_model(folder, LAB_MODELS["lab-10k"])


def digests_of_schedule(schedule: str, model: Path) -> dict[str, dict[str, str]]:
    return {f"{schedule}, {method}": digests_of(schedule, method, model) for method in METHODS}


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/support/digest_runs.py --write")
    found = dict[str, dict[str, str]]()
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for schedule in SCHEDULES:
            found |= digests_of_schedule(schedule, model)
    LIST.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
