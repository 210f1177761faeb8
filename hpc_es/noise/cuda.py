"""The passes of reference.py for GPUs, on contiguous torch tensors of one device, with the same bits.

Invariant: results do not depend on how a tensor is split, as long as it is split between blocks. Kernels are queued on
torch's current stream, and only the calls that return a Python number (`digest`, `update`, `Plan.trace`) wait for the
device. A pass over many pieces takes a few launches (see Pieces), because each launch costs tens of microseconds of
Python.

If TRITON_INTERPRET=1 is set before the first import, the same code runs slowly on a CPU. Tests use this on machines
without a GPU, in a process of their own.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import triton

from hpc_es.errors import EngineError
from hpc_es.noise.cuda_kernels import FIELDS, digest_kernel, perturb_kernel, update_kernel
from hpc_es.noise.reference import BLOCK, Perturbation, Rows, State, Step, Trace, Update
from hpc_es.noise.segments import segments

TILE = 256
"""Blocks per tile, one per thread of a program: 2,048 elements."""
RUN = 8
"""Consecutive tiles of a piece that one program processes at a time."""
PROGRAMS = 2048
"""Most programs per launch; each processes many runs."""

EXACT: dict[str, Any] = {"num_warps": TILE // 32, "enable_fp_fusion": False}
"""Options of every launch. Without fusion, an fp32 multiply is rounded before the fp32 add, as on the CPU; Triton does
not flush subnormals to zero."""

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def zero(device: torch.device) -> torch.Tensor:
    """Zero as the start of a digest sum: int64 [] on the device."""
    return torch.zeros([], dtype=torch.int64, device=device)


class Piece(NamedTuple):
    """Elements of a tensor, as in reference.py, with their output and optimiser state."""

    theta: torch.Tensor
    ident: int
    start: int = 0
    rows: Rows | None = None
    out: torch.Tensor | None = None
    """The engine's live memory: float32, bfloat16 or float16."""
    state: Sequence[State] = ()
    """Optimiser state, as torch tensors."""
    trained: bool = True
    """Whether noise and updates apply to it."""
    counts: bool = True
    """Whether digests and traces include it; a second copy of the same elements is left out."""


class Pieces:
    """Pieces of theta on one device. Their addresses are uploaded once, so their memory must not move. Passes are
    queued on the current stream."""

    def __init__(self, pieces: Iterable[Piece], device: torch.device) -> None:
        kinds: dict[_Kind, list[Piece]] = {}
        for piece in pieces:
            kinds.setdefault(_Kind.of(piece), []).append(piece)
        self.groups = [_Group(kind, alike, device) for kind, alike in kinds.items()]

    def perturb(self, noisy: Perturbation | None, total: torch.Tensor) -> None:
        """See reference.perturb; fills `out` of every piece and adds the digest to `total` (int64 [] on the device)."""
        for group in self.groups:
            group.perturb(noisy, total)

    def digest(self, total: torch.Tensor) -> None:
        """See reference.digest; adds the digest to `total`."""
        for group in self.groups:
            group.digest(total)


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
    """See reference.perturb; `out` is float32, bfloat16 or float16. Returns the digest, added to `total` if given
    (int64 [] on the device, modulo 2^64)."""
    total = zero(theta.device) if total is None else total
    Pieces([Piece(theta, ident, start, rows, out)], theta.device).perturb(noisy, total)
    return total


def digest(theta: torch.Tensor, ident: int, *, start: int = 0, rows: Rows | None = None) -> int:
    """See reference.digest."""
    total = zero(theta.device)
    Pieces([Piece(theta, ident, start, rows)], theta.device).digest(total)
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
    """See reference.update; `state` holds torch tensors."""
    plan = Plan.of(updates, theta.device)
    plan.apply(theta, ident, start=start, state=state, rows=rows)
    return plan.trace()


