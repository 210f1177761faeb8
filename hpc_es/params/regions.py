"""Which elements of a canonical tensor lie in one run of a live model's memory.

Engines fuse and shard the checkpoint's tensors. A region says, for one contiguous run of live memory, which elements
of which tensor it holds: `rows` runs of `width` elements, `stride` apart. Rows of a fused projection are one run;
a shard cut along a later axis is many. Invariant: a region of several rows begins and repeats on blocks of noise.
"""

from dataclasses import dataclass

from hpc_es.errors import ModelError
from hpc_es.noise import BLOCK


@dataclass(frozen=True)
class Region:
    """Elements start + r * stride + c (r < rows, c < width) of the tensor `name`, in this order."""

    name: str
    start: int
    rows: int
    width: int
    stride: int
    """From one row to the next; equal to `width` where there is one row."""
    counts: bool = True
    """This copy's share is in the digest. Over all ranks of an engine, exactly one copy of each element counts."""

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
        """Behind the last element, in the tensor."""
        return self.start + (self.rows - 1) * self.stride + self.width
