"""Page-locked host memory, which a GPU copies from and to at full speed while it computes.

Invariant: registered memory is unregistered before it is freed. Where the driver refuses, copies are slower, and right.
"""

import logging
import weakref
from typing import Any

import torch

from hpc_es.noise import Array

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""

ALREADY = 712
"""cudaErrorHostMemoryAlreadyRegistered."""

log = logging.getLogger(__name__)


def pin(memory: Array, owner: object, cudart: Any = None) -> bool:
    """Register memory with CUDA for as long as `owner` lives, in this process. False, with a warning: it was refused.

    Processes that share memory register it each for itself.
    """
    cudart = torch.cuda.cudart() if cudart is None else cudart
    address = memory.ctypes.data
    if code := int(cudart.cudaHostRegister(address, memory.nbytes, PORTABLE)):
        _forget_error()
        if code == ALREADY:
            return True
        log.warning(
            "CUDA could not pin the %.2f GiB of theta's arena (cudaHostRegister: error %d, %s), so copies to and from "
            "the device are slower; the limits on locked memory (ulimit -l) and on the job's memory decide",
            *(memory.nbytes / 2**30, code, cudart.cudaGetErrorString(cudart.cudaError(code))),
        )
        return False
    weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False  # a process that ends frees it anyway
    return True


def _forget_error() -> None:
    """CUDA reports a refused call once more at the next kernel, which torch would take for that kernel's failure."""
    if torch.cuda.is_available():
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            log.debug("the refusal again: %s", error)
