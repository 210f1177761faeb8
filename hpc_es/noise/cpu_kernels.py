"""The numba kernels behind cpu.py: each is one streaming pass over a run of blocks, or over rows of blocks.

Invariant: no arithmetic is fused or reordered (fastmath off; fp32 multiply, then fp32 add). All kernels release the
GIL.

Kernels work tile by tile, so that every intermediate stays in the cache. Within a tile the Philox rounds run over
arrays of counters, which LLVM turns into vector instructions; only the table look-up is scalar.
"""

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hpc_es.noise.compiling import compiled, vector
from hpc_es.noise.reference import BLOCK, DIGEST_INDEX, DIGEST_TENSOR, MAX_SUBSPACES, PARTITION_DOMAIN

TILE = 128
"""Blocks per tile."""
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

_MASK = 2**64 - 1
_HALF, _PAIR = np.uint64(32), np.uint64(2)
_INDEX, _TWICE_INDEX = np.uint64(DIGEST_INDEX), np.uint64(2 * DIGEST_INDEX & _MASK)
_TENSOR = np.uint64(2 * DIGEST_TENSOR & _MASK)
_DOMAIN = np.uint32(PARTITION_DOMAIN)


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
    """Start loading array[index] into the cache; harmless past the array's end."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        function = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
        builder.call(prefetch, [address, i32(0), i32(3), i32(1)])  # for reading, in all cache levels, data
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


@numba.njit(inline="always")
def _look_up(words, slots, gauss, values, ahead):  # type: ignore[no-untyped-def]
    """Write the eight table values of the j-th counter to block slots[j] of `values`.

    Prefetches `ahead`, the elements of the next tile, meanwhile: a third faster where theta is not in the cache.
    """
    for j in range(slots.size):
        at = BLOCK * slots[j]
        if ahead.size > 0:
            _prefetch(ahead, BLOCK * j)
        for w in range(4):
            values[at + 2 * w] = gauss[words[w, j] & np.uint32(0xFFFF)]
            values[at + 2 * w + 1] = gauss[words[w, j] >> np.uint32(16)]


@numba.njit(inline="always")
def _partition(first, size, ident, seed, num_subspaces, owners):  # type: ignore[no-untyped-def]
    """Set owners[j] to the subspace of block first + j; a Fisher-Yates shuffle permutes each group."""
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
    """Indices of the blocks of a tile that `subspace` owns."""
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
    """Write the table values of the blocks first + slots[j], and zero elsewhere."""
    if slots.size < TILE:
        values[:] = 0
    for j in range(slots.size):
        blocks[j] = np.uint64(first + slots[j])
    _philox(blocks[: slots.size], seed, np.uint32(ident), np.uint32(ident >> _HALF), words)
    _look_up(words, slots, gauss, values, ahead)


@numba.njit(inline="always")
def _to_bfloat16(bits, out):  # type: ignore[no-untyped-def]
    """Round fp32 bits to the nearest even bfloat16; a NaN becomes quiet."""
    for i in range(out.size):
        x = bits[i]
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (x >> np.uint32(16)) | np.uint32(0x40)
        out[i] = quiet if (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded


@numba.njit(inline="always")
def _to_float16(bits, scratch, scratch_bits, out):  # type: ignore[no-untyped-def]
    """Round fp32 bits to the nearest even float16; a NaN becomes quiet."""
    for i in range(out.size):  # for subnormal halves: adding 0.5 makes the fp32 adder round them
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
def _store(result, bits, scratch, scratch_bits, kind, out32, out16, at, size):  # type: ignore[no-untyped-def]
    """Round the first `size` results to the kind of the output, and write them from `at`; overwrites `scratch`."""
    if kind == FLOAT32:
        out = out32[at : at + size]
        for i in range(size):
            out[i] = result[i]
    elif kind == BFLOAT16:
        _to_bfloat16(bits, out16[at : at + size])
    else:
        _to_float16(bits, scratch, scratch_bits, out16[at : at + size])


@numba.njit(inline="always")
def _tile_digest(bits, start, ident):  # type: ignore[no-untyped-def]
    """Digest share of elements start, start + 1, ...; only one 64-bit multiplication per tile by the factors."""
    plain, weighted = np.uint64(0), np.uint64(0)
    for i in range(bits.size):
        plain += np.uint64(bits[i])
        weighted += np.uint64(bits[i]) * np.uint64(np.uint32(i))
    factor = (_PAIR * np.uint64(start) + np.uint64(1)) * _INDEX + ident * _TENSOR
    return plain * factor + weighted * _TWICE_INDEX


@numba.njit(inline="always")
def _add_members(  # type: ignore[no-untyped-def]
    members, first, size, ident, seeds, coefficients, subspaces, num_subspaces, partition_seeds, gauss, ahead,
    scratch, total, hit,
):  # fmt: skip
    """Set total to the sum of coefficient * T over members in order, and hit to the blocks that any member owns."""
    blocks, words, slots, every, owners, values = scratch
    total[:] = 0
    hit[:] = False
    for i in members:
        if num_subspaces > 1 and (i == members.start or partition_seeds[i] != partition_seeds[i - 1]):
            _partition(first, size, ident, partition_seeds[i], num_subspaces, owners)
        # Adding +0 where the member has no noise changes no bit: a sum that starts at +0 is never -0.
        mine = _owned(size, num_subspaces, owners, subspaces[i], every, slots)
        _tile_noise(first, mine, ident, seeds[i], blocks, words, gauss, values, ahead)
        for j in range(total.size):
            total[j] += coefficients[i] * np.float32(values[j])
        ahead = ahead[:0]  # the first member has prefetched it
        if num_subspaces == 1:
            hit[:] = True
        else:
            for j in mine:
                hit[j] = True


@numba.njit(inline="always")
def _optimise(step, total, hit, mean, square, adam):  # type: ignore[no-untyped-def]
    """reference.optimise on the blocks of a tile that were hit; turns `total` from the gradient into theta's change."""
    rate, decay_m, gain_m = step[0], step[1], step[2]
    decay_v, gain_v, epsilon = step[3], step[4], step[5]
    for block in range(TILE):
        if hit[block]:
            for j in range(BLOCK * block, BLOCK * (block + 1)):
                mean[j] = decay_m * mean[j] + gain_m * total[j]
                if adam:
                    square[j] = decay_v * square[j] + gain_v * (total[j] * total[j])
                    total[j] = (rate * mean[j]) / (np.sqrt(square[j]) + epsilon)
                else:
                    total[j] = rate * mean[j]


