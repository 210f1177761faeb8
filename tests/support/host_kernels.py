"""The passes of noise/cuda.py on a CPU's tensors, by the host's compiled kernels: the same bits, without waiting for
Triton's interpreter. What is tested with them are the pipelines around the kernels."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import pytest
import torch

from hpc_es.noise import cuda, kernels
from hpc_es.noise.cuda import Piece
from hpc_es.noise.reference import Array, Perturbation, State, Trace, Update
from hpc_es.params import device, streamed


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda, "update", update)
    patch.setattr(cuda, "Plan", Plan)
    for module in (cuda, device, streamed):
        patch.setattr(module, "Pieces", Pieces)


class Pieces:
    def __init__(self, pieces: Iterable[Piece], device: torch.device) -> None:
        self.pieces = list(pieces)

    def perturb(self, noisy: Perturbation | None, total: torch.Tensor) -> None:
        for piece in self.pieces:
            assert piece.out is not None
            theta, out, reached = piece.theta.numpy(), _array(piece.out), noisy if piece.trained else None
            share = kernels().perturb(theta, out, piece.ident, reached, **_place(piece))
            total.fill_(_signed(int(total) + piece.counts * share))

    def digest(self, total: torch.Tensor) -> None:
        for piece in self.pieces:
            share = kernels().digest(piece.theta.numpy(), piece.ident, **_place(piece))
            total.fill_(_signed(int(total) + piece.counts * share))


def update(theta: torch.Tensor, ident: int, updates: Sequence[Update]) -> Trace:
    plan = Plan.of(updates, theta.device)
    plan.run(Pieces([Piece(theta, ident)], theta.device))
    return plan.trace()


class Plan:
    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates, self._traces = list(updates), list[Trace]()
        self.digest_of_state = 0

    @classmethod
    def of(cls, updates: Sequence[Update], device: torch.device) -> Self:
        return cls(updates)

    def run(self, pieces: Pieces) -> None:
        for piece in pieces.pieces:
            if piece.trained:
                beside = [State(kept.values.numpy(), kept.ident) for kept in piece.state]
                theta, place = piece.theta.numpy(), _place(piece)
                trace = kernels().update(theta, piece.ident, self._updates, state=beside, **place)
                if piece.counts:
                    self._traces.append(trace)
                    self.digest_of_state += sum(kernels().digest(*kept, **place) for kept in beside)

    def trace(self) -> Trace:
        versions = range(len(self._updates))
        digests = [sum(trace.digests[v] for trace in self._traces) % 2**64 for v in versions]
        return Trace(digests, [sum(trace.squares[v] for trace in self._traces) for v in versions])


def _place(piece: Piece) -> dict[str, Any]:
    return {"start": piece.start, "rows": piece.rows}


def _array(values: torch.Tensor) -> Array:
    """bfloat16 as its bits."""
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def _signed(digest: int) -> int:
    """The int64 of the same bits."""
    return (digest + 2**63) % 2**64 - 2**63
