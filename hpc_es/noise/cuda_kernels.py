"""The device side of cuda.py, in Triton: one streaming pass over a run of blocks, or over rows of them.

Invariant: nothing is fused or approximated at the options that cuda.py launches with, and nothing is added in an order
that chance decides: digests are sums of integers, and every program owns its cell of the sum of squares.

A tile is B blocks, one per thread, so that the eight values of a Philox call stay in the thread that makes them. Its
8 * B elements are in the order (part of the block, block, element of the part); a part is the W elements that a thread
moves at once, 16 bytes: 4 of fp32, or all 8 where the output has 16 bits. Sizes and places are counted in 64 bits, also
in the interpreter, which goes by the value of an argument.
"""

import triton
import triton.language as tl

from hpc_es.noise.reference import BLOCK
from hpc_es.noise.reference import DIGEST_INDEX as _INDEX_FACTOR
from hpc_es.noise.reference import DIGEST_TENSOR as _TENSOR_FACTOR
from hpc_es.noise.reference import PARTITION_DOMAIN as _PARTITION

_EIGHT = tl.constexpr(BLOCK)
_INDEX, _TENSOR, _DOMAIN = tl.constexpr(_INDEX_FACTOR), tl.constexpr(_TENSOR_FACTOR), tl.constexpr(_PARTITION)


# --- inside a tile of B blocks, 8 * B elements ----------------------------------------------------------------------


@triton.jit
def _words(block, key, ident_low, ident_high):  # type: ignore[no-untyped-def]
    """Philox4x32-10 of counters (block, ident), four words [B] each."""
    zero = (block * 0).to(tl.uint32)
    return tl.philox(key, block.to(tl.uint32), (block >> 32).to(tl.uint32), zero + ident_low, zero + ident_high)


