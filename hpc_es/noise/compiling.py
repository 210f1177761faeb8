"""Compile kernels before their first call, for exact types, without fused or reordered arithmetic.

numba's cache watches only the source file of the kernel itself. Every function that a kernel calls must therefore be in
the same file, or a change to it would leave a stale kernel in the cache.
"""

import logging
import pickle
from collections.abc import Callable

import numba
from numba import types

log = logging.getLogger(__name__)


def compiled(*arguments: types.Type, cache: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for exactly these argument types; cache beside the source or in the user's cache folder if possible."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = types.void(*arguments)
        if cache:
            try:
                return numba.njit(signature, cache=True, **options)(function)
            except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:  # no folder, or a damaged entry
                log.warning("compiling %s without a cache, which takes seconds: %s", function.__name__, error)
        return numba.njit(signature, **options)(function)

    return decorate


def vector(element: types.Type) -> types.Type:
    """The numba type of a contiguous one-dimensional array."""
    return types.Array(element, 1, "C")
