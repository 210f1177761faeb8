"""The kernels of reference.py for the CPU: compiled by numba, one streaming pass each, equal to it bit for bit.

Invariant: nothing here is fused or reordered (fastmath off; fp32 multiply, then fp32 add), and results do not depend
on how a tensor is cut, as long as cuts fall on blocks. All kernels release the GIL; callers bring the threads.

Work goes tile by tile, so that every intermediate stays in the cache. Within a tile the Philox rounds run over
arrays of counters, which LLVM turns into vector instructions; only the table look-up is scalar.
"""

import logging
import pickle
from collections.abc import Callable, Sequence

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hpc_es.noise.reference import (
    BLOCK,
    DIGEST_INDEX,
    DIGEST_TENSOR,
    MAX_SUBSPACES,
    PARTITION_DOMAIN,
    Array,
    Perturbation,
    Trace,
    Update,
    table,
)

log = logging.getLogger(__name__)

TILE = 128
"""Blocks per tile."""
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

_MASK = 2**64 - 1
_HALF, _PAIR = np.uint64(32), np.uint64(2)
_INDEX, _TWICE_INDEX = np.uint64(DIGEST_INDEX), np.uint64(2 * DIGEST_INDEX & _MASK)
_TENSOR = np.uint64(2 * DIGEST_TENSOR & _MASK)
_DOMAIN = np.uint32(PARTITION_DOMAIN)


