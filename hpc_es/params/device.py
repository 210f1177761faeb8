"""theta kept on the device in float32, as the compact regions of one rank; and whether there is room for that.

Invariant: what is written and reported is, bit for bit, what the host's arena would give. The arena's memory stays
behind while commits are applied here; only `reload` reads it again, and its `version` counts what is held here.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import distributed

from hpc_es.errors import EngineError
from hpc_es.methods.es import optimiser as optimisers
from hpc_es.noise import BLOCK, Rows, State, Trace, Update, cuda
from hpc_es.noise.cuda import Piece, Pieces
from hpc_es.params.arena import Arena, perturbation_of
from hpc_es.params.base import Base, Target
from hpc_es.params.pinned import pin
from hpc_es.params.regions import Region
from hpc_es.params.report import UpdateReport
from hpc_es.params.room import RESERVE, Residence
from hpc_es.params.streamed import MOST_STAGING, Ring, StreamedBase, Whole, held_by, in_passes
from hpc_es.params.streams import Streams, streams_on
from hpc_es.records import Commit, Member

log = logging.getLogger(__name__)


def device_base(arena: Arena, targets: Sequence[Target], rank: int, num_ranks: int, residence: Residence) -> Base:
    """The base of a rank whose live memory is on a device: theta on it as well, or streamed from pinned host memory.

    auto: on the device where every rank has room. All ranks call this at once, when the engine has what it needs:
    what is free then is taken to be free for good. Errors: EngineError when residence is `device` and there is no room.
    """
    device = targets[0][1].device
    pinned = pin(arena.memory, arena)
    needed, free = bytes_needed(arena, [region for region, _ in targets]), bytes_free(device)
    has_room = needed + RESERVE <= free
    if residence == "device" and not has_room:
        raise EngineError(
            f"engine.base=device needs {needed} bytes on {device}, and {RESERVE} in reserve, beside the engine's own; "
            f"{free} are free: leave the engine less (engine.extra.gpu_memory_utilization), or use engine.base=host"
        )
    if residence == "auto":
        has_room = all_ranks(has_room, num_ranks, device)
    keep = residence != "host" and has_room
    with extra_memory(device) as extra:
        make = DeviceBase if keep else StreamedBase
        base: Base = make(arena, targets, device, rank, num_ranks)
    bound = MOST_STAGING + needed * keep
    if extra.peak > bound:
        raise EngineError(f"theta took {extra.peak} bytes of {device} at its peak; {bound} were to be enough")
    where = "on the device" if keep else f"in {'pinned' if pinned else 'pageable'} host memory"
    log.info(
        "theta is kept %s: %.2f GiB needed, %.2f GiB free; the device holds %.1f MiB more for it, at the peak %.1f MiB",
        *(where, needed / 2**30, free / 2**30, extra.held / 2**20, extra.peak / 2**20),
    )
    return base


def all_ranks(mine: bool, num_ranks: int, device: torch.device) -> bool:
    """Whether all ranks say so; they ask each other through the engine's default process group. They stream from one
    arena, which each of them updates a part of, so they must all choose alike. False where they cannot ask."""
    if num_ranks == 1:
        return mine
    if not distributed.is_initialized() or distributed.get_world_size() != num_ranks:
        return False
    vote = torch.tensor(int(mine), device=device)
    distributed.all_reduce(vote, distributed.ReduceOp.MIN)
    return bool(vote)


def bytes_needed(arena: Arena, regions: Iterable[Region]) -> int:
    """Device memory of a DeviceBase that holds these regions."""
    trained, state = set(arena.trained), len(optimisers.STATE[arena.optimiser])
    return sum(4 * _padded(r.size) * (1 + state * (r.name in trained)) for r in regions)


def bytes_free(device: torch.device) -> int:
    """Free bytes of the device, whichever process took the rest."""
    return int(torch.cuda.mem_get_info(device)[0])


@dataclass
class Extra:
    """Bytes that torch's allocator has given out since it was made."""

    held: int = 0
    peak: int = 0


@contextmanager
def extra_memory(device: torch.device) -> Iterator[Extra]:
    """Measures what is done inside."""
    extra, before = Extra(), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield extra
    extra.held = torch.cuda.memory_allocated(device) - before
    extra.peak = torch.cuda.max_memory_allocated(device) - before


class _Copy(NamedTuple):
    """A region on the device, one row beside the other."""

    region: Region
    planes: list[torch.Tensor]
    """theta, and the optimiser's state."""


