"""Regions map a contiguous run of a live model's memory to the elements of a canonical tensor.

Engines fuse and shard the checkpoint's tensors. A region says which elements of which tensor one contiguous run of live
memory holds: `rows` rows of `width` elements, `stride` apart. A part of a fused projection is one row; a shard along a
later axis is many. Invariant: the rows of a region with several rows start on blocks of noise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_es.errors import ModelError
from hpc_es.noise import BLOCK, Rows


@dataclass(frozen=True)
class Region:
    """The elements start + r * stride + c (r < rows, c < width) of the tensor `name`, in this order."""

    name: str
    start: int
    rows: int
    width: int
    stride: int
    """Distance from one row to the next; equal to `width` if there is one row."""
    counts: bool = True
    """Whether the digest includes this copy. Over all ranks of an engine, exactly one copy of each element counts."""

    def __post_init__(self) -> None:
        whole = self.rows == 1 or not (self.width % BLOCK or self.stride % BLOCK)
        if self.start % BLOCK or not whole:
            raise ModelError(
                f"a region of {self.name} ({self.rows} x {self.width} from {self.start}) cuts blocks of noise"
            )

    @property
    def size(self) -> int:
        return self.rows * self.width

    @property
    def end(self) -> int:
        """Index in the tensor after the region's last element."""
        return self.start + (self.rows - 1) * self.stride + self.width

    @property
    def noise_rows(self) -> Rows | None:
        """Rows for a kernel whose theta is the tensor's memory from `start` to `end`; None if there are no gaps."""
        return None if self.rows == 1 else Rows(self.width, self.stride, self.stride)

    def cut(self, size: int) -> Iterator[tuple["Region", int]]:
        """Split into parts of at most `size` elements (a multiple of BLOCK), each with its start in live memory."""
        rows_at_once = max(1, size // self.width)
        for row in range(0, self.rows, rows_at_once):
            rows = min(rows_at_once, self.rows - row)
            for column in range(0, self.width, size):
                width = min(size, self.width - column)
                start, stride = self.start + row * self.stride + column, self.stride if rows > 1 else width
                yield Region(self.name, start, rows, width, stride, self.counts), row * self.width + column


def choose_counted(ranks: Sequence[Sequence[Region]], sizes: Mapping[str, int]) -> list[list[bool]]:
    """Choose which regions of all ranks count, so that the counted ones make up every tensor exactly once.

    `sizes` gives the elements of every canonical tensor. Errors: ModelError naming a tensor for which that is
    impossible.
    """
    first = dict[Region, tuple[int, int]]()
    for rank, regions in enumerate(ranks):
        for number, region in enumerate(regions):
            first.setdefault(region, (rank, number))
    held: dict[str, list[Region]] = {name: [] for name in sizes}
    for region in first:
        held[region.name].append(region)
    for name, size in sizes.items():
        if not _make_up(held[name], size):
            raise ModelError(f"live memory does not hold each element of {name} exactly once")
    return [[first[region] == (rank, n) for n, region in enumerate(regions)] for rank, regions in enumerate(ranks)]


def _make_up(regions: Sequence[Region], size: int) -> bool:
    """Whether the rows of these regions, in order, cover the elements 0 to `size` without gap or overlap."""
    none = [np.empty(0, np.int64)]
    starts = np.concatenate([*(r.start + r.stride * np.arange(r.rows) for r in regions), *none])
    widths = np.concatenate([*(np.full(r.rows, r.width) for r in regions), *none])
    order = np.argsort(starts)
    return np.array_equal(np.append(starts[order], size), np.cumsum(np.append(0, widths[order])))
