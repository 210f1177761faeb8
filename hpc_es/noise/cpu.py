"""The passes of reference.py for the CPU, over contiguous numpy arrays, with the same bits.

Invariant: results do not depend on how a tensor is split, as long as it is split between blocks. `start` is a multiple
of BLOCK, except in `noise`. All passes release the GIL; the caller provides the threads.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hpc_es.noise.cpu_kernels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    digest_kernel,
    low_rank_perturb_kernel,
    low_rank_update_kernel,
    noise_kernel,
    perturb_kernel,
    update_kernel,
)
from hpc_es.noise.reference import (
    BLOCK,
    Array,
    Matrix,
    Perturbation,
    Rows,
    State,
    Step,
    Trace,
    Update,
    reaches,
    table,
    without_members,
)

_NONE = np.empty(0, np.float32)


def noise(seed: int, ident: int, start: int, count: int) -> Array:
    """See reference.noise."""
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    out = np.empty(BLOCK * (last - first), np.int16)
    noise_kernel(out, np.uint64(ident), np.uint64(seed), first, table())
    return out[start - BLOCK * first :][:count]


def perturb(
    theta: Array,
    out: Array,
    ident: int,
    noisy: Perturbation | None,
    *,
    start: int = 0,
    rows: Rows | None = None,
    matrix: Matrix | None = None,
) -> int:
    """See reference.perturb; arrays must be contiguous."""
    kind = {"f": FLOAT32, "H": BFLOAT16, "e": FLOAT16}[out.dtype.char]
    out32 = out if kind == FLOAT32 else np.empty(0, np.float32)
    out16 = np.empty(0, np.uint16) if kind == FLOAT32 else out.view(np.uint16)
    if noisy is not None and not reaches(noisy.rank, matrix):
        noisy = None
    member, digests = noisy or Perturbation(0, 0.0), np.zeros(1, np.uint64)
    where = theta, out32, out16, kind, np.uint64(ident), start // BLOCK, *_rows(theta, rows)
    if member.rank and matrix:
        low_rank_perturb_kernel(
            *(*where, np.uint64(member.seed), np.float32(member.scale), member.rank, *_matrix(matrix)),
            *(table(), digests),
        )
        return int(digests[0])
    perturb_kernel(
        *(*where, noisy is not None),
        *(np.uint64(member.seed), np.float32(member.scale), member.subspace, member.num_subspaces),
        *(np.uint64(member.partition_seed), table(), digests),
    )
    return int(digests[0])


def update(
    theta: Array,
    ident: int,
    updates: Sequence[Update],
    *,
    start: int = 0,
    state: Sequence[State] = (),
    rows: Rows | None = None,
    matrix: Matrix | None = None,
) -> Trace:
    """See reference.update; applies versions of full rank in one pass, and those of low rank in one each. Arrays must
    be contiguous."""
    reached = [version if reaches(version.rank, matrix) else without_members(version) for version in updates]
    digests, squares = np.zeros(len(updates), np.uint64), np.zeros(len(updates))
    where = theta, *_state(state), _idents(ident, state), start // BLOCK, *_rows(theta, rows)
    begin = 0
    for is_low, group in groupby(reached, key=lambda version: version.rank > 0 and len(version.seeds) > 0):
        versions = list(group)
        sums = digests[begin : begin + len(versions)], squares[begin : begin + len(versions)]
        begin += len(versions)
        if is_low and matrix:
            _update_low_rank(where, versions, matrix, sums)
        else:
            _update_full_rank(where, versions, sums)
    return Trace([int(digest) for digest in digests], [float(square) for square in squares])


def _update_full_rank(where: tuple[Any, ...], updates: Sequence[Update], sums: tuple[Array, Array]) -> None:
    none = [0] * max(len(version.seeds) for version in updates)
    update_kernel(
        *where,
        np.cumsum([0, *(len(version.seeds) for version in updates)]),
        np.array([seed for version in updates for seed in version.seeds], np.uint64),
        np.array([c for version in updates for c in version.coefficients], np.float32),
        np.array([own for version in updates for own in version.subspaces or none[: len(version.seeds)]], np.int64),
        np.array([version.num_subspaces for version in updates], np.int64),
        np.array([p for version in updates for p in version.partition_seeds or none[: len(version.seeds)]], np.uint64),
        np.array([_scalars(version.step) for version in updates], np.float32).reshape(-1, 6),
        *(table(), *sums),
    )


def _update_low_rank(
    where: tuple[Any, ...], updates: Sequence[Update], matrix: Matrix, sums: tuple[Array, Array]
) -> None:
    for version, digest, square in zip(updates, *(values.reshape(-1, 1) for values in sums), strict=True):
        low_rank_update_kernel(
            *(*where, np.array(version.seeds, np.uint64), np.array(version.coefficients, np.float32), version.rank),
            *(*_matrix(matrix), np.array(_scalars(version.step), np.float32), table(), digest, square),
        )


def digest(theta: Array, ident: int, *, start: int = 0, rows: Rows | None = None) -> int:
    """See reference.digest; theta must be contiguous."""
    total = np.zeros(1, np.uint64)
    digest_kernel(theta.view(np.uint32), np.uint64(ident), start // BLOCK, *_rows(theta, rows), total)
    return int(total[0])


def _rows(theta: Array, rows: Rows | None) -> Rows:
    return rows or Rows(*[max(theta.size, 1)] * 3)


def _state(state: Sequence[State]) -> list[Array]:
    """m and v, empty where there is none."""
    return [*(s.values for s in state), _NONE, _NONE][:2]


def _idents(ident: int, state: Sequence[State]) -> Array:
    return np.array([ident, *(s.ident for s in state)], np.uint64)


def _scalars(step: Step | None) -> tuple[float, ...]:
    s = step or Step(0.0, 0.0, 0.0)
    return s.rate, s.decay_m, s.gain_m, s.decay_v, s.gain_v, s.epsilon


def _matrix(matrix: Matrix) -> tuple[Any, ...]:
    return matrix.num_rows, matrix.num_columns, np.uint64(matrix.ident_a), np.uint64(matrix.ident_b)
