"""The passes of reference.py for GPUs, on contiguous torch tensors of one device: equal to it bit for bit.

Invariant: results do not depend on how a tensor is cut, as long as cuts fall on blocks. Nothing waits for the device
but what returns a Python number (`digest`, `update`, `Plan.trace`): kernels are queued on torch's current stream.

With TRITON_INTERPRET=1, before the first import, the same code runs on a CPU, slowly: that is how it is tested where
there is no GPU, in a process of its own.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
import triton

from hpc_es.noise.cuda_kernels import digest_kernel, perturb_kernel, update_kernel
from hpc_es.noise.reference import BLOCK, Perturbation, Rows, State, Step, Trace, Update, table

TILE = 128
"""Blocks per tile, as many as a program has threads: 1,024 elements."""
PROGRAMS = 2048
"""At most so many per launch; each goes through many tiles."""

EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every launch: an fp32 multiply, then an fp32 add; Triton flushes nothing to zero."""

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def zero(device: torch.device) -> torch.Tensor:
    """A digest to begin a sum with: int64 [] on the device."""
    return torch.zeros([], dtype=torch.int64, device=device)


def perturb(
    theta: torch.Tensor,
    out: torch.Tensor,
    ident: int,
    noisy: Perturbation | None,
    *,
    start: int = 0,
    rows: Rows | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """As reference.perturb; out is float32, bfloat16 or float16. Returns the digest, added to `total` where that is
    given (int64 [] on the device, modulo 2^64): a pass over many tensors waits once, when it reads the total."""
    kind, member = _KINDS[out.dtype], noisy or Perturbation(0, 0.0)
    total = zero(theta.device) if total is None else total
    perturb_kernel[_grid(out.numel())](
        *(theta, out if kind == "fp32" else out.view(torch.uint16), total, _gauss(theta.device)),
        *(*_where(theta, start, rows), ident),
        *(member.seed, member.scale, member.subspace, member.partition_seed),
        *(noisy is not None, member.num_subspaces, kind, *_shape(theta, rows, out.element_size())),
        **EXACT,
    )
    return total


def digest(theta: torch.Tensor, ident: int, *, start: int = 0, rows: Rows | None = None) -> int:
    """As reference.digest."""
    total = zero(theta.device)
    digest_kernel[_grid(_count(theta, rows))](
        theta, total, *_where(theta, start, rows), ident, *_shape(theta, rows), **EXACT
    )
    return int(total) % 2**64


def update(
    theta: torch.Tensor,
    ident: int,
    updates: Sequence[Update],
    *,
    start: int = 0,
    state: Sequence[State] = (),
    rows: Rows | None = None,
) -> Trace:
    """As reference.update; `state` holds torch tensors."""
    plan = Plan.of(updates, theta.device)
    plan.apply(theta, ident, start=start, state=state, rows=rows)
    return plan.trace()


class Plan:
    """Updates that are applied to many pieces of theta: their members are on the device once, and so are the sums.

        plan = Plan.of(updates, device)
        for piece in pieces:
            plan.apply(piece, ...)     # queued on the current stream
        plan.trace()                   # waits

    All calls are on one stream: the sums of squares are added without atomics. One pass over a piece, unless the
    number of subspaces changes between versions.
    """

    def __init__(self, versions: Sequence["_Versions"], device: torch.device) -> None:
        self._versions = versions
        count = sum(len(group) for group in versions)
        self._digests = torch.zeros(2, count, dtype=torch.int64, device=device)
        """Of pieces that do not count, and of those that do."""
        self._squares = torch.zeros(2, count, PROGRAMS, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, updates: Sequence[Update], device: torch.device) -> Self:
        groups = groupby(updates, key=lambda version: version.num_subspaces)
        return cls([_Versions(list(group), device) for _, group in groups], device)

    def apply(
        self,
        theta: torch.Tensor,
        ident: int,
        *,
        start: int = 0,
        state: Sequence[State] = (),
        rows: Rows | None = None,
        counts: bool = True,
    ) -> None:
        """As reference.update, in place. A piece that does not count, such as a second copy, is not in the trace."""
        begin = 0
        for group in self._versions:
            here = slice(begin, begin + len(group))
            begin = here.stop
            group.apply(
                theta, ident, start, state, rows, self._digests[int(counts), here], self._squares[int(counts), here]
            )

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Digests (int64 [V], modulo 2^64) and sums of squares (float64 [V]) so far, on the device."""
        return self._digests[1], self._squares[1].sum(1)

    def trace(self) -> Trace:
        """Of all pieces so far; waits for them."""
        digests, squares = self.sums()
        return Trace([total % 2**64 for total in digests.tolist()], squares.tolist())


class _Versions:
    """Consecutive versions with one number of subspaces, on the device."""

    def __init__(self, updates: Sequence[Update], device: torch.device) -> None:
        def flat(values: str, dtype: Any) -> torch.Tensor:
            """Of all members; absent values are zeros."""
            each = [getattr(version, values) or [0] * len(version.seeds) for version in updates]
            return _on(device, np.concatenate([np.array(own, dtype) for own in each]))

        steps = [version.step or Step(0.0, 0.0, 0.0) for version in updates]
        scalars = [(s.rate, s.decay_m, s.gain_m, s.decay_v, s.gain_v, s.epsilon) for s in steps]
        self._num_versions, self._num_subspaces = len(updates), updates[0].num_subspaces
        self._tensors = (
            _on(device, np.cumsum([0, *(len(version.seeds) for version in updates)]).astype(np.int32)),
            *(flat("seeds", np.uint64), flat("coefficients", np.float32)),
            *(flat("subspaces", np.int32), flat("partition_seeds", np.uint64)),
            _on(device, np.array(scalars, np.float32)),
        )

    def __len__(self) -> int:
        return self._num_versions

    def apply(
        self,
        theta: torch.Tensor,
        ident: int,
        start: int,
        state: Sequence[State],
        rows: Rows | None,
        digests: torch.Tensor,
        squares: torch.Tensor,
    ) -> None:
        m, v = [*(kept.values for kept in state), theta, theta][:2]
        ident_m, ident_v = [*(kept.ident for kept in state), 0, 0][:2]
        update_kernel[_grid(_count(theta, rows))](
            *(theta, m, v, digests, squares, _gauss(theta.device), *self._tensors),
            *(*_where(theta, start, rows), ident, ident_m, ident_v, self._num_versions, PROGRAMS),
            *(len(state), self._num_subspaces, *_shape(theta, rows)),
            **EXACT,
        )


# --- arguments of a launch ------------------------------------------------------------------------------------------


def _count(theta: torch.Tensor, rows: Rows | None) -> int:
    """How many values a pass is over."""
    if rows is None:
        return theta.numel()
    full, rest = divmod(theta.numel(), rows.pitch)
    return full * rows.width + min(rest, rows.width)


def _grid(count: int) -> tuple[int]:
    return (max(1, min(PROGRAMS, triton.cdiv(count, BLOCK * TILE))),)


def _where(theta: torch.Tensor, start: int, rows: Rows | None) -> tuple[int, ...]:
    """size, first, width, stride, pitch, reciprocal. The reciprocal gives the row of a block by one multiplication."""
    width, stride, pitch = (length // BLOCK for length in rows or (BLOCK, BLOCK, BLOCK))
    return _count(theta, rows), start // BLOCK, width, stride, pitch, -(-(2**63) // width)


def _shape(theta: torch.Tensor, rows: Rows | None, itemsize: int = 4) -> tuple[bool, bool, int, int]:
    """ROWS, ALIGNED (whole blocks only), W (16 bytes of items) and B."""
    return rows is not None, theta.numel() % BLOCK == 0, 16 // itemsize, TILE


def _on(device: torch.device, array: Any) -> torch.Tensor:
    """At least one element, as a kernel wants an address; uint64 as the int64 of the same bits."""
    array = array.reshape(-1) if array.size else np.zeros(1, array.dtype)
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array).to(device)


@cache
def _gauss(device: torch.device) -> torch.Tensor:
    """The first half of the table, int16 [32768]."""
    return torch.from_numpy(table()[: table().size // 2].copy()).to(device)
