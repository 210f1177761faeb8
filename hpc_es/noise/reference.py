"""The noise, the update and the digest, stated once in plain numpy: slow, and normative for every kernel.

Invariant: the noise of an element is a pure function of (seed, tensor name, element index). Blocks of eight
elements come from one Philox4x32-10 call (Salmon et al., SC 2011), whose eight 16-bit words index a Gaussian table.
An update changes neither theta nor the optimiser's state of an element that no member's noise reaches.

Noise of rank r > 0 (Sarkar et al., 2025) replaces T by the exact integer P = A B^T, where A and B hold r table values
per row and per column, addressed under names of their own. Only matrices have it; other tensors then get no noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 8
"""Elements per Philox call."""
MAX_SUBSPACES = 64
MAX_RANK = 16
TABLE_CRC32 = 0x546C8CB1

LOW, WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
DIGEST_INDEX, DIGEST_TENSOR = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
PARTITION_DOMAIN = 0x5BD1E995
"""Separates the Philox counters of the partition from those of the noise."""


class Rows(NamedTuple):
    """The elements of a tensor that a pass covers, if they are not contiguous: runs of `width` elements.

    Row r begins at element start + r * stride of the tensor, and at theta[r * pitch]: theta is the tensor's own memory
    (pitch == stride), or a compact copy (pitch == width). Elements between rows are neither read nor written. theta
    ends with the last row, which may be shorter. All three are multiples of BLOCK, and width <= pitch.
    """

    width: int
    stride: int
    pitch: int


class Matrix(NamedTuple):
    """A tensor as one or several matrices of num_rows x num_columns, one after the other, and the ids of A and B.

    Row i has the table values i * rank, i * rank + 1, ... of the id `ident_a`; columns have theirs under `ident_b`.
    Rows and columns are counted through all matrices.
    """

    num_rows: int
    num_columns: int
    ident_a: int
    ident_b: int


@dataclass(frozen=True)
class Perturbation:
    """One member's noise: theta + scale * T, in the blocks of its subspace."""

    seed: int
    scale: float
    """fp32(sigma * sign / 4096); with a rank, fp32(sigma * sign / (4096^2 * sqrt(rank)))."""
    subspace: int = 0
    num_subspaces: int = 1
    partition_seed: int = 0
    rank: int = 0
    """Rank of the noise of matrices, up to MAX_RANK, with one subspace; 0: full rank."""


@dataclass(frozen=True)
class Step:
    """How an optimiser turns the sum g into the change of theta (momentum: m alone; Adam: m and v). fp32 values."""

    rate: float
    decay_m: float
    gain_m: float
    decay_v: float = 0.0
    gain_v: float = 0.0
    epsilon: float = 0.0


@dataclass(frozen=True)
class Update:
    """One policy version's change of theta: the sum over members, in this order, of coefficient * T. Without members,
    nothing changes."""

    seeds: Sequence[int]
    coefficients: Sequence[float]
    """fp32 values, one per member."""
    subspaces: Sequence[int] = ()
    """One per member; may be empty when num_subspaces is 1."""
    num_subspaces: int = 1
    partition_seeds: Sequence[int] = ()
    """Seed of the partition of each member's subspace; may be empty when num_subspaces is 1."""
    step: Step | None = None
    """The optimiser's step that takes the sum as its gradient; None adds the sum itself."""
    rank: int = 0
    """Rank of the members' noise; see Perturbation."""


def without_members(version: Update) -> Update:
    """The update of a tensor that no member's noise reaches: nothing changes."""
    return replace(version, seeds=(), coefficients=(), subspaces=(), partition_seeds=())


class State(NamedTuple):
    """Optimiser state of a tensor, one value per element: m, or v."""

    values: Array
    """fp32 [n], for the same elements as the theta that is updated."""
    ident: int
    """Id of the state's own name, `<tensor>#m` or `<tensor>#v`, for the digest."""


@dataclass(frozen=True)
class Trace:
    """Results of updates, per version: the digest of theta and state, and the sum of squares of theta's change."""

    digests: list[int]
    squares: list[float]


@cache
def table() -> Array:
    """The Gaussian table T[i] = round(4096 * Phi^-1((i + 0.5) / 65536)), int16 [65536]; an odd function, so half of it
    determines the rest."""
    quantile = NormalDist().inv_cdf
    half = np.array([round(4096 * quantile((i + 0.5) / 65536)) for i in range(32768)], np.int16)
    return np.concatenate([half, -half[::-1]])


def tensor_id(name: str) -> int:
    """64-bit id of a canonical tensor name."""
    return int.from_bytes(blake2b(name.encode()).digest()[:8], "little")


