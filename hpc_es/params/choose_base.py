"""Choose where to keep the theta from which a live model's weights are written: on the host or on a device."""

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
    """Make the base of one rank, for a device if live memory is on one, else for the host.

    `unheld` are the names of untrained tensors that no rank's live memory holds.
    """
    base: Base
    if all(live.device.type == "cpu" for _, live in targets):
        base = HostBase(arena, targets, rank, num_ranks)
    else:
        from hpc_es.params.device import device_base

        base = device_base(arena, targets, rank, num_ranks, residence)
    base.unheld = arena.digest_of(unheld) if rank == 0 else 0
    return base