class Plan:
    """Updates to apply to many pieces of theta. Their members are copied to the device once, and sums stay there.

        plan = Plan.of(updates, device)
        for some in pieces:
            plan.run(some)             # queued on the current stream
        plan.trace()                   # waits

    All calls must use one stream, because sums of squares are added without atomics. A piece is read once, unless the
    number of subspaces changes between versions.
    """

    def __init__(self, versions: Sequence["_Versions"], device: torch.device) -> None:
        self._versions = versions
        count = sum(len(group) for group in versions)
        self._digests = torch.zeros(2, count, dtype=torch.int64, device=device)
        """Row 0: digests of theta; row 1: digests of the optimiser's state."""
        self._squares = torch.zeros(count, PROGRAMS, dtype=torch.float64, device=device)
        self.digest_of_state = 0
        """The optimiser state's share of the digest after the last version; set by `trace`."""

    @classmethod
    def of(cls, updates: Sequence[Update], device: torch.device) -> Self:
        groups = groupby(updates, key=lambda version: version.num_subspaces)
        return cls([_Versions(list(group), device) for _, group in groups], device)

    def run(self, pieces: Pieces) -> None:
        """See reference.update; updates the trained pieces in place."""
        begin = 0
        for versions in self._versions:
            here = slice(begin, begin + len(versions))
            begin = here.stop
            for group in pieces.groups:
                group.update(versions, self._digests[:, here], self._squares[here])

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
        """Update one piece. With counts=False, as for a second copy, the trace leaves it out."""
        self.run(Pieces([Piece(theta, ident, start, rows, None, state, True, counts)], theta.device))

    def trace(self) -> Trace:
        """The trace of all pieces so far; waits for the device once."""
        sums = torch.cat([self._digests, self._squares.sum(1).view(torch.int64)[None]]).cpu()
        of_theta, of_state = sums[0].tolist(), sums[1].tolist()
        self.digest_of_state = sum(of_state[-1:]) % 2**64
        both = [(theta + state) % 2**64 for theta, state in zip(of_theta, of_state, strict=True)]
        return Trace(both, sums[2].view(torch.float64).tolist())


class _Versions:
    """Consecutive versions with one number of subspaces, on the device."""

    def __init__(self, updates: Sequence[Update], device: torch.device) -> None:
        def flat(values: str, dtype: Any) -> torch.Tensor:
            """The given field of all members of all versions; zeros where a version leaves it empty."""
            each = [getattr(version, values) or [0] * len(version.seeds) for version in updates]
            return _on(device, np.concatenate([np.array(own, dtype) for own in each]))

        _refuse_low_rank(max(version.rank for version in updates))
        steps = [version.step or Step(0.0, 0.0, 0.0) for version in updates]
        scalars = [(s.rate, s.decay_m, s.gain_m, s.decay_v, s.gain_v, s.epsilon) for s in steps]
        self._num_versions, self.num_subspaces = len(updates), updates[0].num_subspaces
        self.tensors = (
            _on(device, np.cumsum([0, *(len(version.seeds) for version in updates)]).astype(np.int32)),
            *(flat("seeds", np.uint64), flat("coefficients", np.float32)),
            *(flat("subspaces", np.int32), flat("partition_seeds", np.uint64)),
            _on(device, np.array(scalars, np.float32)),
        )

    def __len__(self) -> int:
        return self._num_versions


# --- launches -------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What pieces must have in common to share one launch."""

    dtype: torch.dtype
    """Type of the output."""
    trained: bool
    num_states: int
    has_rows: bool
    aligned: bool
    """Whether the piece is whole blocks and its memory can be moved 16 bytes at a time."""

    @classmethod
    def of(cls, piece: Piece) -> Self:
        memory = _memory(piece)
        aligned = piece.theta.numel() % BLOCK == 0 and all(values.data_ptr() % 16 == 0 for values in memory)
        return cls(memory[1].dtype, piece.trained, len(piece.state), piece.rows is not None, aligned)


