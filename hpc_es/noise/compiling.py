"""How kernels are compiled: ahead of their first call, for exact types, without fused or reordered arithmetic.

The cache knows a kernel by its own source file alone: whatever a kernel calls stands in the same file as the kernel.
"""

import logging
import pickle
from collections.abc import Callable

import numba
from numba import types

log = logging.getLogger(__name__)


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


def vector(element: types.Type) -> types.Type:
    """A contiguous array of one dimension."""
    return types.Array(element, 1, "C")
