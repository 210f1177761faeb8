"""Page-locked host memory, which a GPU can copy at full speed while it computes.

Invariant: registered memory is unregistered before it is freed. If the driver refuses, copies are slower but correct.
"""

import logging
import weakref
from typing import Any

import torch

from hpc_es.noise import Array

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""

log = logging.getLogger(__name__)


def pin(memory: Array, owner: object, cudart: Any = None) -> bool:
    """Register memory with CUDA in this process for as long as `owner` lives; return False, with a warning, if refused.

    Processes that share memory must each register it.
    """
    cudart = torch.cuda.cudart() if cudart is None else cudart
    address = memory.ctypes.data
    if code := int(cudart.cudaHostRegister(address, memory.nbytes, PORTABLE)):
        _forget_error()
        if code == ALREADY_REGISTERED:
            return True
        log.warning(
            "CUDA could not pin the %.2f GiB of theta's arena (cudaHostRegister: error %d, %s), so copies to and from "
            "the device are slower; raise the limit on locked memory (ulimit -l) or on the job's memory",
            *(memory.nbytes / 2**30, code, cudart.cudaGetErrorString(cudart.cudaError(code))),
        )
        return False
    # Not at exit: the driver frees the memory when the process ends.
    weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False
    return True


def _forget_error() -> None:
    """Clear CUDA's pending error: otherwise the next kernel reports the refused call, and torch blames the kernel."""
    if torch.cuda.is_available():
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            log.debug("cleared the pending CUDA error: %s", error)
