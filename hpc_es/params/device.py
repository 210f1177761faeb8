"""theta kept on the device in float32, as the compact regions of one rank, if there is enough memory.

Invariant: weights and digests are, bit for bit, those that the host's arena would give. Commits are applied on the
device only, so the arena's memory becomes outdated until `reload` reads it again; the arena's `version` is that of the
theta on the device.
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
from hpc_es.params.streamed import MAX_STAGING, Ring, StreamedBase, UpdateGuard, held_by, in_passes
from hpc_es.params.streams import Streams, streams_on
from hpc_es.records import Commit, Member

log = logging.getLogger(__name__)


def device_base(arena: Arena, targets: Sequence[Target], rank: int, num_ranks: int, residence: Residence) -> Base:
    """Make the base of a rank whose live memory is on a device: theta on the device too, or streamed from host memory.

    `auto` keeps theta on the device if every rank has room. All ranks call this at the same time, after the engine has
    allocated its memory, because memory that is free then is assumed to stay free. Errors: EngineError when residence
    is `device` and there is no room.
    """
    device = targets[0][1].device
    pinned = pin(arena.memory, arena)
    needed, free = bytes_needed(arena, [region for region, _ in targets]), bytes_free(device)
    has_room = needed + RESERVE <= free
    if residence == "device" and not has_room:
        raise EngineError(
            f"engine.base=device needs {needed} bytes on {device} and {RESERVE} in reserve, beside the engine's own "
            f"memory, but {free} are free: lower engine.extra.gpu_memory_utilization, or use engine.base=host"
        )
    if residence == "auto":
        has_room = all_ranks(has_room, num_ranks, device)
    keep = residence != "host" and has_room
    with extra_memory(device) as extra:
        make = DeviceBase if keep else StreamedBase
        base: Base = make(arena, targets, device, rank, num_ranks)
    bound = MAX_STAGING + needed * keep
    if extra.peak > bound:
        raise EngineError(f"theta took {extra.peak} bytes of {device} at its peak, more than the expected {bound}")
    where = "on the device" if keep else f"in {'pinned' if pinned else 'pageable'} host memory"
    log.info(
        "theta is kept %s: %.2f GiB needed, %.2f GiB free; it takes %.1f MiB of device memory, %.1f MiB at the peak",
        *(where, needed / 2**30, free / 2**30, extra.held / 2**20, extra.peak / 2**20),
    )
    return base


def all_ranks(mine: bool, num_ranks: int, device: torch.device) -> bool:
    """Whether every rank passes True, decided through the engine's default process group; False if there is none.

    All ranks must choose the same: when they stream, each of them updates a part of one shared arena.
    """
    if num_ranks == 1:
        return mine
    if not distributed.is_initialized() or distributed.get_world_size() != num_ranks:
        return False
    vote = torch.tensor(int(mine), device=device)
    distributed.all_reduce(vote, distributed.ReduceOp.MIN)
    return bool(vote)


def bytes_needed(arena: Arena, regions: Iterable[Region]) -> int:
    """Bytes of device memory that a DeviceBase with these regions takes."""
    trained, state = set(arena.trained), len(optimisers.STATE[arena.optimiser])
    return sum(4 * _padded(r.size) * (1 + state * (r.name in trained)) for r in regions)


def bytes_free(device: torch.device) -> int:
    """Free bytes of the device, counting the use of all processes."""
    return int(torch.cuda.mem_get_info(device)[0])


@dataclass
class Extra:
    """Bytes that torch's allocator gave out within `extra_memory`."""

    held: int = 0
    peak: int = 0


@contextmanager
def extra_memory(device: torch.device) -> Iterator[Extra]:
    """Measure the device memory that the body of the `with` statement allocates."""
    extra, before = Extra(), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield extra
    extra.held = torch.cuda.memory_allocated(device) - before
    extra.peak = torch.cuda.max_memory_allocated(device) - before


class _Copy(NamedTuple):
    """A region's compact copy on the device, without gaps between rows."""

    region: Region
    planes: list[torch.Tensor]
    """theta and the optimiser's state."""


class DeviceBase:
    """The base (params/base.py) that writes a member with a few kernels, from device memory to device memory."""

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
        """`rank` and `num_ranks` are ignored: the regions say what this rank holds and which copies count."""
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
        self._guard = UpdateGuard()
        self._load(ring or Ring(device))

    def write(self, member: Member | None) -> int:
        """See Base.write."""
        self._guard.check()
        total = cuda.zero(self._device)
        self._theta.perturb(perturbation_of(member), total)
        return (int(total) + self._digest_of_state + self.unheld) % 2**64

    def apply(self, commits: Sequence[Commit]) -> UpdateReport:
        """See Base.apply."""
        begin = time.monotonic()
        self._guard.check()
        updates = self.arena.updates(commits)
        if not updates:
            digest = (self._digest(self._theta) + self._digest_of_state + self.unheld) % 2**64
            return UpdateReport((digest,), (), time.monotonic() - begin)
        with self._guard.update():
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
        """Copy theta and state from the arena."""
        held, slots = held_by(self.arena), ring.slots()
        with self._guard.update(), self._streams as lanes:
            for copy in self._copies:
                for plane, target in zip(held[copy.region.name].planes, copy.planes, strict=True):
                    for part, at in ring.cut(copy.region):
                        source, slot, to = plane[part.start : part.end], next(slots), target[at : at + part.size]
                        staged = slot.buffer[: source.numel()]
                        copied = lanes.submit("in", partial(staged.copy_, source, non_blocking=True), slot.free)
                        slot.free = [lanes.submit("compute", partial(_gather, staged, part, to), [copied])]
        self._digest_of_untrained, self._digest_of_state = self._digest(self._untrained), self._digest(self._state)

    def _digest(self, pieces: Pieces) -> int:
        """Digest of these pieces; waits for the device."""
        total = cuda.zero(self._device)
        pieces.digest(total)
        return int(total)


def _gather(staged: torch.Tensor, part: Region, to: torch.Tensor) -> None:
    """Copy the rows of a part from memory with gaps between them to memory without gaps."""
    to.view(part.rows, part.width).copy_(staged.as_strided((part.rows, part.width), (part.stride, 1)))


def _padded(size: int) -> int:
    """Size rounded up so that the next copy is aligned and kernels can read 16 bytes at a time."""
    return -(-size // BLOCK) * BLOCK
