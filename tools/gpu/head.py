"""The head's update through the GPU leaves theta, state and digests as all cores leave them."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from findings import Findings, arguments, begin
from model import SMALL, TINY, commit, write_model

from hpc_es.params import head_update
from hpc_es.params.arena import Arena
from hpc_es.records import OptimiserStep

STEPS: dict[Any, OptimiserStep | None] = {
    "none": None,
    "adam": OptimiserStep("adam", 5e-4, 0.9, 0.1, 0.99, 0.01, 1e-8),
}


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", SMALL if findings.on_gpu else TINY, findings.device)
        for kind in STEPS:
            with findings.step(f"optimiser {kind}"):
                equal(findings, folder, kind)


def equal(findings: Findings, folder: Path, kind: Any) -> None:
    mine, theirs = (Arena.from_pretrained(folder, exclude=["*.norm.*"], optimiser=kind) for _ in range(2))
    if findings.on_gpu:
        head_update.pin_arena(mine)
        apply = head_update.head_update(mine, "cuda")
        findings.check(f"optimiser {kind}: the arena is pinned", torch.from_numpy(mine.memory).is_pinned())
    else:
        apply = head_update.on_device(mine, torch.device("cpu"))
    commits = [commit(version, 3, STEPS[kind]) for version in (1, 2)]
    for some in (commits[:1], commits[1:]):
        done, wanted = apply(some), theirs.apply(some)
        what = f"optimiser {kind}, version {theirs.version}"
        findings.check(f"{what}: digest", done.digests == wanted.digests, f"{done.digest:016x}")
        findings.check(f"{what}: norm", np.allclose(done.squares, wanted.squares, rtol=1e-6))
    findings.check(f"optimiser {kind}: bits", mine.memory.tobytes() == theirs.memory.tobytes())


if __name__ == "__main__":
    main()