class DeviceBase:
    """A base (params/base.py): a member is a few kernels, from device memory to device memory."""

    unheld = 0

    def __init__(
        self,
        arena: Arena,
        targets: Sequence[Target],
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        ring: Ring | None = None,
        streams: Streams | None = None,
    ) -> None:
        """`rank` and `num_ranks` do not matter: the regions say what is this rank's, and which of them count."""
        self.arena, self._device = arena, device
        self._streams = streams or streams_on(device)
        memory = torch.empty(bytes_needed(arena, [region for region, _ in targets]) // 4, device=device)
        held, begin = held_by(arena), 0

        def take(size: int) -> torch.Tensor:
            nonlocal begin
            begin += _padded(size)
            return memory[begin - _padded(size) :][:size]

        self._copies, theta, state = list[_Copy](), list[Piece](), list[Piece]()
        for region, live in targets:
            source = held[region.name]
            planes = [take(region.size) for _ in source.planes]
            kept = [State(values, k.ident) for values, k in zip(planes[1:], source.state, strict=True)]
            rows = Rows(region.width, region.stride, region.width) if region.rows > 1 else None
            trained, counts = source.trained, region.counts
            theta.append(Piece(planes[0], source.ident, region.start, rows, live, kept, trained, counts))
            state += [Piece(*each, region.start, rows, counts=counts) for each in kept]
            self._copies.append(_Copy(region, planes))
        self._theta, self._state = Pieces(theta, device), Pieces(state, device)
        self._untrained = Pieces([piece for piece in theta if not piece.trained], device)
        self._whole = Whole()
        self._load(ring or Ring(device))

    def write(self, member: Member | None) -> int:
        """See Base.write."""
        self._whole.check()
        total = cuda.zero(self._device)
        self._theta.perturb(perturbation_of(member), total)
        return (int(total) + self._digest_of_state + self.unheld) % 2**64

    def apply(self, commits: Sequence[Commit]) -> UpdateReport:
        """See Base.apply."""
        begin = time.monotonic()
        self._whole.check()
        updates = self.arena.updates(commits)
        if not updates:
            digest = (self._digest(self._theta) + self._digest_of_state + self.unheld) % 2**64
            return UpdateReport((digest,), (), time.monotonic() - begin)
        with self._whole.update():
            trace = in_passes(updates, self._pass)
        self.arena.version += len(updates)
        untouched = self._digest_of_untrained + self.unheld
        digests = tuple((untouched + digest) % 2**64 for digest in trace.digests)
        return UpdateReport(digests, tuple(trace.squares), time.monotonic() - begin)

    def reload(self) -> None:
        """Note that the arena was reloaded."""
        self._load(Ring(self._device))

    def _pass(self, updates: Sequence[Update]) -> Trace:
        plan = cuda.Plan.of(updates, self._device)
        plan.run(self._theta)
        trace = plan.trace()
        self._digest_of_state = plan.digest_of_state
        return trace

    def _load(self, ring: Ring) -> None:
        """theta and state := the arena's."""
        held, slots = held_by(self.arena), ring.slots()
        with self._whole.update(), self._streams as lanes:
            for copy in self._copies:
                for plane, target in zip(held[copy.region.name].planes, copy.planes, strict=True):
                    for part, at in ring.cut(copy.region):
                        source, slot, to = plane[part.start : part.end], next(slots), target[at : at + part.size]
                        staged = slot.buffer[: source.numel()]
                        copied = lanes.submit("in", partial(staged.copy_, source, non_blocking=True), slot.free)
                        slot.free = [lanes.submit("compute", partial(_gather, staged, part, to), [copied])]
        self._digest_of_untrained, self._digest_of_state = self._digest(self._untrained), self._digest(self._state)

    def _digest(self, pieces: Pieces) -> int:
        """Waits for the device."""
        total = cuda.zero(self._device)
        pieces.digest(total)
        return int(total)


def _gather(staged: torch.Tensor, part: Region, to: torch.Tensor) -> None:
    """The rows of a part, from memory that has gaps between them to memory that has none."""
    to.view(part.rows, part.width).copy_(staged.as_strided((part.rows, part.width), (part.stride, 1)))


def _padded(size: int) -> int:
    """To where the next copy begins, so that kernels read 16 bytes at a time."""
    return -(-size // BLOCK) * BLOCK