@triton.jit
def _noise_of(block, seed, ident, gauss, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Table values of a tile as fp32 [8 * B]. `gauss` is the first half of the table, which is odd: 64 KiB for the L1
    cache."""
    a, b, c, d = _words(block, seed, ident.to(tl.uint32), (ident >> 32).to(tl.uint32))
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [B, 2, 2]: word 2 i + j of block at [block, i, j]
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [B, _EIGHT // W, W])
    halves = tl.reshape(tl.permute(halves, (1, 0, 2)), [_EIGHT * B])
    is_upper = halves >= 0x8000
    value = tl.load(gauss + tl.where(is_upper, halves ^ 0xFFFF, halves)).to(tl.float32)
    return tl.where(is_upper, -value, value)


@triton.jit
def _owners(block, seed, ident, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subspace of each block. Where the Fisher-Yates swaps of its group end is followed back to where it began."""
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
    """Where what is at `place` was before the given swap of Fisher-Yates, if there is such a swap."""
    top = tl.maximum(NUM - 1 - swap, 0).to(tl.uint32)
    chosen = word % (top + 1)
    return tl.where(place == top, chosen, tl.where(place == chosen, top, place))


@triton.jit
def _spread(of_block, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """[B] of blocks -> [8 * B] of their elements."""
    return tl.reshape(tl.broadcast_to(of_block[None, :, None], [_EIGHT // W, B, W]), [_EIGHT * B])


@triton.jit
def _lane(W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of its block's eight each element is, [8 * B]."""
    order = tl.arange(0, _EIGHT * B)
    return order // (W * B) * W + order % W


@triton.jit
def _elements(block, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in memory the elements of blocks are, [8 * B]."""
    return tl.max_contiguous(tl.multiple_of(_spread(block, W, B) * _EIGHT + _lane(W, B), W), W)


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    tile, first, width, stride, pitch, reciprocal, ROWS: tl.constexpr, W: tl.constexpr, B: tl.constexpr
):
    """Of a tile: its blocks of the tensor [B]; where its elements are in theta, and among the values [8 * B]."""
    value = tile * B + tl.arange(0, B).to(tl.int64)
    in_theta, in_tensor = value, first + value
    if ROWS:
        row = tl.umulhi((2 * value).to(tl.uint64), reciprocal.to(tl.uint64)).to(tl.int64)  # value // width
        in_theta += row * (pitch - width)
        in_tensor += row * (stride - width)
    return in_tensor.to(tl.uint64), _elements(in_theta, W, B), _elements(value, W, B)


@triton.jit
def _size_of(size, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The compiler learns that a mask never falls within 16 bytes."""
    if ALIGNED:
        size = size // _EIGHT * _EIGHT
    return size.to(tl.int64)


@triton.jit
def _bits(values, inside):  # type: ignore[no-untyped-def]
    return tl.where(inside, values.to(tl.uint32, bitcast=True), 0).to(tl.uint64)


@triton.jit
def _digest_of(plain, weighted, ident, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Share of reference.digest, from the bits and the bits times block, each summed place by place of a tile: for
    element i = 8 * block + j the factor 2 * i + 1 is 16 * block + (2 * j + 1)."""
    odd = (2 * _lane(W, B) + 1).to(tl.uint64)
    return tl.sum(plain * (odd * _INDEX + 2 * ident * _TENSOR) + weighted * (2 * _EIGHT) * _INDEX, 0)


@triton.jit
def _share_of(values, block, inside, ident, W: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """A single tile's share."""
    bits = _bits(values, inside)
    return _digest_of(bits, bits * _spread(block, W, B), ident, W, B)


@triton.jit
def _add_digest(digest, share):  # type: ignore[no-untyped-def]
    """Integers: the order of additions does not matter."""
    tl.atomic_add(digest, share.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _rounded(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """As reference.cast, as bits: to nearest even by integers, as the interpreter's own conversion truncates."""
    bits = values.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if KIND == "bf16":
        quiet, rounded = (bits >> 16) | 0x40, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        quiet = ((bits >> 16) & 0x8000) | ((bits >> 13) & 0x3FF) | 0x7E00
        rounded = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.where(is_nan, quiet, rounded).to(tl.uint16)


# --- kernels: whole tensors, runs of their blocks, or rows ------------------------------------------------------------
# size: values. first: block of the tensor. width, stride, pitch: of rows, in blocks; reciprocal = ceil(2^63 / width).


@triton.jit
def perturb_kernel(  # type: ignore[no-untyped-def]
    theta, out, digest, gauss, size: tl.int64, first: tl.int64, width: tl.int64, stride: tl.int64, pitch: tl.int64,
    reciprocal: tl.uint64, ident: tl.uint64, seed: tl.uint64, scale: tl.float32, subspace: tl.int32,
    partition_seed: tl.uint64, NOISY: tl.constexpr, NUM: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    size, ident = _size_of(size, ALIGNED), ident.to(tl.uint64)
    plain, weighted = tl.zeros([_EIGHT * B], tl.uint64), tl.zeros([_EIGHT * B], tl.uint64)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, _EIGHT * B), tl.num_programs(0)):
        block, at, value = _places(tile, first, width, stride, pitch, reciprocal, ROWS, W, B)
        inside = value < size
        values = tl.load(theta + at, mask=inside, other=0.0, eviction_policy="evict_first")
        bits = _bits(values, inside)
        plain += bits
        weighted += bits * _spread(block, W, B)
        if NOISY:
            noisy = values + scale * _noise_of(block, seed, ident, gauss, W, B)
            if NUM > 1:
                mine = _spread(_owners(block, partition_seed, ident, NUM) == subspace, W, B)
                noisy = tl.where(mine, noisy, values)
            values = noisy
        if KIND == "fp32":
            tl.store(out + value, values, mask=inside)
        else:
            tl.store(out + value, _rounded(values, KIND), mask=inside)
    _add_digest(digest, _digest_of(plain, weighted, ident, W, B))


@triton.jit
def update_kernel(  # type: ignore[no-untyped-def]
    theta, m, v, digests, squares, gauss, bounds, seeds, coefficients, subspaces, partition_seeds, steps,
    size: tl.int64, first: tl.int64, width: tl.int64, stride: tl.int64, pitch: tl.int64, reciprocal: tl.uint64,
    ident: tl.uint64, ident_m: tl.uint64, ident_v: tl.uint64, num_versions: tl.int32, num_cells: tl.int32,
    STATES: tl.constexpr, NUM: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, W: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    size, ident = _size_of(size, ALIGNED), ident.to(tl.uint64)
    ident_m, ident_v = ident_m.to(tl.uint64), ident_v.to(tl.uint64)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, _EIGHT * B), tl.num_programs(0)):
        block, at, value = _places(tile, first, width, stride, pitch, reciprocal, ROWS, W, B)
        inside = value < size
        now = tl.load(theta + at, mask=inside, other=0.0)
        mean, square = now * 0, now * 0
        if STATES > 0:
            mean = tl.load(m + at, mask=inside, other=0.0)
        if STATES > 1:
            square = tl.load(v + at, mask=inside, other=0.0)
        for version in range(num_versions):
            begin, end = tl.load(bounds + version), tl.load(bounds + version + 1)
            total, hit = tl.zeros([_EIGHT * B], tl.float32), tl.zeros([_EIGHT * B], tl.int1)
            if NUM == 1:
                hit = hit | (begin < end)
            for i in range(begin, end):
                seed, coefficient = tl.load(seeds + i).to(tl.uint64, bitcast=True), tl.load(coefficients + i)
                added = total + coefficient * _noise_of(block, seed, ident, gauss, W, B)
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
            difference = tl.where(inside, after.to(tl.float64) - now.to(tl.float64), 0.0)
            now = after
            share = _share_of(now, block, inside, ident, W, B)
            if STATES > 0:
                share += _share_of(mean, block, inside, ident_m, W, B)
            if STATES > 1:
                share += _share_of(square, block, inside, ident_v, W, B)
            _add_digest(digests + version, share)
            cell = squares + version * num_cells + tl.program_id(0)
            tl.store(cell, tl.load(cell) + tl.sum(difference * difference, 0))
        tl.store(theta + at, now, mask=inside)
        if STATES > 0:
            tl.store(m + at, mean, mask=inside)
        if STATES > 1:
            tl.store(v + at, square, mask=inside)


@triton.jit
def digest_kernel(  # type: ignore[no-untyped-def]
    theta, digest, size: tl.int64, first: tl.int64, width: tl.int64, stride: tl.int64, pitch: tl.int64,
    reciprocal: tl.uint64, ident: tl.uint64, ROWS: tl.constexpr, ALIGNED: tl.constexpr, W: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    size, ident = _size_of(size, ALIGNED), ident.to(tl.uint64)
    plain, weighted = tl.zeros([_EIGHT * B], tl.uint64), tl.zeros([_EIGHT * B], tl.uint64)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, _EIGHT * B), tl.num_programs(0)):
        block, at, value = _places(tile, first, width, stride, pitch, reciprocal, ROWS, W, B)
        inside = value < size
        bits = _bits(tl.load(theta + at, mask=inside, other=0.0), inside)
        plain += bits
        weighted += bits * _spread(block, W, B)
    _add_digest(digest, _digest_of(plain, weighted, ident, W, B))
