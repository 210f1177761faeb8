"""Commits, members, and the live memory of an engine's ranks, for tests of what uses a device."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders import Counted, built_commit

from hpc_es.methods.es.optimiser import Kind
from hpc_es.params.arena import Arena, Dtype
from hpc_es.params.base import Target
from hpc_es.params.regions import Region
from hpc_es.params.report import UpdateReport
from hpc_es.params.streamed import Ring
from hpc_es.records import Commit, EvalId, Member, OptimiserStep

DEVICE = torch.device(os.environ.get("HPC_ES_TEST_DEVICE", "cpu"))
HAS_KERNELS = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = {
    "model.norm.weight": (41,),
    "model.embed_tokens.weight": (30, 40),
    "model.q_proj.bias": (3,),
    "model.q_proj.weight": (40, 40),
    "model.down_proj.weight": (24, 32),
    "vision.patch.weight": (17, 11),
}
SCOPE = ["vision.*"]
COLUMNS = "model.down_proj.weight"
STEPS: dict[Kind, OptimiserStep | None] = {
    "none": None,
    "momentum": OptimiserStep("momentum", 5e-4, 0.9, 0.1),
    "adam": OptimiserStep("adam", 5e-4, 0.9, 0.1, 0.99, 0.01, 1e-8),
}
MEMBERS = [None, Member(2**63 + 5, -1, 1e-2), Member(7, 1, 1e-2, 2, 3, 11)]


def arena_of(model: Path, kind: Kind = "none", **options: Any) -> Arena:
    return Arena.from_pretrained(model, exclude=SCOPE, optimiser=kind, **options)


def commits(kind: Kind) -> list[Commit]:
    def commit(version: int, num_subspaces: int = 1, null: bool = False) -> Commit:
        members = tuple(
            Counted(
                *(EvalId(version - 1, slot), 2**63 + 100 * version + slot, 1, 1e-3, slot % num_subspaces, 0.0, 0.0),
                float(np.float32(1e-6 * (slot - 1.3))),
                99 + version,
            )
            for slot in range(3)
        )
        return built_commit(version, 5e-4, members, null, num_subspaces, 99 + version, STEPS[kind])

    return [commit(1), commit(2, 2), commit(3, null=True), commit(4)]


def same(report: UpdateReport, wanted: UpdateReport) -> bool:
    """Squares are summed in another order."""
    return report.digests == wanted.digests and np.allclose(report.squares, wanted.squares, rtol=1e-9)


def ring(elements: int, num_slots: int = 2) -> Ring:
    return Ring(DEVICE, 4 * elements * num_slots, num_slots)


# --- live memory: what the ranks of an engine hold ------------------------------------------------------------------


def regions(arena: Arena, rank: int, num_ranks: int) -> list[Region]:
    """Regions of a rank: rows of matrices, columns of one of them, a copy of each vector (the first rank's counts)."""
    made = []
    for name in arena.names:
        rows, *columns = arena.shape(name)
        size = rows * (columns[0] if columns else 1)
        if num_ranks == 1 or not columns or name.startswith("vision"):
            made.append(Region(name, 0, 1, size, size, rank == 0))
        elif name == COLUMNS:
            width = columns[0] // num_ranks
            made.append(Region(name, rank * width, rows, width, columns[0]))
        else:
            made.append(Region(name, rank * size // num_ranks, 1, size // num_ranks, size // num_ranks))
    return made


def live(arena: Arena, rank: int, num_ranks: int, dtype: Dtype) -> list[Target]:
    """Nothing that is written is NaN."""
    kind = getattr(torch, dtype)
    return [(r, torch.full((r.size,), torch.nan, dtype=kind, device=DEVICE)) for r in regions(arena, rank, num_ranks)]


def holds(targets: Sequence[Target], arena: Arena, member: Member | None, dtype: Dtype) -> bool:
    """Live memory is what the arena makes of the member."""
    for region, values in targets:
        whole = arena.perturbed(region.name, member, dtype).reshape(-1)
        at = region.start + region.stride * np.arange(region.rows)[:, None] + np.arange(region.width)
        if values.cpu().view(torch.uint8).numpy().tobytes() != whole[at].tobytes():
            return False
    return True
