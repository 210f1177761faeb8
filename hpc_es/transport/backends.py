"""What a process can offer to a collective group, and what a group's members agree on.

Invariant: a group is opened with a backend that each of its members has, and NCCL only between distinct GPUs.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from hpc_es.errors import TransportError

Backend = Literal["none", "gloo", "nccl"]


class Offer(Struct, frozen=True):
    """What one process brings along."""

    backend: Backend
    gpu: str = ""
    """UUID of the GPU that its NCCL groups would use; "" where there is none."""


NOTHING = Offer("none")


class Choice(Struct, frozen=True):
    backend: Backend
    why: str = ""
    """Why it is not the better one that was to be expected."""


def own_offer() -> Offer:
    """The best that this process can join; "none" where torch is not installed. Imports torch: seconds."""
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
    """The backend of a group, from transport.backend and what head and members offer.

    NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), so those get Gloo, whatever is wanted. Errors:
    TransportError when NCCL is demanded and somebody lacks it.
    """
    backends = [offer.backend for offer in offers]
    if wanted == "none" or not offers or "none" in backends:
        return Choice("none")
    if wanted == "gloo":
        return Choice("gloo")
    if any(backend != "nccl" for backend in backends):
        if wanted == "nccl":
            raise TransportError(
                f"transport.backend=nccl needs CUDA at the head and at every worker, and they offer "
                f"{', '.join(backends)}; use auto or gloo"
            )
        return Choice("gloo")
    gpus = [offer.gpu for offer in offers if offer.gpu]
    if shared := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
        return Choice("gloo", f"NCCL takes one process per GPU, and {gpus.count(shared[0])} share {shared[0]}")
    return Choice("nccl")
