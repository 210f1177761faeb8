"""Choose the backend of a process group from the backends that its members support.

Invariant: a group uses a backend that all its members support, and NCCL only if every member has its own GPU.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from hpc_es.errors import TransportError

Backend = Literal["none", "gloo", "nccl"]


class Offer(Struct, frozen=True):
    """The best backend that one process supports."""

    backend: Backend
    gpu: str = ""
    """UUID of the GPU that its NCCL groups would use; empty if there is none."""


NOTHING = Offer("none")


class Choice(Struct, frozen=True):
    """The backend of a group."""

    backend: Backend
    why: str = ""
    """Why the group does not use NCCL although all members support it; empty otherwise."""


def own_offer() -> Offer:
    """Return the best backend that this process supports; "none" without torch. Importing torch takes seconds."""
    try:
        import torch
        from torch import distributed
    except ImportError:
        return NOTHING
    if not distributed.is_available():
        return NOTHING
    if distributed.is_nccl_available() and torch.cuda.is_available():
        return Offer("nccl", str(torch.cuda.get_device_properties(0).uuid))
    return Offer("gloo" if distributed.is_gloo_available() else "none")


def choose_backend(wanted: str, offers: Sequence[Offer]) -> Choice:
    """Choose the backend of a group. wanted: transport.backend; offers: of the head and all members.

    NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), so such groups use Gloo even if NCCL is wanted.
    Errors: TransportError if NCCL is wanted and a process does not support it.
    """
    backends = [offer.backend for offer in offers]
    if wanted == "none" or not offers or "none" in backends:
        return Choice("none")
    if wanted == "gloo":
        return Choice("gloo")
    if any(backend != "nccl" for backend in backends):
        if wanted == "nccl":
            raise TransportError(
                f"transport.backend=nccl needs CUDA at the head and at every worker, but they support "
                f"{', '.join(backends)}; use auto or gloo"
            )
        return Choice("gloo")
    gpus = [offer.gpu for offer in offers if offer.gpu]
    if shared := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
        return Choice("gloo", f"NCCL needs a GPU per process, but {gpus.count(shared[0])} processes share {shared[0]}")
    return Choice("nccl")
