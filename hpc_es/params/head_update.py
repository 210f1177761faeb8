"""Update the head's theta on a GPU that the arena streams through, or on all cores; and pin the arena's memory.

Invariant: both ways give the same bits. A GPU must pass a small test update before it may change theta. If it fails
later, the head stops, because its arena may be half updated; a restart rebuilds theta from checkpoint and journal. The
head works without torch.
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
"""Arena.apply, or a function with the same effect."""

log = logging.getLogger(__name__)


def head_update(arena: Arena, device: Literal["auto", "cpu", "cuda"]) -> Apply:
    """The function that applies commits to the head's arena.

    Errors: ConfigError when head.device is `cuda` and no GPU can be used.
    """
    if device == "cpu":
        return arena.apply
    if obstacle := _obstacle():
        if device == "cuda":
            raise ConfigError(f"head.device=cuda, but {obstacle}: give the head's job a GPU, or use head.device=auto")
        return arena.apply
    import torch

    try:
        return on_device(arena, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # drivers, allocators and compilers raise errors of any type
        if device == "cuda":
            raise ConfigError(f"head.device=cuda, but the GPU cannot be used ({error}); try head.device=cpu") from error
        log.warning("the head's GPU cannot be used (%s): theta is updated on all cores", error)
        return arena.apply


def pin_arena(arena: Arena) -> str:
    """Pin the head's arena if CUDA is present; return "pinned", or "pageable" with the reason.

    This helps even if the update runs on the CPU, because theta is also sent from here to joining workers. Only CUDA
    can pin memory for a GPU, so a node without CUDA keeps pageable memory.
    """
    why = _no_cuda()
    if not why:
        from hpc_es.params.pinned import pin

        try:
            why = "" if pin(arena.memory, arena) else "CUDA refused to pin it"
        except RuntimeError as error:  # there is a driver, but the device cannot be used
            why = f"CUDA cannot be used here ({error})"
    log.info("theta's arena is in %s host memory%s", *(("pageable", f": {why}") if why else ("pinned", "")))
    return f"pageable: {why}" if why else "pinned"


def on_device(arena: Arena, device: "torch.device", **options: Any) -> Apply:
    """Stream the arena through a device, with the options of Streamed. Errors: those of torch or Triton, as they are,
    when the device cannot be used."""
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
                f"the head's GPU failed during the update of version {arena.version} ({error}), so theta is half "
                "updated: restart the head, which rebuilds theta from checkpoint and journal; use head.device=cpu if "
                "the GPU keeps failing"
            ) from error

    log.info("theta is updated on %s; the arena streams through it", device)
    return apply


def _obstacle() -> str:
    """The reason why this process has no GPU to update theta with; empty if it has one."""
    if why := _no_cuda():
        return why
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return ""


def _no_cuda() -> str:
    """The reason why this process cannot use CUDA; empty if it can. Does not import torch if there is no driver."""
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
    """Compare one small update with the CPU's, since kernels may not compile on this GPU. Errors: RuntimeError."""
    import torch

    from hpc_es.noise import cuda

    expected, update = np.linspace(-1, 1, 125 * BLOCK + 1, dtype=np.float32), [Update([1, 2], [1e-3, -2e-3])]
    theta = torch.from_numpy(expected.copy()).to(device)
    digests = cuda.update(theta, 3, update).digests
    if digests != kernels().update(expected, 3, update).digests:
        raise RuntimeError(f"an update on {device} gives different bits than on the CPU")