class _Group:
    """Pieces of one kind, with the device table that describes them and the runs that they are split into."""

    def __init__(self, kind: _Kind, pieces: Sequence[Piece], device: torch.device) -> None:
        self._kind, self._segments = kind, _segments(device)
        self._memory = [_memory(piece) for piece in pieces]  # keeps it alive while the table holds addresses
        fields = [_fields(piece) for piece in pieces]
        num_tiles = [triton.cdiv(int(values[FIELDS.index("size")]), BLOCK * TILE) for values in fields]
        runs = [(number, tile) for number, tiles in enumerate(num_tiles) for tile in range(0, tiles, RUN)]
        self._num_runs = len(runs)
        self._table = _on(device, np.array(fields, np.uint64)), _on(device, np.array(runs, np.int64))

    def perturb(self, noisy: Perturbation | None, total: torch.Tensor) -> None:
        noisy = noisy if self._kind.trained else None
        _refuse_low_rank(noisy.rank if noisy else 0)
        member, kind = noisy or Perturbation(0, 0.0), self._kind.dtype
        perturb_kernel[self._grid()](
            *(*self._table, total, self._segments, self._num_runs),
            *(member.seed, member.scale, member.subspace, member.partition_seed),
            *(noisy is not None, member.num_subspaces, _KINDS[kind], *self._shape(kind.itemsize)),
            **EXACT,
        )

    def update(self, versions: _Versions, digests: torch.Tensor, squares: torch.Tensor) -> None:
        """Apply the versions; add to `digests` [2, V] and `squares` [V, PROGRAMS]."""
        if self._kind.trained:
            update_kernel[self._grid()](
                *(*self._table, digests[0], digests[1], squares, self._segments, *versions.tensors),
                *(self._num_runs, len(versions), PROGRAMS),
                *(self._kind.num_states, versions.num_subspaces, *self._shape()),
                **EXACT,
            )

    def digest(self, total: torch.Tensor) -> None:
        digest_kernel[self._grid()](*self._table, total, self._num_runs, *self._shape(), **EXACT)

    def _grid(self) -> tuple[int]:
        return (max(1, min(PROGRAMS, self._num_runs)),)

    def _shape(self, itemsize: int = 4) -> tuple[bool, bool, int, int, int]:
        """The compile-time arguments ROWS, ALIGNED, W (items in 16 bytes), B and RUN."""
        return self._kind.has_rows, self._kind.aligned, 16 // itemsize, TILE, RUN


def _refuse_low_rank(rank: int) -> None:
    """Errors: EngineError when noise of low rank is asked of a GPU."""
    if rank:
        raise EngineError(
            f"es.rank={rank} has no kernels for GPUs yet, so a GPU cannot hold such members: use workers whose engine "
            "is on the CPU, or es.rank=0"
        )


def _memory(piece: Piece) -> list[torch.Tensor]:
    """theta, the output (theta again if there is none), and the state."""
    return [piece.theta, piece.theta if piece.out is None else piece.out, *(kept.values for kept in piece.state)]


def _fields(piece: Piece) -> list[int]:
    """The piece's row of the table (see FIELDS)."""
    addresses = [values.data_ptr() for values in _memory(piece)]
    idents = [piece.ident, *(kept.ident for kept in piece.state)]
    width, stride, pitch = (length // BLOCK for length in piece.rows or (BLOCK, BLOCK, BLOCK))
    count = _count(piece.theta, piece.rows)
    where = [count, piece.start // BLOCK, width, stride, pitch, -(-(2**63) // width), int(piece.counts)]
    return [*(*addresses, 0, 0)[:4], *(*idents, 0, 0)[:3], *where]


def _count(theta: torch.Tensor, rows: Rows | None) -> int:
    """Number of values that a pass covers."""
    if rows is None:
        return theta.numel()
    full, rest = divmod(theta.numel(), rows.pitch)
    return full * rows.width + min(rest, rows.width)


def _on(device: torch.device, array: Any) -> torch.Tensor:
    """Copy an array to the device; uint64 becomes int64 with the same bits. An empty array becomes one zero, because a
    kernel needs an address."""
    array = array.reshape(-1) if array.size else np.zeros(1, array.dtype)
    values = torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


@cache
def _segments(device: torch.device) -> torch.Tensor:
    """The noise table's segments on a device, int64 [1024]; copied once."""
    return torch.from_numpy(segments()).to(device)
