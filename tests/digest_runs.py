"""Runs of every schedule of staleness with every setting of ES, and what identifies their bits.

The head's real core plays with workers whose fitness is a pure function of what they evaluate (theatre.py), in a fixed
random order, and a real arena applies its commits. The list was written down before the code was rebuilt around methods;
`python tests/digest_runs.py --write` writes it again, which means that bits have changed: say so in CHANGELOG.md.
"""

import hashlib
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import theatre

from hpc_es.params import Arena
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.store import records as journal

LIST = Path(__file__).parent / "fixtures" / "digests.json"

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "lag1-50": {"mode": "controlled", "lag": 1, "share": 0.5},
    "lag4-50": {"mode": "controlled", "lag": 4, "share": 0.5},
    "lag8-25": {"mode": "controlled", "lag": 8, "share": 0.25},
    "tail": {"mode": "tail", "counts": {0: 4, 1: 1, 3: 1}},
    "staircase": {"mode": "staircase", "steps": [[1, 0], [3, 1], [6, 2]]},
    "staircase-isolated": {"mode": "staircase", "steps": [[1, 0], [3, 1], [6, 2]], "isolated": True},
    "natural-discard": {"mode": "natural", "max_lag": 1, "overdue": "discard"},
    "natural-hold": {"mode": "natural", "max_lag": 2, "overdue": "hold"},
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mirrored": {"mirrored": True},
    "subspaces": {"subspaces": 2},
    "mirrored subspaces": {"subspaces": 3, "mirrored": True},
    "ranks": {"shaping": "centred_ranks"},
    "batch baseline": {"baseline": "batch"},
    "centre baseline": {"baseline": "centre"},
    "momentum": {"optimiser": {"kind": "momentum"}},
    "adam": {"optimiser": {"kind": "adam"}, "subspaces": 2},
    "inverse lag weight": {"lag_weight": {"kind": "inverse", "rate": 1.0}},
    "exponential lag weight": {"lag_weight": {"kind": "exponential", "rate": 0.5}},
    "random walk": {"control": "random-walk"},
    "cosine sigma, linear alpha": {
        "sigma": {"kind": "cosine", "start": 1e-2, "end": 1e-3},
        "alpha": {"kind": "linear", "start": 5e-3, "end": 0.0},
    },
}


def run_of(schedule: str, method: str, model: Path) -> dict[str, str]:
    """What identifies one run: plans, commits, held-out results, and the digest of every theta."""
    num_updates = 10 if schedule == "lag8-25" else 7
    config = theatre.make_config(
        run={"num_updates": num_updates},
        es={"population": 6, **METHODS[method]},
        staleness=SCHEDULES[schedule],
        eval={"repeats": 2, "batch": 2},
    )
    stage, chosen = theatre.Stage(config), random.Random(f"{schedule} {method}")
    for seat in range(3):
        stage.add_worker(f"w{seat}")
    while stage.exit is None:
        possible = stage.moves()
        if possible:
            stage.move(chosen.choice(possible))
        else:
            stage.run(max_moves=10**5)
    arena = Arena.from_pretrained(model, optimiser=config.es.optimiser.kind)
    digests = arena.apply(stage.commits()).digests
    return {
        "theta": " ".join(f"{digest:016x}" for digest in digests),
        "plans": _hash([_planned(record) for record in stage.records if isinstance(record, journal.Planned)]),
        "commits": _hash([_committed(commit) for commit in stage.commits()]),
        "evals": _hash(sorted(stage.core.ledger.eval_fitness.items())),
    }


def _hash(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _planned(record: journal.Planned) -> list[Any]:
    return [(a.version, a.update, a.tasks, a.sampling_seed, _member(a.member)) for a in record.assignments]


def _member(member: Any) -> Any:
    names = ("seed", "sign", "sigma", "subspace", "num_subspaces", "partition_seed")
    return None if member is None else [getattr(member, name) for name in names]


def _committed(commit: Any) -> list[Any]:
    step = None if commit.step is None else [getattr(commit.step, name) for name in commit.step.__struct_fields__]
    header = [commit.version, commit.alpha, commit.null, commit.num_subspaces, commit.partition_seed, step]
    names = ("seed", "sign", "sigma", "subspace", "fitness", "utility", "coefficient", "partition_seed")
    ids = [(m.eval_id.version, m.eval_id.slot, m.eval_id.replacement) for m in commit.members]
    return [header, ids, [[getattr(m, name) for name in names] for m in commit.members]]


def all_runs() -> dict[str, dict[str, str]]:
    with TemporaryDirectory() as folder:
        write_lab_model(Path(folder), LAB_MODELS["lab-10k"])
        return {f"{s}, {m}": run_of(s, m, Path(folder)) for s in SCHEDULES for m in METHODS}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/digest_runs.py --write")
    LIST.write_text(json.dumps(all_runs(), indent=1) + "\n")