def compiled(*arguments: types.Type, cache: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for exactly these argument types, cached beside the source or in the user's cache folder if it can be."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = types.void(*arguments)
        if cache:
            try:
                return numba.njit(signature, cache=True, **options)(function)
            except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:  # no folder, or a torn entry
                log.warning("%s is compiled without a cache, which takes seconds: %s", function.__name__, error)
        return numba.njit(signature, **options)(function)

    return decorate


def _vector(element: types.Type) -> types.Type:
    return types.Array(element, 1, "C")


# --- inside a tile ----------------------------------------------------------------------------------------------


@numba.njit(inline="always")
def _philox(blocks, key, low, high, words):  # type: ignore[no-untyped-def]
    """Philox4x32-10 of counters (block, low, high); words [4, TILE]."""
    for j in range(blocks.size):
        a, b = np.uint32(blocks[j]), np.uint32(blocks[j] >> _HALF)
        c, d = low, high
        k, m = np.uint32(key), np.uint32(key >> _HALF)
        for _ in range(10):
            p, q = np.uint64(a) * np.uint64(0xD2511F53), np.uint64(c) * np.uint64(0xCD9E8D57)
            a, b = np.uint32(q >> _HALF) ^ b ^ k, np.uint32(q)
            c, d = np.uint32(p >> _HALF) ^ d ^ m, np.uint32(p)
            k, m = np.uint32(k + np.uint32(0x9E3779B9)), np.uint32(m + np.uint32(0xBB67AE85))
        words[0, j], words[1, j], words[2, j], words[3, j] = a, b, c, d


@intrinsic
def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Begin to bring array[index] into the cache; harmless past the array's end."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        function = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
        builder.call(prefetch, [address, i32(0), i32(3), i32(1)])  # to read, keep in all levels, data
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


@numba.njit(inline="always")
def _look_up(words, slots, gauss, values, ahead):  # type: ignore[no-untyped-def]
    """Write the eight table values of the j-th counter to block slots[j] of `values`.

    Meanwhile memory delivers `ahead`, the elements of the next tile: a third faster where theta is not in the cache.
    """
    for j in range(slots.size):
        at = BLOCK * slots[j]
        _prefetch(ahead, BLOCK * j)
        for w in range(4):
            values[at + 2 * w] = gauss[words[w, j] & np.uint32(0xFFFF)]
            values[at + 2 * w + 1] = gauss[words[w, j] >> np.uint32(16)]


@numba.njit(inline="always")
def _partition(first, size, ident, seed, num_subspaces, owners):  # type: ignore[no-untyped-def]
    """owners[j] = subspace of block first + j; the permutation of each group by Fisher-Yates."""
    call, words = np.empty(1, np.uint64), np.empty((4, 1), np.uint32)
    order = np.empty(MAX_SUBSPACES, np.uint8)
    for group in range(first // num_subspaces, (first + size - 1) // num_subspaces + 1):
        for i in range(num_subspaces):
            order[i] = i
        call[0] = group
        for i in range(num_subspaces - 1):
            if i % 4 == 0:
                high = np.uint32((np.uint32(ident >> _HALF) ^ _DOMAIN) + np.uint32(i // 4))
                _philox(call, seed, np.uint32(ident), high, words)
            top = num_subspaces - 1 - i
            chosen = np.int64(words[i % 4, 0]) % (top + 1)
            order[top], order[chosen] = order[chosen], order[top]
        for i in range(num_subspaces):
            j = group * num_subspaces + i - first
            if 0 <= j < size:
                owners[j] = order[i]


@numba.njit(inline="always")
def _owned(size, num_subspaces, owners, subspace, every, scratch):  # type: ignore[no-untyped-def]
    """The blocks of a tile that `subspace` owns."""
    if num_subspaces == 1:
        return every[:size]
    count = 0
    for j in range(size):
        if owners[j] == subspace:
            scratch[count] = j
            count += 1
    return scratch[:count]


@numba.njit(inline="always")
def _tile_noise(first, slots, ident, seed, blocks, words, gauss, values, ahead):  # type: ignore[no-untyped-def]
    """Table values of the blocks first + slots[j]; zero elsewhere."""
    if slots.size < TILE:
        values[:] = 0
    for j in range(slots.size):
        blocks[j] = np.uint64(first + slots[j])
    _philox(blocks[: slots.size], seed, np.uint32(ident), np.uint32(ident >> _HALF), words)
    _look_up(words, slots, gauss, values, ahead)


@numba.njit(inline="always")
def _to_bfloat16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        x = bits[i]
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (x >> np.uint32(16)) | np.uint32(0x40)
        out[i] = quiet if (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded


@numba.njit(inline="always")
def _to_float16(bits, scratch, scratch_bits, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):  # subnormal halves: adding 0.5 lets the fp32 adder round them
        scratch_bits[i] = bits[i] & np.uint32(0x7FFFFFFF)
    for i in range(out.size):
        scratch[i] = scratch[i] + np.float32(0.5)
    for i in range(out.size):
        x = bits[i] & np.uint32(0x7FFFFFFF)
        half = (x - np.uint32(0x38000000) + np.uint32(0xFFF) + ((x >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
        half = scratch_bits[i] - np.uint32(0x3F000000) if x < np.uint32(0x38800000) else half
        half = np.uint32(0x7C00) if x >= np.uint32(0x47800000) else half
        quiet = ((x >> np.uint32(13)) & np.uint32(0x3FF)) | np.uint32(0x7E00)
        half = quiet if x > np.uint32(0x7F800000) else half
        out[i] = half | ((bits[i] >> np.uint32(16)) & np.uint32(0x8000))


@numba.njit(inline="always")
def _tile_digest(bits, start, ident):  # type: ignore[no-untyped-def]
    """Share of elements start, start + 1, ... : one 64-bit multiplication by the factors is left per tile."""
    plain, weighted = np.uint64(0), np.uint64(0)
    for i in range(bits.size):
        plain += np.uint64(bits[i])
        weighted += np.uint64(bits[i]) * np.uint64(np.uint32(i))
    factor = (_PAIR * np.uint64(start) + np.uint64(1)) * _INDEX + ident * _TENSOR
    return plain * factor + weighted * _TWICE_INDEX


@numba.njit(inline="always")
def _sum_of_squares(changes, scratch):  # type: ignore[no-untyped-def]
    """float64, by halves, so that no addition waits for the one before."""
    for i in range(BLOCK * TILE):
        scratch[i] = np.float64(changes[i]) * np.float64(changes[i])
    width = BLOCK * TILE // 2
    while width > 0:
        for i in range(width):
            scratch[i] += scratch[width + i]
        width //= 2
    return scratch[0]


# --- kernels: whole runs of blocks of one tensor ------------------------------------------------------------------

_u64, _i64, _f32 = types.uint64, types.int64, types.float32


@compiled(_vector(types.int16), _u64, _u64, _i64, _vector(types.int16))
def _noise(out, ident, seed, first, gauss):  # type: ignore[no-untyped-def]
    blocks, words, slots = np.empty(TILE, np.uint64), np.empty((4, TILE), np.uint32), np.arange(TILE)
    for tile in range(0, out.size // BLOCK, TILE):
        size = min(TILE, out.size // BLOCK - tile)
        for j in range(size):
            blocks[j] = np.uint64(first + tile + j)
        _philox(blocks[:size], seed, np.uint32(ident), np.uint32(ident >> _HALF), words)
        _look_up(words, slots[:size], gauss, out[BLOCK * tile : BLOCK * (tile + size)], out[BLOCK * (tile + size) :])


@compiled(
    *(_vector(_f32), _vector(_f32), _vector(types.uint16), _i64, _u64, _i64),
    *(types.boolean, _u64, _f32, _i64, _i64, _u64, _vector(types.int16), _vector(_u64)),
)
def _perturb(  # type: ignore[no-untyped-def]
    theta, out32, out16, kind, ident, first, noisy, seed, scale, subspace, num_subspaces, partition_seed, gauss, digests
):
    blocks, words, slots = np.empty(TILE, np.uint64), np.empty((4, TILE), np.uint32), np.empty(TILE, np.int64)
    every = np.arange(TILE)
    owners, values = np.zeros(TILE, np.uint8), np.empty(BLOCK * TILE, np.int16)
    result, scratch = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    bits, scratch_bits = result.view(np.uint32), scratch.view(np.uint32)
    theta_bits = theta.view(np.uint32)
    for begin in range(0, theta.size, BLOCK * TILE):
        base = theta[begin : begin + BLOCK * TILE]
        size = (base.size + BLOCK - 1) // BLOCK
        at = first + begin // BLOCK
        digests[0] += _tile_digest(theta_bits[begin : begin + BLOCK * TILE], BLOCK * at, ident)
        if noisy:
            if num_subspaces > 1:
                _partition(at, size, ident, partition_seed, num_subspaces, owners)
            mine = _owned(size, num_subspaces, owners, subspace, every, slots)
            _tile_noise(at, mine, ident, seed, blocks, words, gauss, values, theta[begin + BLOCK * TILE :])
            for i in range(base.size):
                result[i] = base[i] + scale * np.float32(values[i])
            if num_subspaces > 1:
                for i in range(base.size):
                    result[i] = result[i] if owners[i // BLOCK] == subspace else base[i]
        else:
            for i in range(base.size):
                result[i] = base[i]
        if kind == FLOAT32:
            out = out32[begin : begin + base.size]
            for i in range(base.size):
                out[i] = result[i]
        elif kind == BFLOAT16:
            _to_bfloat16(bits, out16[begin : begin + base.size])
        else:
            _to_float16(bits, scratch, scratch_bits, out16[begin : begin + base.size])


@compiled(
    *(_vector(_f32), _u64, _i64, _vector(_i64), _vector(_u64), _vector(_f32), _vector(_i64)),
    *(_vector(_i64), _vector(_u64), _vector(types.int16), _vector(_u64), _vector(types.float64)),
)
def _update(  # type: ignore[no-untyped-def]
    theta, ident, first, bounds, seeds, coefficients, subspaces, num_subspaces, partition_seeds, gauss, digests, squares
):
    blocks, words, slots = np.empty(TILE, np.uint64), np.empty((4, TILE), np.uint32), np.empty(TILE, np.int64)
    every = np.arange(TILE)
    owners, values = np.empty(TILE, np.uint8), np.empty(BLOCK * TILE, np.int16)
    now, total = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    hit, bits, halves = np.empty(TILE, np.bool_), now.view(np.uint32), np.empty(BLOCK * TILE, np.float64)
    for begin in range(0, theta.size, BLOCK * TILE):
        base = theta[begin : begin + BLOCK * TILE]
        count, size = base.size, (base.size + BLOCK - 1) // BLOCK
        at = first + begin // BLOCK
        for j in range(count):
            now[j] = base[j]
        for version in range(num_subspaces.size):
            total[:] = 0
            hit[:] = False
            owners[:] = 0
            if num_subspaces[version] > 1:
                _partition(at, size, ident, partition_seeds[version], num_subspaces[version], owners)
            for i in range(bounds[version], bounds[version + 1]):
                # Adding zero where the member has no noise is neutral: a sum that began at +0 is never -0.
                mine = _owned(size, num_subspaces[version], owners, subspaces[i], every, slots)
                _tile_noise(at, mine, ident, seeds[i], blocks, words, gauss, values, theta[begin + BLOCK * TILE :])
                for j in range(count):
                    total[j] += coefficients[i] * np.float32(values[j])
                for j in mine:
                    hit[j] = True
            if num_subspaces[version] == 1 and bounds[version] < bounds[version + 1]:
                for j in range(count):
                    after = now[j] + total[j]
                    total[j] = after - now[j]
                    now[j] = after
            else:
                for j in range(count):
                    after = now[j] + total[j] if hit[j // BLOCK] else now[j]
                    total[j] = after - now[j]
                    now[j] = after
            squares[version] += _sum_of_squares(total, halves)
            digests[version] += _tile_digest(bits[:count], BLOCK * at, ident)
        for j in range(count):
            base[j] = now[j]


@compiled(_vector(types.uint32), _u64, _i64, _vector(_u64))
def _digest(bits, ident, first, digests):  # type: ignore[no-untyped-def]
    for begin in range(0, bits.size, BLOCK * TILE):
        digests[0] += _tile_digest(bits[begin : begin + BLOCK * TILE], BLOCK * first + begin, ident)


# --- the same functions as in reference.py; `start` is a multiple of BLOCK, except for noise -------------------------


def noise(seed: int, ident: int, start: int, count: int) -> Array:
    """As reference.noise."""
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    out = np.empty(BLOCK * (last - first), np.int16)
    _noise(out, np.uint64(ident), np.uint64(seed), first, table())
    return out[start - BLOCK * first :][:count]


def perturb(theta: Array, out: Array, ident: int, noisy: Perturbation | None, *, start: int = 0) -> int:
    """As reference.perturb; contiguous arrays."""
    kind = {"f": FLOAT32, "H": BFLOAT16, "e": FLOAT16}[out.dtype.char]
    out32 = out if kind == FLOAT32 else np.empty(0, np.float32)
    out16 = np.empty(0, np.uint16) if kind == FLOAT32 else out.view(np.uint16)
    member, digests = noisy or Perturbation(0, 0.0), np.zeros(1, np.uint64)
    _perturb(
        *(theta, out32, out16, kind, np.uint64(ident), start // BLOCK, noisy is not None),
        *(np.uint64(member.seed), np.float32(member.scale), member.subspace, member.num_subspaces),
        *(np.uint64(member.partition_seed), table(), digests),
    )
    return int(digests[0])


def update(theta: Array, ident: int, updates: Sequence[Update], *, start: int = 0) -> Trace:
    """As reference.update: all versions in one pass over theta; contiguous."""
    digests, squares = np.zeros(len(updates), np.uint64), np.zeros(len(updates))
    _update(
        *(theta, np.uint64(ident), start // BLOCK),
        np.cumsum([0, *(len(step.seeds) for step in updates)]),
        np.array([seed for step in updates for seed in step.seeds], np.uint64),
        np.array([coefficient for step in updates for coefficient in step.coefficients], np.float32),
        np.array([own for step in updates for own in step.subspaces or [0] * len(step.seeds)], np.int64),
        np.array([step.num_subspaces for step in updates], np.int64),
        np.array([step.partition_seed for step in updates], np.uint64),
        *(table(), digests, squares),
    )
    return Trace([int(digest) for digest in digests], [float(square) for square in squares])


def digest(theta: Array, ident: int, *, start: int = 0) -> int:
    """As reference.digest; contiguous."""
    total = np.zeros(1, np.uint64)
    _digest(theta.view(np.uint32), np.uint64(ident), start // BLOCK, total)
    return int(total[0])
