"""The passes of noise/cuda.py on a CPU's tensors, by the host's compiled kernels: the same bits, without waiting for
Triton's interpreter. What is tested with them are the pipelines around the kernels."""

from collections.abc import Sequence
from typing import Any, Self

import pytest
import torch

from hpc_es.noise import cuda, kernels
from hpc_es.noise.reference import Array, Perturbation, State, Trace, Update


def install(patch: pytest.MonkeyPatch) -> None:
    for name, function in {"perturb": perturb, "digest": digest, "update": update, "Plan": Plan}.items():
        patch.setattr(cuda, name, function)


def perturb(
    theta: torch.Tensor, out: torch.Tensor, ident: int, noisy: Perturbation | None, *, total: torch.Tensor, **place: Any
) -> torch.Tensor:
    share = kernels().perturb(theta.numpy(), _array(out), ident, noisy, **place)
    return total.fill_(_signed(int(total) + share))


def digest(theta: torch.Tensor, ident: int, **place: Any) -> int:
    return kernels().digest(theta.numpy(), ident, **place)


def update(theta: torch.Tensor, ident: int, updates: Sequence[Update], **place: Any) -> Trace:
    plan = Plan.of(updates, theta.device)
    plan.apply(theta, ident, **place)
    return plan.trace()


class Plan:
    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates, self._traces = list(updates), list[Trace]()

    @classmethod
    def of(cls, updates: Sequence[Update], device: torch.device) -> Self:
        return cls(updates)

    def apply(
        self, theta: torch.Tensor, ident: int, *, state: Sequence[State] = (), counts: bool = True, **place: Any
    ) -> None:
        beside = [State(kept.values.numpy(), kept.ident) for kept in state]
        trace = kernels().update(theta.numpy(), ident, self._updates, state=beside, **place)
        if counts:
            self._traces.append(trace)

    def trace(self) -> Trace:
        versions = range(len(self._updates))
        digests = [sum(trace.digests[v] for trace in self._traces) % 2**64 for v in versions]
        return Trace(digests, [sum(trace.squares[v] for trace in self._traces) for v in versions])


def _array(values: torch.Tensor) -> Array:
    """bfloat16 as its bits."""
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def _signed(digest: int) -> int:
    """The int64 of the same bits."""
    return (digest + 2**63) % 2**64 - 2**63