@numba.njit(inline="always")
def _move(now, total, hit, everywhere):  # type: ignore[no-untyped-def]
    """Add total to `now` in the blocks that were hit; turn total into the actual, rounded change."""
    if everywhere:
        for j in range(now.size):
            after = now[j] + total[j]
            total[j] = after - now[j]
            now[j] = after
    else:
        for j in range(now.size):
            after = now[j] + total[j] if hit[j // BLOCK] else now[j]
            total[j] = after - now[j]
            now[j] = after
    total[now.size :] = 0  # the last tile may be shorter


@numba.njit(inline="always")
def _sum_of_squares(changes, scratch):  # type: ignore[no-untyped-def]
    """Sum of squares in float64, by halves, so that no addition waits for the previous one."""
    width = BLOCK * TILE // 4
    for i in range(width):  # the first two halvings at once, without storing the squares
        a, b = np.float64(changes[i]), np.float64(changes[2 * width + i])
        c, d = np.float64(changes[width + i]), np.float64(changes[3 * width + i])
        scratch[i] = (a * a + b * b) + (c * c + d * d)
    width //= 2
    while width > 0:
        for i in range(width):
            scratch[i] += scratch[width + i]
        width //= 2
    return scratch[0]


# --- kernels: runs of blocks of one tensor, or rows of them -----------------------------------------------------------
# first: index of the first block in the tensor. width, stride, pitch: those of reference.Rows, in elements; a pass
# without rows is described as one row that covers everything.

_u64, _i64, _f32 = types.uint64, types.int64, types.float32


@compiled(vector(types.int16), _u64, _u64, _i64, vector(types.int16))
def noise_kernel(out, ident, seed, first, gauss):  # type: ignore[no-untyped-def]
    blocks, words, slots = np.empty(TILE, np.uint64), np.empty((4, TILE), np.uint32), np.arange(TILE)
    for tile in range(0, out.size // BLOCK, TILE):
        size = min(TILE, out.size // BLOCK - tile)
        for j in range(size):
            blocks[j] = np.uint64(first + tile + j)
        _philox(blocks[:size], seed, np.uint32(ident), np.uint32(ident >> _HALF), words)
        _look_up(words, slots[:size], gauss, out[BLOCK * tile : BLOCK * (tile + size)], out[BLOCK * (tile + size) :])


@compiled(
    *(vector(_f32), vector(_f32), vector(types.uint16), _i64, _u64, _i64, _i64, _i64, _i64),
    *(types.boolean, _u64, _f32, _i64, _i64, _u64, vector(types.int16), vector(_u64)),
)
def perturb_kernel(  # type: ignore[no-untyped-def]
    theta, out32, out16, kind, ident, first, width, stride, pitch, noisy, seed, scale, subspace, num_subspaces,
    partition_seed, gauss, digests,
):  # fmt: skip
    blocks, words, slots = np.empty(TILE, np.uint64), np.empty((4, TILE), np.uint32), np.empty(TILE, np.int64)
    every = np.arange(TILE)
    owners, values = np.zeros(TILE, np.uint8), np.empty(BLOCK * TILE, np.int16)
    result, scratch = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    bits, scratch_bits = result.view(np.uint32), scratch.view(np.uint32)
    theta_bits = theta.view(np.uint32)
    for row in range((theta.size + pitch - 1) // pitch):
        row_end = min(row * pitch + width, theta.size)
        for begin in range(row * pitch, row_end, BLOCK * TILE):
            end = min(begin + BLOCK * TILE, row_end)
            base, compact = theta[begin:end], begin - row * (pitch - width)
            size = (base.size + BLOCK - 1) // BLOCK
            at = first + (begin - row * (pitch - stride)) // BLOCK
            digests[0] += _tile_digest(theta_bits[begin:end], BLOCK * at, ident)
            if noisy:
                if num_subspaces > 1:
                    _partition(at, size, ident, partition_seed, num_subspaces, owners)
                mine = _owned(size, num_subspaces, owners, subspace, every, slots)
                ahead = theta[end if end < row_end else (row + 1) * pitch :]
                _tile_noise(at, mine, ident, seed, blocks, words, gauss, values, ahead)
                for i in range(base.size):
                    result[i] = base[i] + scale * np.float32(values[i])
                if num_subspaces > 1:
                    for i in range(base.size):
                        result[i] = result[i] if owners[i // BLOCK] == subspace else base[i]
            else:
                for i in range(base.size):
                    result[i] = base[i]
            _store(result, bits, scratch, scratch_bits, kind, out32, out16, compact, base.size)


@compiled(
    *(vector(_f32), vector(_f32), vector(_f32), vector(_u64), _i64, _i64, _i64, _i64),
    *(vector(_i64), vector(_u64), vector(_f32)),
    *(vector(_i64), vector(_i64), vector(_u64), types.Array(_f32, 2, "C")),
    *(vector(types.int16), vector(_u64), vector(types.float64)),
)
def update_kernel(  # type: ignore[no-untyped-def]
    theta, m, v, idents, first, width, stride, pitch, bounds, seeds, coefficients, subspaces, num_subspaces,
    partition_seeds, steps, gauss, digests, squares,
):  # fmt: skip
    blocks, words, slots = np.empty(TILE, np.uint64), np.empty((4, TILE), np.uint32), np.empty(TILE, np.int64)
    scratch = blocks, words, slots, np.arange(TILE), np.empty(TILE, np.uint8), np.empty(BLOCK * TILE, np.int16)
    now, total = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    mean, square = np.zeros(BLOCK * TILE, np.float32), np.zeros(BLOCK * TILE, np.float32)
    hit, halves = np.empty(TILE, np.bool_), np.empty(BLOCK * TILE, np.float64)
    bits, mean_bits, square_bits = now.view(np.uint32), mean.view(np.uint32), square.view(np.uint32)
    for row in range((theta.size + pitch - 1) // pitch):
        row_end = min(row * pitch + width, theta.size)
        for begin in range(row * pitch, row_end, BLOCK * TILE):
            end = min(begin + BLOCK * TILE, row_end)
            base = theta[begin:end]
            count, size = base.size, (base.size + BLOCK - 1) // BLOCK
            at = first + (begin - row * (pitch - stride)) // BLOCK
            for j in range(count):
                now[j] = base[j]
            for j in range(min(count, m.size)):
                mean[j] = m[begin + j]
            for j in range(min(count, v.size)):
                square[j] = v[begin + j]
            for version in range(num_subspaces.size):
                members = range(bounds[version], bounds[version + 1])
                ahead = theta[end if end < row_end else (row + 1) * pitch :]
                _add_members(
                    members, at, size, idents[0], seeds, coefficients, subspaces, num_subspaces[version],
                    partition_seeds, gauss, ahead, scratch, total, hit,
                )  # fmt: skip
                if m.size > 0:
                    _optimise(steps[version], total, hit, mean, square, v.size > 0)
                everywhere = num_subspaces[version] == 1 and members.start < members.stop
                _move(now[:count], total, hit, everywhere)
                squares[version] += _sum_of_squares(total, halves)
                digests[version] += _tile_digest(bits[:count], BLOCK * at, idents[0])
                if m.size > 0:
                    digests[version] += _tile_digest(mean_bits[:count], BLOCK * at, idents[1])
                if v.size > 0:
                    digests[version] += _tile_digest(square_bits[:count], BLOCK * at, idents[2])
            for j in range(count):
                base[j] = now[j]
            for j in range(min(count, m.size)):
                m[begin + j] = mean[j]
            for j in range(min(count, v.size)):
                v[begin + j] = square[j]


@compiled(vector(types.uint32), _u64, _i64, _i64, _i64, _i64, vector(_u64))
def digest_kernel(bits, ident, first, width, stride, pitch, digests):  # type: ignore[no-untyped-def]
    for row in range((bits.size + pitch - 1) // pitch):
        row_end = min(row * pitch + width, bits.size)
        for begin in range(row * pitch, row_end, BLOCK * TILE):
            at = BLOCK * first + begin - row * (pitch - stride)
            digests[0] += _tile_digest(bits[begin : min(begin + BLOCK * TILE, row_end)], at, ident)


# --- low rank: P = A B^T (reference.low_rank_noise) -------------------------------------------------------------------
# The factors of all members are computed once per call: fp32 if the rank is 1, whose products round as the integers do;
# otherwise int16, with the rank filled up to a multiple of PAIR by zeros. The sum of two products fits into 32 bits,
# and x86 computes it in one instruction.

LINE = 16
"""Elements of theta in a cache line."""
PAIR = 2
SUMMED = 4
"""Slots whose sum of products fits into 32 bits, for any values of the table."""


@numba.njit(inline="always")
def _slots_of(rank):  # type: ignore[no-untyped-def]
    """Number of values that are kept per row or column: 1, 2, or a multiple of SUMMED."""
    return rank if rank <= PAIR else (rank + SUMMED - 1) // SUMMED * SUMMED


@numba.njit
def _factor(seed, ident, rank, first, count, gauss, raw, out, place_step, slot_step):  # type: ignore[no-untyped-def]
    """Write slot k of row or column first + j to out[j * place_step + k * slot_step]."""
    block = first * rank // BLOCK
    skip = first * rank - BLOCK * block
    num_blocks = (skip + count * rank + BLOCK - 1) // BLOCK
    noise_kernel(raw[: BLOCK * num_blocks], ident, seed, block, gauss)
    for j in range(count):
        for k in range(rank):
            out[j * place_step + k * slot_step] = raw[skip + j * rank + k]


@numba.njit
def _factors(  # type: ignore[no-untyped-def]
    seeds, rank, first_row, num_rows, first_column, num_columns, ident_a, ident_b, gauss
):  # fmt: skip
    """A [member, row, slot] and B [member, slot, column], flat: as fp32 if the rank is 1, and as int16."""
    slots, places = _slots_of(rank), max(num_rows, num_columns)
    raw = np.empty(places * rank + 2 * BLOCK, np.int16)
    a = np.zeros(seeds.size * num_rows * slots, np.int16)
    b = np.zeros(seeds.size * num_columns * slots, np.int16)
    for i in range(seeds.size):
        mine = a[i * num_rows * slots : (i + 1) * num_rows * slots]
        _factor(seeds[i], ident_a, rank, first_row, num_rows, gauss, raw, mine, slots, 1)
        mine = b[i * num_columns * slots : (i + 1) * num_columns * slots]
        _factor(seeds[i], ident_b, rank, first_column, num_columns, gauss, raw, mine, 1, num_columns)
    of_rank_1 = slots if rank == 1 else 0
    return a[: a.size * of_rank_1].astype(np.float32), b[: b.size * of_rank_1].astype(np.float32), a, b


@numba.njit
def _extent(size, first, width, stride, pitch, num_rows, num_columns):  # type: ignore[no-untyped-def]
    """First row and number of rows of the tensor that a pass touches, and the same of columns, which are always those
    of whole matrices."""
    last_row = (size - 1) // pitch
    begin = BLOCK * first
    end = begin + last_row * stride + min(width, size - last_row * pitch)
    first_row, last_row = begin // num_columns, (end - 1) // num_columns
    first_matrix, last_matrix = first_row // num_rows, last_row // num_rows
    return (
        first_row,
        last_row - first_row + 1,
        first_matrix * num_columns,
        (last_matrix - first_matrix + 1) * num_columns,
    )


# These loops address whole arrays by unsigned positions: a slice costs as much as adding a member to a hundred
# elements, and an index that might be negative keeps LLVM from using vector instructions.


@numba.njit(inline="always")
def _add_one(total, begin, size, c, a, b, at):  # type: ignore[no-untyped-def]
    """One member of rank 1."""
    for j in range(size):
        total[np.uintp(begin + j)] += c * (a * b[np.uintp(at + j)])


@numba.njit(inline="always")
def _add_four(total, begin, size, c0, c1, c2, c3, a0, a1, a2, a3, b, at, step):  # type: ignore[no-untyped-def]
    """Four members of rank 1, in order, while their sum stays in a register."""
    for j in range(size):
        t = total[np.uintp(begin + j)] + c0 * (a0 * b[np.uintp(at + j)])
        t = t + c1 * (a1 * b[np.uintp(at + step + j)])
        t = t + c2 * (a2 * b[np.uintp(at + 2 * step + j)])
        total[np.uintp(begin + j)] = t + c3 * (a3 * b[np.uintp(at + 3 * step + j)])


@numba.njit(inline="always")
def _add_two_slots(total, begin, size, c, a0, a1, b, at, step):  # type: ignore[no-untyped-def]
    """One member of rank 2."""
    for j in range(size):
        p, q = np.int32(a0 * b[np.uintp(at + j)]), np.int32(a1 * b[np.uintp(at + step + j)])
        total[np.uintp(begin + j)] += c * np.float32(np.int32(p + q))


@numba.njit(inline="always")
def _sum_of_products(a0, a1, a2, a3, b, at, step):  # type: ignore[no-untyped-def]
    """SUMMED slots of one element."""
    p, q = np.int32(a0 * b[np.uintp(at)]), np.int32(a1 * b[np.uintp(at + step)])
    r, s = np.int32(a2 * b[np.uintp(at + 2 * step)]), np.int32(a3 * b[np.uintp(at + 3 * step)])
    return np.int32(np.int32(p + q) + np.int32(r + s))


@numba.njit(inline="always")
def _add_summed(total, begin, size, c, a0, a1, a2, a3, b, at, step):  # type: ignore[no-untyped-def]
    """One member with SUMMED slots."""
    for j in range(size):
        total[np.uintp(begin + j)] += c * np.float32(_sum_of_products(a0, a1, a2, a3, b, at + j, step))


@numba.njit(inline="always")
def _add_to_sums(sums, size, a0, a1, a2, a3, b, at, step):  # type: ignore[no-untyped-def]
    """Add SUMMED slots of a member with more; all sums are far below 2^53, so exact."""
    for j in range(size):
        sums[np.uintp(j)] += np.float64(_sum_of_products(a0, a1, a2, a3, b, at + j, step))


@numba.njit
def _add_row(  # type: ignore[no-untyped-def]
    total, begin, size, coefficients, factors, row, num_rows, column, num_columns, slots, sums
):  # fmt: skip
    """Add c * float(P) of all members, in order, to total[begin : begin + size], consecutive elements of a row.

    `row` and `column` count from the first of the factors."""
    a, b, short_a, short_b = factors
    i, step = 0, num_columns
    if slots == 1:
        while i + 4 <= coefficients.size:
            place, at = i * num_rows + row, i * step + column
            c0, c1, c2, c3 = coefficients[i], coefficients[i + 1], coefficients[i + 2], coefficients[i + 3]
            a0, a1 = a[place], a[place + num_rows]
            a2, a3 = a[place + 2 * num_rows], a[place + 3 * num_rows]
            _add_four(total, begin, size, c0, c1, c2, c3, a0, a1, a2, a3, b, at, step)
            i += 4
        while i < coefficients.size:
            _add_one(total, begin, size, coefficients[i], a[i * num_rows + row], b, i * step + column)
            i += 1
        return
    while i < coefficients.size:
        place, at = (i * num_rows + row) * slots, i * slots * step + column
        if slots == PAIR:
            _add_two_slots(total, begin, size, coefficients[i], short_a[place], short_a[place + 1], short_b, at, step)
        elif slots == SUMMED:
            a0, a1, a2, a3 = short_a[place], short_a[place + 1], short_a[place + 2], short_a[place + 3]
            _add_summed(total, begin, size, coefficients[i], a0, a1, a2, a3, short_b, at, step)
        else:
            sums[:size] = 0
            for k in range(0, slots, SUMMED):
                mine = place + k
                a0, a1, a2, a3 = short_a[mine], short_a[mine + 1], short_a[mine + 2], short_a[mine + 3]
                _add_to_sums(sums, size, a0, a1, a2, a3, short_b, at + k * step, step)
            for j in range(size):
                total[np.uintp(begin + j)] += coefficients[i] * np.float32(sums[j])
        i += 1


@compiled(
    *(vector(_f32), vector(_f32), vector(types.uint16), _i64, _u64, _i64, _i64, _i64, _i64),
    *(_u64, _f32, _i64, _i64, _i64, _u64, _u64, vector(types.int16), vector(_u64)),
)
def low_rank_perturb_kernel(  # type: ignore[no-untyped-def]
    theta, out32, out16, kind, ident, first, width, stride, pitch, seed, scale, rank, num_rows, num_columns, ident_a,
    ident_b, gauss, digests,
):  # fmt: skip
    result, scratch = np.empty(BLOCK * TILE, np.float32), np.empty(BLOCK * TILE, np.float32)
    one, sums = np.ones(1, np.float32), np.empty(BLOCK * TILE, np.float64)
    bits, scratch_bits, theta_bits = result.view(np.uint32), scratch.view(np.uint32), theta.view(np.uint32)
    if theta.size == 0:
        return
    seeds = np.full(1, seed, np.uint64)
    row0, rows, column0, columns = _extent(theta.size, first, width, stride, pitch, num_rows, num_columns)
    factors = _factors(seeds, rank, row0, rows, column0, columns, ident_a, ident_b, gauss)
    slots = _slots_of(rank)
    for row in range((theta.size + pitch - 1) // pitch):
        row_end = min(row * pitch + width, theta.size)
        for begin in range(row * pitch, row_end, BLOCK * TILE):
            end = min(begin + BLOCK * TILE, row_end)
            base, compact = theta[begin:end], begin - row * (pitch - width)
            at = BLOCK * first + begin - row * (pitch - stride)
            digests[0] += _tile_digest(theta_bits[begin:end], at, ident)
            scratch[:] = 0  # a sum that begins at +0 is never -0, as the integer P is not
            done = 0
            while done < base.size:
                here = (at + done) // num_columns
                column = at + done - here * num_columns
                size = min(base.size - done, num_columns - column)
                column += here // num_rows * num_columns - column0
                _add_row(scratch, done, size, one, factors, here - row0, rows, column, columns, slots, sums)
                done += size
            for i in range(base.size):
                result[i] = base[i] + scale * scratch[i]
            _store(result, bits, scratch, scratch_bits, kind, out32, out16, compact, base.size)


@compiled(
    *(vector(_f32), vector(_f32), vector(_f32), vector(_u64), _i64, _i64, _i64, _i64),
    *(vector(_u64), vector(_f32), _i64, _i64, _i64, _u64, _u64, vector(_f32)),
    *(vector(types.int16), vector(_u64), vector(types.float64)),
)
def low_rank_update_kernel(  # type: ignore[no-untyped-def]
    theta, m, v, idents, first, width, stride, pitch, seeds, coefficients, rank, num_rows, num_columns, ident_a,
    ident_b, step, gauss, digests, squares,
):  # fmt: skip
    """One version with at least one member."""
    total, theta_bits = np.empty(BLOCK * TILE, np.float32), theta.view(np.uint32)
    mean, square = np.zeros(BLOCK * TILE, np.float32), np.zeros(BLOCK * TILE, np.float32)
    hit, halves = np.ones(TILE, np.bool_), np.empty(BLOCK * TILE, np.float64)
    mean_bits, square_bits = mean.view(np.uint32), square.view(np.uint32)
    slots, sums = _slots_of(rank), np.empty(BLOCK * TILE, np.float64)
    if theta.size == 0:
        return
    row0, rows, column0, columns = _extent(theta.size, first, width, stride, pitch, num_rows, num_columns)
    factors = _factors(seeds, rank, row0, rows, column0, columns, ident_a, ident_b, gauss)
    for row in range((theta.size + pitch - 1) // pitch):
        row_end = min(row * pitch + width, theta.size)
        for begin in range(row * pitch, row_end, BLOCK * TILE):
            end = min(begin + BLOCK * TILE, row_end)
            base = theta[begin:end]
            count = base.size
            at = BLOCK * first + begin - row * (pitch - stride)
            for j in range(min(count, m.size)):
                mean[j] = m[begin + j]
            for j in range(min(count, v.size)):
                square[j] = v[begin + j]
            for j in range(0, BLOCK * TILE, LINE):  # the next tile, while this one is computed
                _prefetch(theta, end + j)
            total[:] = 0
            done = 0
            while done < count:
                here = (at + done) // num_columns
                column = at + done - here * num_columns
                size = min(count - done, num_columns - column)
                column += here // num_rows * num_columns - column0
                _add_row(total, done, size, coefficients, factors, here - row0, rows, column, columns, slots, sums)
                done += size
            if m.size > 0:
                _optimise(step, total, hit, mean, square, v.size > 0)
            _move(base, total, hit, True)
            squares[0] += _sum_of_squares(total, halves)
            digests[0] += _tile_digest(theta_bits[begin:end], at, idents[0])
            if m.size > 0:
                digests[0] += _tile_digest(mean_bits[:count], at, idents[1])
            if v.size > 0:
                digests[0] += _tile_digest(square_bits[:count], at, idents[2])
            for j in range(min(count, m.size)):
                m[begin + j] = mean[j]
            for j in range(min(count, v.size)):
                v[begin + j] = square[j]
