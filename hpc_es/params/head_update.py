"""What advances the head's theta: a GPU that the arena streams through, or all cores; and whether its memory is pinned.

Invariant: both leave the same bits. A GPU is tried out before theta is entrusted to it; if it fails later, the head
stops, for its arena may then be half an update, and a start from checkpoint and journal rebuilds the whole. The head
works without torch.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpc_es.errors import ConfigError, HpcEsError, RunFailed
from hpc_es.noise import BLOCK, Update, kernels
from hpc_es.params.arena import Arena
from hpc_es.params.report import UpdateReport
from hpc_es.records import Commit

if TYPE_CHECKING:
    import torch

Apply = Callable[[Sequence[Commit]], UpdateReport]
"""Arena.apply, or what gives the same."""

log = logging.getLogger(__name__)


def head_update(arena: Arena, device: Literal["auto", "cpu", "cuda"]) -> Apply:
    """How commits are applied to the head's arena (see `pin_arena`).

    Errors: ConfigError when head.device is `cuda` and there is no GPU that can.
    """
    if device == "cpu":
        return arena.apply
    if obstacle := _obstacle():
        if device == "cuda":
            raise ConfigError(f"head.device=cuda, and {obstacle}: give the head's job a GPU, or use head.device=auto")
        return arena.apply
    import torch

    try:
        return on_device(arena, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # whatever a driver, an allocator or a compiler says
        if device == "cuda":
            raise ConfigError(f"head.device=cuda, and the GPU cannot be used ({error}); try head.device=cpu") from error
        log.warning("the head's GPU cannot be used (%s): theta is updated on all cores", error)
        return arena.apply


def pin_arena(arena: Arena) -> str:
    """Pin the head's arena where CUDA is present, whatever updates it: theta is also sent from it to joining workers.
    Only CUDA can pin for a GPU, so a node without one keeps plain memory. "pinned", or "pageable" with the reason.
    """
    why = _no_cuda()
    if not why:
        from hpc_es.params.pinned import pin

        try:
            why = "" if pin(arena.memory, arena) else "CUDA refused to pin it"
        except RuntimeError as error:  # the driver is there, and the device is not to be had
            why = f"CUDA cannot be used here ({error})"
    log.info("theta's arena is in %s host memory%s", *(("pageable", f": {why}") if why else ("pinned", "")))
    return f"pageable: {why}" if why else "pinned"


def on_device(arena: Arena, device: "torch.device", **options: Any) -> Apply:
    """Stream the arena through a device; options as in Streamed. Errors: whatever comes where the device cannot."""
    from hpc_es.params.streamed import Streamed

    _try_out(device)
    streamed = Streamed(arena, device, **options)

    def apply(commits: Sequence[Commit]) -> UpdateReport:
        try:
            return streamed.apply(commits)
        except HpcEsError:
            raise
        except Exception as error:
            raise RunFailed(
                f"the head's GPU failed in the update of version {arena.version} ({error}), which is now half done: "
                "start the head again, and it rebuilds theta from checkpoint and journal; with head.device=cpu if the "
                "GPU stays as it is"
            ) from error

    log.info("theta is updated on %s, through which the arena streams", device)
    return apply


def _obstacle() -> str:
    """Why this process has no GPU to update theta with, empty if it has one."""
    if why := _no_cuda():
        return why
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return ""


def _no_cuda() -> str:
    """Why this process cannot use CUDA, empty if it can; cheap where there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver here (libcuda.so.1)"
    try:
        import torch
    except ImportError as error:
        return f"{error.name} is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def _try_out(device: "torch.device") -> None:
    """One small update, to be the same as on the CPU: a kernel may not compile here. Errors: RuntimeError."""
    import torch

    from hpc_es.noise import cuda

    expected, update = np.linspace(-1, 1, 125 * BLOCK + 1, dtype=np.float32), [Update([1, 2], [1e-3, -2e-3])]
    theta = torch.from_numpy(expected.copy()).to(device)
    digests = cuda.update(theta, 3, update).digests
    if digests != kernels().update(expected, 3, update).digests:
        raise RuntimeError(f"an update on {device} gives other bits than on the CPU")
