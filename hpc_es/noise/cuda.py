"""The kernels of reference.py for GPUs, in Triton: one streaming pass each, equal to it bit for bit.

Invariant: nothing is fused or approximated (`_EXACT` at every launch: an fp32 multiply, then an fp32 add; no flush to
zero), and results do not depend on how a tensor is cut, as long as cuts fall on blocks. Every program owns the cells of
its sums, so nothing is added in an order that chance decides.

Tensors are contiguous torch tensors on one device. With TRITON_INTERPRET=1, before the first import, the same code runs
on a CPU, slowly: that is how it is tested where there is no GPU, in a process of its own.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hpc_es.noise.reference import BLOCK, Perturbation, State, Step, Trace, Update, table
from hpc_es.noise.reference import DIGEST_INDEX as _INDEX_FACTOR
from hpc_es.noise.reference import DIGEST_TENSOR as _TENSOR_FACTOR
from hpc_es.noise.reference import PARTITION_DOMAIN as _PARTITION

TILE = 128
"""Blocks per tile: 1,024 elements."""
PROGRAMS = 2048
"""At most so many per launch; each goes through many tiles."""

EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every launch."""

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_EIGHT = tl.constexpr(BLOCK)
_INDEX, _TENSOR, _DOMAIN = tl.constexpr(_INDEX_FACTOR), tl.constexpr(_TENSOR_FACTOR), tl.constexpr(_PARTITION)


# --- inside a tile of B blocks, 8 * B elements ----------------------------------------------------------------------


@triton.jit
def _words(block, key, ident_low, ident_high):  # type: ignore[no-untyped-def]
    """Philox4x32-10 of counters (block, ident), four words [B] each."""
    zero = (block * 0).to(tl.uint32)
    return tl.philox(key, block.to(tl.uint32), (block >> 32).to(tl.uint32), zero + ident_low, zero + ident_high)


