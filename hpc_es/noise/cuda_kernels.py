"""The device side of cuda.py, in Triton: one streaming pass over many pieces of theta.

Invariant: with the options that cuda.py launches with, no arithmetic is fused or approximated, and no sum depends on
timing: digests are sums of integers, and every program has its own cell in the sum of squares. A kernel is never
specialised on the value of an argument, so the code that runs is the code that was tested, and nothing is compiled in
the middle of a run.

A launch covers runs of up to RUN tiles. A table on the device describes the pieces of these runs, one row of FIELDS per
piece.

A tile is B blocks, one per thread, so that the eight values of a Philox call stay in the thread that makes them. Its
8 * B elements are in the order (part of the block, block, element of the part); a part is the W elements that a thread
moves at once, 16 bytes: 4 of fp32, or all 8 where the output has 16 bits. Sizes and positions are 64-bit, also in the
interpreter, which derives types from the values of arguments.

Noise is computed from line segments (segments.py), 8 KiB that tl.gather copies into shared memory for every tile. The
32 positions that a warp looks up in the full table, 64 KiB, would lie in about 31 cache lines, which L1 may serve one
by one; the segments come from the banks of shared memory in 6 cycles. The machine code for sm_90 has, per thread and
tile, 8 LDS.64, 4 STS.64 and two barriers, and per element 39 instructions in perturb and 26 per member in update: 3 and
2 more than with the table. B * 8 must differ from the number of segments: otherwise the compiler gives both the same
layout, and the stores conflict. These are counts, not timings on a GPU.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton
import triton.language as tl

from hpc_es.noise.reference import BLOCK
from hpc_es.noise.reference import DIGEST_INDEX as _INDEX_FACTOR
from hpc_es.noise.reference import DIGEST_TENSOR as _TENSOR_FACTOR
from hpc_es.noise.reference import PARTITION_DOMAIN as _PARTITION
from hpc_es.noise.segments import FIRST, OFFSET, SEGMENTS, SHIFT

_EIGHT = tl.constexpr(BLOCK)
FIELDS = (
    *("theta", "out", "m", "v"),
    *("ident", "ident_m", "ident_v"),
    *("size", "first", "width", "stride", "pitch", "reciprocal", "counts"),
)
"""Columns of the table of pieces, 64 bits each: addresses; tensor ids; number of values, first block in the tensor,
rows in blocks, ceil(2^63 / width), and whether sums include the piece."""

_NUM_FIELDS = tl.constexpr(len(FIELDS))
_THETA, _OUT, _M, _V, _IDENT, _IDENT_M, _IDENT_V, _SIZE, _FIRST, _WIDTH, _STRIDE, _PITCH, _RECIPROCAL, _COUNTS = map(
    tl.constexpr, range(len(FIELDS))
)
_INDEX, _TENSOR, _DOMAIN = tl.constexpr(_INDEX_FACTOR), tl.constexpr(_TENSOR_FACTOR), tl.constexpr(_PARTITION)
_FIRST_SEGMENT, _OFFSET, _SEGMENTS, _SHIFT = map(tl.constexpr, (FIRST, OFFSET, SEGMENTS, SHIFT))


# --- inside a tile of B blocks, 8 * B elements ----------------------------------------------------------------------


@triton.jit
def _words(block, key, ident_low, ident_high):  # type: ignore[no-untyped-def]
    """Philox4x32-10 of counters (block, ident), four words [B] each."""
    zero = (block * 0).to(tl.uint32)
    return tl.philox(key, block.to(tl.uint32), (block >> 32).to(tl.uint32), zero + ident_low, zero + ident_high)


@triton.jit
def _noise_of(block, seed, ident, lines, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Table values of a tile as fp32 [8 * B], from the line segments of segments.py."""
    a, b, c, d = _words(block, seed, ident.to(tl.uint32), (ident >> 32).to(tl.uint32))
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [B, 2, 2]: word 2 i + j of block at [block, i, j]
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [B, _EIGHT // W, W])
    halves = tl.reshape(tl.permute(halves, (1, 0, 2)), [_EIGHT * B])
    is_upper = halves >= 0x8000
    place = tl.where(is_upper, halves ^ 0xFFFF, halves)
    segment = ((place + _OFFSET).to(tl.float32).to(tl.uint32, bitcast=True) >> _SHIFT) - _FIRST_SEGMENT
    line = tl.gather(lines, segment.to(tl.int32), 0)
    value = (line.to(tl.uint32) + (line >> 32).to(tl.uint32) * place).to(tl.int32, bitcast=True) >> _SHIFT
    return tl.where(is_upper, -value, value).to(tl.float32)  # negated as an integer, so that there is no -0.0


@triton.jit
def _lines(segments):  # type: ignore[no-untyped-def]
    """The line segments, loaded once per program; they stay in registers."""
    return tl.load(segments + tl.arange(0, _SEGMENTS))


@triton.jit
def _zeros(values):  # type: ignore[no-untyped-def]
    """fp32 zeros, each in the thread of its value. The compiler would give tl.zeros another layout and convert the
    words of every member to it."""
    return (values.to(tl.uint32, bitcast=True) >> 16 >> 16).to(tl.float32, bitcast=True)


@triton.jit
def _owners(block, seed, ident, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subspace of each block: follow its final place in the group back through the Fisher-Yates swaps."""
    group, place = block // NUM, (block % NUM).to(tl.uint32)
    CALLS: tl.constexpr = (NUM + 2) // 4
    for back in tl.static_range(CALLS):
        call = CALLS - 1 - back
        high = ((ident >> 32).to(tl.uint32) ^ _DOMAIN) + call
        a, b, c, d = _words(group, seed, ident.to(tl.uint32), high.to(tl.uint32))
        place = _undo(place, d, 4 * call + 3, NUM)
        place = _undo(place, c, 4 * call + 2, NUM)
        place = _undo(place, b, 4 * call + 1, NUM)
        place = _undo(place, a, 4 * call, NUM)
    return place


@triton.jit
def _undo(place, word, swap, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place, before the given Fisher-Yates swap, of the entry now at `place`; unchanged if there is no such
    swap."""
    top = tl.maximum(NUM - 1 - swap, 0).to(tl.uint32)
    chosen = word % (top + 1)
    return tl.where(place == top, chosen, tl.where(place == chosen, top, place))


@triton.jit
def _spread(of_block, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Repeat one value per block [B] for each of its elements [8 * B]."""
    return tl.reshape(tl.broadcast_to(of_block[None, :, None], [_EIGHT // W, B, W]), [_EIGHT * B])


@triton.jit
def _lane(W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of each element within its block, 0 to 7, [8 * B]."""
    order = tl.arange(0, _EIGHT * B)
    return order // (W * B) * W + order % W


@triton.jit
def _elements(block, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions in memory of the elements of blocks, [8 * B]."""
    return tl.max_contiguous(tl.multiple_of(_spread(block, W, B) * _EIGHT + _lane(W, B), W), W)


@triton.jit
def _places(tile, where, ROWS: tl.constexpr, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's block indices in the tensor [B], and its elements' positions in theta and among the values [8 * B]."""
    first, width, stride, pitch, reciprocal = where
    value = tile * B + tl.arange(0, B).to(tl.int64)
    in_theta, in_tensor = value, first + value
    if ROWS:
        row = tl.umulhi((2 * value).to(tl.uint64), reciprocal).to(tl.int64)  # value // width
        in_theta += row * (pitch - width)
        in_tensor += row * (stride - width)
    return in_tensor.to(tl.uint64), _elements(in_theta, W, B), _elements(value, W, B)


# --- pieces -----------------------------------------------------------------------------------------------------------


@triton.jit
def _run(pieces, runs, run, ALIGNED: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fields of a run's piece, its number of values, the run's first tile, and the tile after its last."""
    piece, begin = pieces + tl.load(runs + 2 * run) * _NUM_FIELDS, tl.load(runs + 2 * run + 1)
    size = tl.load(piece + _SIZE)
    if ALIGNED:  # tells the compiler that no mask ends within 16 bytes, so that it moves them whole
        size = size // _EIGHT * _EIGHT
    return piece, size, begin, tl.minimum(begin + RUN, tl.cdiv(size, _EIGHT * B))


@triton.jit
def _unsigned(piece, FIELD: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(piece + FIELD).to(tl.uint64, bitcast=True)


@triton.jit
def _where(piece):  # type: ignore[no-untyped-def]
    """The fields that _places needs."""
    first, width, stride = tl.load(piece + _FIRST), tl.load(piece + _WIDTH), tl.load(piece + _STRIDE)
    return first, width, stride, tl.load(piece + _PITCH), _unsigned(piece, _RECIPROCAL)


@triton.jit
def _counts(piece):  # type: ignore[no-untyped-def]
    return tl.load(piece + _COUNTS) != 0


@triton.jit
def _memory(piece, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(piece + FIELD).to(tl.pointer_type(TYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


# --- digests, casts ---------------------------------------------------------------------------------------------------


@triton.jit
def _shares(values, block, ident, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shares of blocks in reference.digest, [B]; zeros add nothing. For element i = 8 * block + j, the factor 2 * i + 1
    equals 16 * block + (2 * j + 1)."""
    bits = values.to(tl.uint32, bitcast=True).to(tl.uint64)
    odd = (2 * _lane(W, B) + 1).to(tl.uint64)
    in_common = block * (2 * _EIGHT) * _INDEX + 2 * ident * _TENSOR
    return _of_block(bits, W, B) * in_common + _of_block(bits * odd, W, B) * _INDEX


@triton.jit
def _of_block(values, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over the eight elements of each block, [B]; every sum stays within one thread."""
    return tl.sum(tl.sum(tl.reshape(values, [_EIGHT // W, B, W]), 2), 0)


@triton.jit
def _add_digest(digest, shares):  # type: ignore[no-untyped-def]
    """Add shares to the digest atomically; the order does not matter, because they are integers."""
    tl.atomic_add(digest, tl.sum(shares, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _rounded(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """See reference.cast; returns bits. Rounds to nearest even with integers, because the interpreter's own conversion
    truncates."""
    bits = values.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if KIND == "bf16":
        quiet, rounded = (bits >> 16) | 0x40, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        quiet = ((bits >> 16) & 0x8000) | ((bits >> 13) & 0x3FF) | 0x7E00
        rounded = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.where(is_nan, quiet, rounded).to(tl.uint16)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(function: Callable[..., Any]) -> Any:
    """A Triton kernel that is compiled once. By default Triton compiles more variants, for arguments that equal 1 and
    for sizes and addresses that are multiples of 16."""
    plain = [name for name, kind in signature(function).parameters.items() if kind.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=plain)(function)


@_kernel
def perturb_kernel(  # type: ignore[no-untyped-def]
    pieces, runs, digest, segments, num_runs: tl.int32, seed: tl.uint64, scale: tl.float32, subspace: tl.int32,
    partition_seed: tl.uint64, NOISY: tl.constexpr, NUM: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr, W: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    shares, lines = tl.zeros([B], tl.uint64), _lines(segments)
    for run in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        piece, size, begin, end = _run(pieces, runs, run, ALIGNED, B, RUN)
        theta, ident, counts = _memory(piece, _THETA, tl.float32, ALIGNED), _unsigned(piece, _IDENT), _counts(piece)
        where, out = _where(piece), _memory(piece, _OUT, tl.float32 if KIND == "fp32" else tl.uint16, ALIGNED)
        for tile in range(begin, end):
            block, at, value = _places(tile, where, ROWS, W, B)
            inside = value < size
            values = tl.load(theta + at, mask=inside, other=0.0, eviction_policy="evict_first")
            shares += tl.where(counts, _shares(values, block, ident, W, B), 0)
            if NOISY:
                noisy = values + scale * _noise_of(block, seed, ident, lines, W, B)
                if NUM > 1:
                    mine = _spread(_owners(block, partition_seed, ident, NUM) == subspace, W, B)
                    noisy = tl.where(mine, noisy, values)
                values = noisy
            if KIND == "fp32":
                tl.store(out + value, values, mask=inside)
            else:
                tl.store(out + value, _rounded(values, KIND), mask=inside)
    _add_digest(digest, shares)


@_kernel
def update_kernel(  # type: ignore[no-untyped-def]
    pieces, runs, digests, digests_of_state, squares, segments, bounds, seeds, coefficients, subspaces, partition_seeds,
    steps, num_runs: tl.int32, num_versions: tl.int32, num_cells: tl.int32, STATES: tl.constexpr, NUM: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, W: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    lines = _lines(segments)
    for run in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        piece, size, begin, end = _run(pieces, runs, run, ALIGNED, B, RUN)
        theta, ident, counts = _memory(piece, _THETA, tl.float32, ALIGNED), _unsigned(piece, _IDENT), _counts(piece)
        where = _where(piece)
        m, v = _memory(piece, _M, tl.float32, ALIGNED), _memory(piece, _V, tl.float32, ALIGNED)
        for tile in range(begin, end):
            block, at, value = _places(tile, where, ROWS, W, B)
            inside = value < size
            counted = inside & counts
            now = tl.load(theta + at, mask=inside, other=0.0)
            mean, square = now * 0, now * 0
            if STATES > 0:
                mean = tl.load(m + at, mask=inside, other=0.0)
            if STATES > 1:
                square = tl.load(v + at, mask=inside, other=0.0)
            for version in range(num_versions):
                first, behind = tl.load(bounds + version), tl.load(bounds + version + 1)
                total, hit = _zeros(now), tl.zeros([_EIGHT * B], tl.int1)
                if NUM == 1:
                    hit = hit | (first < behind)
                for i in range(first, behind):
                    seed, coefficient = tl.load(seeds + i).to(tl.uint64, bitcast=True), tl.load(coefficients + i)
                    added = total + coefficient * _noise_of(block, seed, ident, lines, W, B)
                    if NUM > 1:
                        partition = tl.load(partition_seeds + i).to(tl.uint64, bitcast=True)
                        mine = _spread(_owners(block, partition, ident, NUM) == tl.load(subspaces + i), W, B)
                        added, hit = tl.where(mine, added, total), hit | mine
                    total = added
                change = total
                if STATES > 0:
                    step = steps + 6 * version
                    mean = tl.where(hit, tl.load(step + 1) * mean + tl.load(step + 2) * total, mean)
                    change = tl.load(step) * mean
                if STATES > 1:
                    moved = tl.load(step + 3) * square + tl.load(step + 4) * (total * total)
                    square = tl.where(hit, moved, square)
                    change = tl.div_rn(change, tl.sqrt_rn(square) + tl.load(step + 5))
                after = tl.where(hit, now + change, now)
                difference = tl.where(counted, after.to(tl.float64) - now.to(tl.float64), 0.0)
                now = after
                _add_digest(digests + version, _shares(tl.where(counted, now, 0.0), block, ident, W, B))
                if STATES > 0:
                    shares = _shares(tl.where(counted, mean, 0.0), block, _unsigned(piece, _IDENT_M), W, B)
                    if STATES > 1:
                        shares += _shares(tl.where(counted, square, 0.0), block, _unsigned(piece, _IDENT_V), W, B)
                    _add_digest(digests_of_state + version, shares)
                cell = squares + version * num_cells + tl.program_id(0)
                tl.store(cell, tl.load(cell) + tl.sum(difference * difference, 0))
            tl.store(theta + at, now, mask=inside)
            if STATES > 0:
                tl.store(m + at, mean, mask=inside)
            if STATES > 1:
                tl.store(v + at, square, mask=inside)


@_kernel
def digest_kernel(  # type: ignore[no-untyped-def]
    pieces, runs, digest, num_runs: tl.int32, ROWS: tl.constexpr, ALIGNED: tl.constexpr, W: tl.constexpr,
    B: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    shares = tl.zeros([B], tl.uint64)
    for run in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        piece, size, begin, end = _run(pieces, runs, run, ALIGNED, B, RUN)
        theta, ident, counts = _memory(piece, _THETA, tl.float32, ALIGNED), _unsigned(piece, _IDENT), _counts(piece)
        where = _where(piece)
        for tile in range(begin, end):
            block, at, value = _places(tile, where, ROWS, W, B)
            inside = value < size
            values = tl.load(theta + at, mask=inside, other=0.0)
            shares += tl.where(counts, _shares(values, block, ident, W, B), 0)
    _add_digest(digest, shares)