def philox(counter: Sequence[Any], key: Sequence[Any]) -> list[Array]:
    """Philox4x32-10 on four counter words and two key words; arrays broadcast. Words are uint64 below 2^32."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    k, m = (np.asarray(word, np.uint64) for word in key)
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> WORD) ^ b ^ k, q & LOW, (p >> WORD) ^ d ^ m, p & LOW
        k, m = (k + np.uint64(0x9E3779B9)) & LOW, (m + np.uint64(0xBB67AE85)) & LOW
    return [a, b, c, d]


def noise(seed: int, ident: int, start: int, count: int) -> Array:
    """Table values T of elements start .. start + count - 1 of the tensor `ident`; int16 [count]."""
    blocks = np.arange(start // BLOCK, -(-(start + count) // BLOCK), dtype=np.uint64)
    counter = (blocks & LOW, blocks >> WORD, ident & 0xFFFFFFFF, ident >> 32)
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=-1).astype("<u4")
    skip = start % BLOCK
    return table()[words.view("<u2").ravel()[skip : skip + count]]


def low_rank_noise(seed: int, rank: int, matrix: Matrix, start: int, count: int) -> Array:
    """P = A B^T for elements start .. start + count - 1 of a matrix; int64 [count]."""
    rows, columns = np.divmod(np.arange(start, start + count), matrix.num_columns)
    columns += rows // matrix.num_rows * matrix.num_columns  # columns of earlier matrices of the tensor

    def factor(ident: int, places: Array) -> Array:
        first = int(places.min())
        values = noise(seed, ident, rank * first, rank * int(places.max() + 1 - first)).reshape(-1, rank)
        return values[places - first].astype(np.int64)

    return np.sum(factor(matrix.ident_a, rows) * factor(matrix.ident_b, columns), axis=1)


def noise_of(seed: int, rank: int, ident: int, matrix: Matrix | None, start: int, count: int) -> Array:
    """The noise of elements as fp32 [count], of full rank (0) or low; int -> fp32 rounds to nearest even."""
    if rank and matrix and count:
        return low_rank_noise(seed, rank, matrix, start, count).astype(np.float32)
    return noise(seed, ident, start, count).astype(np.float32)


def reaches(rank: int, matrix: Matrix | None) -> bool:
    """Whether noise of this rank reaches a tensor: noise of low rank is for matrices only."""
    return not rank or matrix is not None


def permutation(partition_seed: int, ident: int, group: int, num_subspaces: int) -> list[int]:
    """The subspace of each of the `num_subspaces` consecutive blocks of a group: Fisher-Yates from the top."""
    key, words = (partition_seed & 0xFFFFFFFF, partition_seed >> 32), list[int]()
    for call in range(-(-num_subspaces // 4)):
        high = ((ident >> 32 ^ PARTITION_DOMAIN) + call) & 0xFFFFFFFF
        words += map(int, philox((group & 0xFFFFFFFF, group >> 32, ident & 0xFFFFFFFF, high), key))
    order = list(range(num_subspaces))
    for word, remaining in zip(words, range(num_subspaces, 1, -1), strict=False):
        top, chosen = remaining - 1, word % remaining
        order[top], order[chosen] = order[chosen], order[top]
    return order


def subspaces(partition_seed: int, ident: int, start: int, count: int, num_subspaces: int) -> Array:
    """Subspace of each element, [count]. A last group with fewer blocks takes the first entries of its permutation."""
    if num_subspaces == 1 or count == 0:
        return np.zeros(count, np.int64)
    blocks = np.arange(start, start + count) // BLOCK
    groups = range(blocks[0] // num_subspaces, blocks[-1] // num_subspaces + 1)
    orders = np.array([permutation(partition_seed, ident, group, num_subspaces) for group in groups])
    return orders[blocks // num_subspaces - groups[0], blocks % num_subspaces]


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round fp32 to nearest even. A NaN stays a NaN: it becomes quiet and keeps its sign and the top of its payload."""
    if dtype == np.float32:
        return values
    bits = values.view(np.uint32)
    if dtype == np.uint16:
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint16)
    quiet = bits >> np.uint32(16) & np.uint32(0x8000) | bits >> np.uint32(13) & np.uint32(0x3FF) | np.uint32(0x7E00)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), quiet, half).astype(np.uint16).view(np.float16)