@triton.jit
def _noise_of(block, seed, ident, gauss, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Table values of a tile as fp32 [8 * B]. `gauss` is the first half of the table, which is odd: 64 KiB for the L1
    cache."""
    a, b, c, d = _words(block, seed, ident.to(tl.uint32), (ident >> 32).to(tl.uint32))
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [B, 2, 2]: word 2 i + j of block at [block, i, j]
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [_EIGHT * B])
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
def _spread(owned, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """[B] of blocks -> [8 * B] of their elements."""
    return tl.reshape(tl.broadcast_to(owned[:, None], [B, _EIGHT]), [_EIGHT * B])


@triton.jit
def _digest_of(values, index, inside, ident):  # type: ignore[no-untyped-def]
    """A tile's share of reference.digest."""
    factor = (2 * index + 1) * _INDEX + 2 * ident * _TENSOR
    bits = values.to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.sum(tl.where(inside, bits * factor, 0), 0)


@triton.jit
def _wide(size, ident, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """64 bits also in the interpreter, which goes by the value; and the compiler learns that a mask never falls within
    16 bytes."""
    if ALIGNED:
        size = size // _EIGHT * _EIGHT
    return size.to(tl.int64), ident.to(tl.uint64)


@triton.jit
def _add_to(cell, value):  # type: ignore[no-untyped-def]
    """A cell that no other program touches."""
    tl.store(cell, tl.load(cell) + value)


@triton.jit
def _rounded(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """As reference.cast, as bits: to nearest even by integers, as the interpreter's own conversion truncates."""
    bits = values.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if KIND == "bf16":
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16)
    quiet = ((bits >> 16) & 0x8000) | ((bits >> 13) & 0x3FF) | 0x7E00
    half = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.where(is_nan, quiet, half).to(tl.uint16)


# --- kernels: whole tensors, or runs of their blocks ------------------------------------------------------------------


@triton.jit
def perturb_kernel(  # type: ignore[no-untyped-def]
    theta, out, digests, gauss, size: tl.int64, first: tl.int64, ident: tl.uint64, seed: tl.uint64, scale: tl.float32,
    subspace: tl.int32, partition_seed: tl.uint64, NOISY: tl.constexpr, NUM: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    size, ident = _wide(size, ident, ALIGNED)
    digest = tl.zeros([], tl.uint64)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, _EIGHT * B), tl.num_programs(0)):
        at = tile * (_EIGHT * B) + tl.arange(0, _EIGHT * B).to(tl.int64)
        inside = at < size
        values = tl.load(theta + at, mask=inside, other=0.0, eviction_policy="evict_first")
        digest += _digest_of(values, (first * _EIGHT + at).to(tl.uint64), inside, ident)
        if NOISY:
            block = (first + tile * B + tl.arange(0, B).to(tl.int64)).to(tl.uint64)
            noisy = values + scale * _noise_of(block, seed, ident, gauss, B)
            if NUM > 1:
                mine = _spread(_owners(block, partition_seed, ident, NUM) == subspace, B)
                noisy = tl.where(mine, noisy, values)
            values = noisy
        if KIND == "fp32":
            tl.store(out + at, values, mask=inside)
        else:
            tl.store(out + at, _rounded(values, KIND), mask=inside)
    tl.store(digests + tl.program_id(0), digest.to(tl.int64, bitcast=True))


@triton.jit
def update_kernel(  # type: ignore[no-untyped-def]
    theta, m, v, digests, squares, gauss, bounds, seeds, coefficients, subspaces, partition_seeds, steps,
    size: tl.int64, first: tl.int64, ident: tl.uint64, ident_m: tl.uint64, ident_v: tl.uint64, num_versions: tl.int32,
    STATES: tl.constexpr, NUM: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    size, ident = _wide(size, ident, ALIGNED)
    ident_m, ident_v = ident_m.to(tl.uint64), ident_v.to(tl.uint64)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, _EIGHT * B), tl.num_programs(0)):
        at = tile * (_EIGHT * B) + tl.arange(0, _EIGHT * B).to(tl.int64)
        inside, index = at < size, (first * _EIGHT + at).to(tl.uint64)
        block = (first + tile * B + tl.arange(0, B).to(tl.int64)).to(tl.uint64)
        now = tl.load(theta + at, mask=inside, other=0.0)
        mean, square = now * 0, now * 0
        if STATES > 0:
            mean = tl.load(m + at, mask=inside, other=0.0)
        if STATES > 1:
            square = tl.load(v + at, mask=inside, other=0.0)
        for version in range(num_versions):
            total, hit = tl.zeros([_EIGHT * B], tl.float32), tl.zeros([_EIGHT * B], tl.int1)
            for i in range(tl.load(bounds + version), tl.load(bounds + version + 1)):
                seed, coefficient = tl.load(seeds + i).to(tl.uint64, bitcast=True), tl.load(coefficients + i)
                added = total + coefficient * _noise_of(block, seed, ident, gauss, B)
                if NUM > 1:
                    partition = tl.load(partition_seeds + i).to(tl.uint64, bitcast=True)
                    mine = _spread(_owners(block, partition, ident, NUM) == tl.load(subspaces + i), B)
                    total, hit = tl.where(mine, added, total), hit | mine
                else:
                    total, hit = added, hit | True
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
            digest = _digest_of(now, index, inside, ident)
            if STATES > 0:
                digest += _digest_of(mean, index, inside, ident_m)
            if STATES > 1:
                digest += _digest_of(square, index, inside, ident_v)
            cell = version * tl.num_programs(0) + tl.program_id(0)
            _add_to(digests + cell, digest.to(tl.int64, bitcast=True))
            _add_to(squares + cell, tl.sum(difference * difference, 0))
        tl.store(theta + at, now, mask=inside)
        if STATES > 0:
            tl.store(m + at, mean, mask=inside)
        if STATES > 1:
            tl.store(v + at, square, mask=inside)


@triton.jit
def digest_kernel(  # type: ignore[no-untyped-def]
    values, digests, size: tl.int64, first: tl.int64, ident: tl.uint64, ALIGNED: tl.constexpr, B: tl.constexpr
):
    size, ident = _wide(size, ident, ALIGNED)
    digest = tl.zeros([], tl.uint64)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(size, _EIGHT * B), tl.num_programs(0)):
        at = tile * (_EIGHT * B) + tl.arange(0, _EIGHT * B).to(tl.int64)
        inside = at < size
        loaded = tl.load(values + at, mask=inside, other=0.0)
        digest += _digest_of(loaded, (first * _EIGHT + at).to(tl.uint64), inside, ident)
    tl.store(digests + tl.program_id(0), digest.to(tl.int64, bitcast=True))


# --- the same functions as in reference.py, on torch tensors; `start` is a multiple of BLOCK --------------------------


