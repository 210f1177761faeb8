"""Choose where a live model's weights are written from: the host's memory or a device's."""

from collections.abc import Collection, Sequence

from hpc_es.params.arena import Arena
from hpc_es.params.base import Base, HostBase, Target
from hpc_es.params.room import Residence


def make_base(
    arena: Arena,
    targets: Sequence[Target],
    rank: int,
    num_ranks: int,
    residence: Residence,
    unheld: Collection[str] = (),
) -> Base:
    """The base of one rank: of its device where live memory is on one, else the host's.

    `unheld`: names of untrained tensors that no rank's live memory holds.
    """
    base: Base
    if all(live.device.type == "cpu" for _, live in targets):
        base = HostBase(arena, targets, rank, num_ranks)
    else:
        from hpc_es.params.device import device_base

        base = device_base(arena, targets, rank, num_ranks, residence)
    base.unheld = arena.digest_of(unheld) if rank == 0 else 0
    return base