def stretches(size: int, start: int, rows: Rows | None) -> Iterator[tuple[slice, slice, int]]:
    """For each row: its slice of theta [size], its slice of the compact `out`, and its first element in the tensor."""
    if rows is None:
        yield slice(0, size), slice(0, size), start
        return
    for row in range(-(-size // rows.pitch)):
        place = row * rows.pitch
        width = min(rows.width, size - place)
        yield (
            slice(place, place + width),
            slice(row * rows.width, row * rows.width + width),
            start + row * rows.stride,
        )


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
    """Set out = round(theta + scale * T), or round(theta) where the member has no noise. Returns the digest of theta.

    theta is fp32 [n] and holds elements start .. start + n - 1, or those of `rows`; `out` holds the same number of
    elements, contiguous, as float32, float16, or uint16 for bfloat16 bits.
    """
    for place, compact, first in stretches(theta.size, start, rows):
        values = theta[place]
        if noisy is not None and reaches(noisy.rank, matrix):
            added = np.float32(noisy.scale) * noise_of(noisy.seed, noisy.rank, ident, matrix, first, values.size)
            owner = subspaces(noisy.partition_seed, ident, first, values.size, noisy.num_subspaces)
            values = np.where(owner == noisy.subspace, values + added, values)
        out[compact] = cast(values, out.dtype)
    return digest(theta, ident, start=start, rows=rows)


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
    """Apply versions one after the other to theta (fp32 [n], in place) and to the optimiser's state.

    `state` is empty, (m,) for momentum or (m, v) for Adam; every update has a `step` exactly when there is state.
    theta and state hold the elements of `rows`, or start .. start + n - 1.
    """
    trace = Trace([0] * len(updates), [0.0] * len(updates))
    for place, _, first in stretches(theta.size, start, rows):
        beside = [State(kept.values[place], kept.ident) for kept in state]
        for number, version in enumerate(updates):
            reached = version if reaches(version.rank, matrix) else without_members(version)
            share, square = advance(theta[place], ident, reached, first, beside, matrix)
            trace.digests[number] = (trace.digests[number] + share) % 2**64
            trace.squares[number] += square
    return trace


def advance(
    theta: Array, ident: int, version: Update, start: int, state: Sequence[State], matrix: Matrix | None
) -> tuple[int, float]:
    """Apply one version to contiguous elements; return the digest and the sum of squares of theta's change."""
    before, total, hit = theta.copy(), np.zeros_like(theta), np.zeros(theta.shape, bool)
    own, partitions = version.subspaces or [0] * len(version.seeds), version.partition_seeds or [0] * len(version.seeds)
    for seed, coefficient, subspace, partition in zip(
        version.seeds, version.coefficients, own, partitions, strict=True
    ):
        mine = subspaces(partition, ident, start, theta.size, version.num_subspaces) == subspace
        added = np.float32(coefficient) * noise_of(seed, version.rank, ident, matrix, start, theta.size)
        total = np.where(mine, total + added, total)
        hit |= mine
    change = total if version.step is None else optimise(version.step, total, hit, [s.values for s in state])
    theta[hit] += change[hit]
    parts = [digest(theta, ident, start=start), *(digest(s.values, s.ident, start=start) for s in state)]
    return sum(parts), float(np.sum((theta.astype(np.float64) - before) ** 2))


def optimise(step: Step, gradient: Array, hit: Array, state: Sequence[Array]) -> Array:
    """Advance m (and v) where `hit`; return the change of theta. Every operation rounds to fp32, none is fused.

    Momentum (Polyak, 1964; as a running mean): m = decay_m * m + gain_m * g; the change is rate * m.
    Adam (Kingma & Ba, 2015): also v = decay_v * v + gain_v * (g * g); the change is (rate * m) / (sqrt(v) + epsilon).
    """
    rate, decay_m, gain_m, decay_v, gain_v, epsilon = map(
        np.float32, (step.rate, step.decay_m, step.gain_m, step.decay_v, step.gain_v, step.epsilon)
    )
    m, *rest = state
    m[hit] = (decay_m * m + gain_m * gradient)[hit]
    if not rest:
        return rate * m
    (v,) = rest
    v[hit] = (decay_v * v + gain_v * (gradient * gradient))[hit]
    return (rate * m) / (np.sqrt(v) + epsilon)


def digest(theta: Array, ident: int, *, start: int = 0, rows: Rows | None = None) -> int:
    """Digest of theta (fp32 [n]): the sum of bits32(theta_i) times an odd factor of (i, ident), modulo 2^64."""
    total = 0
    for place, _, first in stretches(theta.size, start, rows):
        bits = theta[place].view(np.uint32).astype(np.uint64)
        index = np.arange(first, first + bits.size, dtype=np.uint64)
        factor = (2 * index + 1) * np.uint64(DIGEST_INDEX) + np.uint64(2 * ident * DIGEST_TENSOR % 2**64)
        total += int(np.sum(bits * factor, dtype=np.uint64))
    return total % 2**64