def perturb(
    theta: torch.Tensor, out: torch.Tensor, ident: int, noisy: Perturbation | None, *, start: int = 0
) -> torch.Tensor:
    """As reference.perturb; out is float32, bfloat16 or float16. Returns the digest, int64 [] on the device: reading
    it waits for the kernel."""
    kind, member = _KINDS[out.dtype], noisy or Perturbation(0, 0.0)
    programs = _programs(theta)
    digests = torch.zeros(programs, dtype=torch.int64, device=theta.device)
    perturb_kernel[(programs,)](
        *(theta, out if kind == "fp32" else out.view(torch.uint16), digests, _gauss(theta.device)),
        *(theta.numel(), start // BLOCK, ident, member.seed, member.scale, member.subspace, member.partition_seed),
        *(noisy is not None, member.num_subspaces, kind, _is_aligned(theta), TILE),
        **EXACT,
    )
    return digests.sum()


def update(
    theta: torch.Tensor, ident: int, updates: Sequence[Update], *, start: int = 0, state: Sequence[State] = ()
) -> Trace:
    """As reference.update; `state` holds torch tensors. One pass, unless the number of subspaces changes between
    versions."""
    trace = Trace([], [])
    for num_subspaces, versions in groupby(updates, key=lambda version: version.num_subspaces):
        done = _update(theta, ident, list(versions), num_subspaces, start, state)
        trace.digests.extend(done.digests)
        trace.squares.extend(done.squares)
    return trace


def digest(theta: torch.Tensor, ident: int, *, start: int = 0) -> int:
    """As reference.digest."""
    programs = _programs(theta)
    digests = torch.zeros(programs, dtype=torch.int64, device=theta.device)
    digest_kernel[(programs,)](theta, digests, theta.numel(), start // BLOCK, ident, _is_aligned(theta), TILE, **EXACT)
    return int(digests.sum()) % 2**64


def _update(
    theta: torch.Tensor, ident: int, updates: list[Update], num_subspaces: int, start: int, state: Sequence[State]
) -> Trace:
    programs, device = _programs(theta), theta.device
    members = [member for version in updates for member in _members(version)]
    seeds, coefficients, subspaces, partitions = zip(*members, strict=True) if members else ((), (), (), ())
    bounds = np.cumsum([0, *(len(version.seeds) for version in updates)])
    steps = [version.step or Step(0.0, 0.0, 0.0) for version in updates]
    scalars = [(s.rate, s.decay_m, s.gain_m, s.decay_v, s.gain_v, s.epsilon) for s in steps]
    digests = torch.zeros(len(updates), programs, dtype=torch.int64, device=device)
    squares = torch.zeros(len(updates), programs, dtype=torch.float64, device=device)
    m, v = [*(kept.values for kept in state), theta, theta][:2]
    ident_m, ident_v = [*(kept.ident for kept in state), 0, 0][:2]
    update_kernel[(programs,)](
        *(theta, m, v, digests, squares, _gauss(device), _on(device, bounds, np.int32)),
        *(_on(device, seeds, np.uint64), _on(device, coefficients, np.float32), _on(device, subspaces, np.int32)),
        *(_on(device, partitions, np.uint64), _on(device, scalars, np.float32)),
        *(theta.numel(), start // BLOCK, ident, ident_m, ident_v, len(updates)),
        *(len(state), num_subspaces, _is_aligned(theta), TILE),
        **EXACT,
    )
    return Trace([total % 2**64 for total in digests.sum(1).tolist()], squares.sum(1).tolist())


def _members(version: Update) -> Iterator[tuple[int, float, int, int]]:
    none = [0] * len(version.seeds)
    return zip(
        version.seeds, version.coefficients, version.subspaces or none, version.partition_seeds or none, strict=True
    )


def _on(device: torch.device, values: Any, dtype: Any) -> torch.Tensor:
    """At least one element, as a kernel wants an address; uint64 as the int64 of the same bits."""
    array = np.array(values, dtype).reshape(-1)
    array = array if array.size else np.zeros(1, dtype)
    return torch.from_numpy(array.view(np.int64) if dtype is np.uint64 else array).to(device)


def _programs(theta: torch.Tensor) -> int:
    return max(1, min(PROGRAMS, triton.cdiv(theta.numel(), BLOCK * TILE)))


def _is_aligned(theta: torch.Tensor) -> bool:
    """It consists of whole blocks."""
    return theta.numel() % BLOCK == 0


@cache
def _gauss(device: torch.device) -> torch.Tensor:
    """The first half of the table, int16 [32768]."""
    return torch.from_numpy(table()[: table().size // 2].copy()).to(device)
