"""A base holds the theta from which a live model's weights are written: in host memory, streamed or on the device.

Invariant: with every base, the same member gives the same bits, and the digest shares of all ranks sum to the arena's
digest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hpc_es.methods.es import optimiser as optimisers
from hpc_es.noise import Array, Matrix, Perturbation, State, kernels, tensor_id, threads
from hpc_es.params.arena import CHUNK, Arena, perturbation_of
from hpc_es.params.regions import Region
from hpc_es.params.report import UpdateReport
from hpc_es.records import Commit, Member

Target = tuple[Region, torch.Tensor]
"""A region and the live memory that holds it: contiguous, 1-D; float32, bfloat16 or float16."""


class Base(Protocol):
    """theta of one rank: made from the arena that all ranks of an engine share, for the regions of live memory that
    make up this rank's model."""

    unheld: int
    """This rank's share of the digest of tensors that the live model does not hold; constant, as they are untrained."""

    def write(self, member: Member | None) -> int:
        """Write a member, or the centre (None), into live memory. Returns this rank's share of the digest."""

    def apply(self, commits: Sequence[Commit]) -> UpdateReport:
        """Advance this rank's share of theta by consecutive commits; reports partial sums, like Arena.apply."""

    def reload(self) -> None:
        """Note that the arena was reloaded."""


class HostBase:
    """The base for live memory on the host: members are cast into it directly from the arena."""

    unheld = 0

    def __init__(self, arena: Arena, targets: Sequence[Target], rank: int, num_ranks: int) -> None:
        self._arena, self._rank, self._num_ranks = arena, rank, num_ranks
        contents, trained = {name: values.reshape(-1) for name, values in arena.contents().items()}, set(arena.trained)
        kept = optimisers.STATE[arena.optimiser]
        self._pieces = list[_Piece]()
        for region, live in targets:
            out = _as_array(live)
            state = [f"{region.name}#{letter}" for letter in kept] if region.name in trained and region.counts else []
            for part, at in region.cut(CHUNK):
                within = slice(part.start, part.end)
                self._pieces.append(
                    _Piece(
                        part,
                        tensor_id(region.name),
                        contents[region.name][within],
                        out[at : at + part.size],
                        region.name in trained,
                        tuple(State(contents[name][within], tensor_id(name)) for name in state),
                        arena.matrix(region.name),
                    )
                )

    def write(self, member: Member | None) -> int:
        noisy, shares = perturbation_of(member), list[int]()
        threads.run(lambda piece: shares.append(piece.write(noisy)), self._pieces)
        return (sum(shares) + self.unheld) % 2**64

    def apply(self, commits: Sequence[Commit]) -> UpdateReport:
        return self._arena.apply(commits, rank=self._rank, num_ranks=self._num_ranks)

    def reload(self) -> None:
        """Nothing to do: every member is read from the arena."""


@dataclass(frozen=True)
class _Piece:
    """The part of a region that one thread writes at a time."""

    region: Region
    ident: int
    theta: Array
    """The tensor's elements from the region's first to its last, gaps between rows included."""
    out: Array
    trained: bool
    state: tuple[State, ...]
    """Optimiser state of the same elements; none if this copy does not count."""
    matrix: Matrix | None

    def write(self, noisy: Perturbation | None) -> int:
        """Write the perturbed elements; return this piece's share of the digest."""
        start, rows = self.region.start, self.region.noise_rows
        noisy = noisy if self.trained else None
        share = kernels().perturb(self.theta, self.out, self.ident, noisy, start=start, rows=rows, matrix=self.matrix)
        if not self.region.counts:
            return 0
        return share + sum(kernels().digest(kept.values, kept.ident, start=start, rows=rows) for kept in self.state)


def _as_array(live: torch.Tensor) -> Array:
    """A numpy view of the same memory; bfloat16 as its bits."""
    values = live.detach()
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
