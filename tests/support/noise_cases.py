"""Sizes, places, values, members and updates on which every kernel must equal the reference."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from hpc_es.noise import BLOCK
from hpc_es.noise.reference import MAX_RANK, Array, Matrix, Perturbation, Rows, Step, Trace, Update

TILE, GPU_TILE = 128, 256
"""Blocks per tile of the kernels."""
AROUND_A_TILE = st.builds(int.__add__, st.sampled_from([TILE, GPU_TILE]), st.integers(-3, 3))
SIZES = st.one_of(
    st.integers(1, 40),
    *(st.integers(BLOCK * tile - 9, BLOCK * tile + 9) for tile in (TILE, GPU_TILE)),
    st.sampled_from([3000, 5001]),
)
STARTS = st.sampled_from([0, BLOCK, 13 * BLOCK, BLOCK * (2**32 - 3)])
U64 = st.integers(0, 2**64 - 1)
DTYPES = st.sampled_from([np.float32, np.float16, np.uint16])
SPECIAL_BITS = (
    *(0x80000000, 0, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000),
    *(0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x32FFFFFF, 0x33C00000, 0x3F808000, 0x3F818000, 0x38802000),
)
SPECIAL = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
"""Zeros, subnormals, infinities, NaNs, and values at which rounding to half types changes direction."""


class Layout(NamedTuple):
    """The extent of a pass: `size` elements of theta's memory, of which `count` are values."""

    size: int
    count: int
    rows: Rows | None


def values(size: int, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    theta = (generator.standard_normal(size) * 10.0 ** generator.integers(-9, 6, size)).astype(np.float32)
    theta[: min(size, SPECIAL.size)] = generator.permutation(SPECIAL)[: min(size, SPECIAL.size)]
    return theta


def close(trace: Trace, wanted: Trace) -> bool:
    """Compare digests exactly, and sums of squares approximately: they are added in another order."""
    return trace.digests == wanted.digests and np.allclose(trace.squares, wanted.squares, rtol=1e-5)


@st.composite
def sharded(draw: st.DrawFn) -> Layout:
    """Rows in the tensor's own memory, or in a compact copy; the last may be shorter."""
    width = BLOCK * draw(st.integers(1, 20) | AROUND_A_TILE)
    stride = width + BLOCK * draw(st.sampled_from([0, 1, 9, TILE, GPU_TILE]))
    pitch, full, last = draw(st.sampled_from([width, stride])), draw(st.integers(0, 4)), draw(st.integers(1, width))
    return Layout(full * pitch + last, full * width + last, Rows(width, stride, pitch))


LAYOUTS = SIZES.map(lambda size: Layout(size, size, None)) | sharded()


@st.composite
def perturbations(draw: st.DrawFn) -> Perturbation:
    num_subspaces = draw(st.sampled_from([1, 1, 2, 3, 17, 64]))
    scale = float(np.float32(draw(st.sampled_from([1e-3, -1e-3, 0.25])) / 4096))
    return Perturbation(draw(U64), scale, draw(st.integers(0, num_subspaces - 1)), num_subspaces, draw(U64))


@st.composite
def updates(draw: st.DrawFn, num_states: int = 0) -> Update:
    num_subspaces = draw(st.sampled_from([1, 1, 2, 5, 64]))
    count = draw(st.integers(0, 4))
    coefficients = [float(np.float32(draw(st.sampled_from([1e-3, -2e-4, 7e-8, 0.0])))) for _ in range(count)]
    subspaces = [draw(st.integers(0, num_subspaces - 1)) for _ in range(count)]
    seeds, partitions = [draw(U64) for _ in range(count)], draw(st.lists(U64, min_size=2, max_size=2))
    step = draw(steps_of(num_states)) if num_states else None
    of_partition = [partitions[2 * i // count] for i in range(count)]  # sorted by dispatch version, as in a commit
    return Update(seeds, coefficients, subspaces, num_subspaces, of_partition, step)


def fp32(*numbers: float) -> list[float]:
    return [float(np.float32(number)) for number in numbers]


MATRICES = st.builds(
    Matrix, st.sampled_from([1, 5, 24, 10**6]), st.sampled_from([1, 3, 40, 576, 5000]), ident_a=U64, ident_b=U64
)
RANKS = st.sampled_from([1, 1, 2, 4, 5, 7, MAX_RANK])


def low_rank_perturbations() -> st.SearchStrategy[Perturbation]:
    return st.builds(
        lambda seed, scale, rank: Perturbation(seed, scale, rank=rank), U64, st.sampled_from(fp32(1e-9, -3e-8)), RANKS
    )


@st.composite
def low_rank_updates(draw: st.DrawFn, num_states: int = 0) -> Update:
    count = draw(st.integers(0, 6))
    coefficients = [draw(st.sampled_from(fp32(1e-8, -2e-9, 7e-12, 0.0))) for _ in range(count)]
    step = draw(steps_of(num_states)) if num_states else None
    return Update([draw(U64) for _ in range(count)], coefficients, step=step, rank=draw(RANKS))


def steps_of(num_states: int) -> st.SearchStrategy[Step]:
    share, rate = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999]), st.sampled_from([5e-4, 0.3])
    if num_states == 1:
        return st.builds(lambda r, d: Step(*fp32(r, d, 1 - d)), rate, share)
    small = st.sampled_from([1e-8, 1e-3])
    return st.builds(lambda r, d, e, small: Step(*fp32(r, d, 1 - d, e, 1 - e, small)), rate, share, share, small)
