"""Addressed Gaussian noise, and the three passes over parameters that use it (design, section 4).

Invariant: whichever implementation runs, the bits are those of reference.py. numba is imported at first use only,
so that a login node can import this package without it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

from hpc_es.errors import ConfigError
from hpc_es.noise import reference
from hpc_es.noise.reference import (
    BLOCK,
    MAX_RANK,
    MAX_SUBSPACES,
    Array,
    Matrix,
    Perturbation,
    Rows,
    State,
    Step,
    Trace,
    Update,
    tensor_id,
)

__all__ = [
    "Array",
    "BLOCK",
    "Kernels",
    "MAX_RANK",
    "MAX_SUBSPACES",
    "Matrix",
    "Perturbation",
    "Rows",
    "State",
    "Step",
    "Trace",
    "Update",
    "kernels",
    "noise",
    "tensor_id",
]


class Kernels(Protocol):
    """The passes over one tensor, documented in reference.py. `start` is a multiple of BLOCK, except in `noise`."""

    def noise(self, seed: int, ident: int, start: int, count: int) -> Array: ...

    def perturb(
        self,
        theta: Array,
        out: Array,
        ident: int,
        noisy: Perturbation | None,
        *,
        start: int = 0,
        rows: Rows | None = None,
        matrix: Matrix | None = None,
    ) -> int: ...

    def update(
        self,
        theta: Array,
        ident: int,
        updates: list[Update],
        *,
        start: int = 0,
        state: Sequence[State] = (),
        rows: Rows | None = None,
        matrix: Matrix | None = None,
    ) -> Trace: ...

    def digest(self, theta: Array, ident: int, *, start: int = 0, rows: Rows | None = None) -> int: ...


@cache
def kernels() -> Kernels:
    """The compiled kernels, or the reference where numba is not installed: same bits, about fifty times slower."""
    try:
        from hpc_es.noise import cpu
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return cast(Kernels, reference)
    return cast(Kernels, cpu)


def noise(seed: int, name: str, start: int, count: int) -> Array:
    """Table values T (int16 [count]; eps = T / 4096) of elements start .. start + count - 1 of the tensor `name`.

    Errors: ConfigError when the seed is not an unsigned 64-bit integer, or the range is negative.
    """
    if not 0 <= seed < 2**64:
        raise ConfigError(f"the noise seed {seed} must be from 0 to 2^64 - 1")
    if start < 0 or count < 0:
        raise ConfigError(f"start={start} and count={count} must not be negative: they select elements of a tensor")
    return kernels().noise(int(seed), tensor_id(name), int(start), int(count))
