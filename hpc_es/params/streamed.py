"""theta in host memory, streamed through a device: to the device and back for an update, one way to write a member.

Invariant: weights and digests are, bit for bit, those of the arena's own passes. Copies in, kernels and copies out
overlap; a staging buffer is refilled only after its last reader has finished. If an update fails halfway, theta is half
updated and cannot be used until the arena is reloaded.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch

from hpc_es.errors import EngineError
from hpc_es.methods.es import optimiser as optimisers
from hpc_es.noise import BLOCK, State, Trace, Update, cuda, kernels, tensor_id, threads
from hpc_es.noise.cuda import Piece, Pieces
from hpc_es.params.arena import CHUNK, Arena, perturbation_of
from hpc_es.params.regions import Region
from hpc_es.params.report import UpdateReport
from hpc_es.params.streams import Event, Streams, streams_on
from hpc_es.records import Commit, Member

STAGING = 96 * 2**20
"""Bytes of a ring of staging buffers; never more than MAX_STAGING."""
MAX_STAGING = 256 * 2**20
VERSIONS = 64
"""Most updates in one pass. More updates save passes, but the members and sums of a long catch-up would take too much
device memory."""


class Held(NamedTuple):
    """One tensor of the arena, flat in host memory."""

    ident: int
    trained: bool
    theta: torch.Tensor
    state: tuple[State, ...]
    """m and v, if the tensor is trained with an optimiser."""

    @property
    def planes(self) -> list[torch.Tensor]:
        """theta and state: everything that an update changes, all of equal size."""
        return [self.theta, *(kept.values for kept in self.state)]


def held_by(arena: Arena) -> dict[str, Held]:
    """The arena's tensors by canonical name."""
    flat = {name: torch.from_numpy(values.reshape(-1)) for name, values in arena.contents().items()}
    kept, trained = optimisers.STATE[arena.optimiser], set(arena.trained)
    return {
        name: Held(
            tensor_id(name),
            name in trained,
            flat[name],
            tuple(State(flat[f"{name}#{letter}"], tensor_id(f"{name}#{letter}")) for letter in kept)
            if name in trained
            else (),
        )
        for name in arena.names
    }


class UpdateGuard:
    """Remembers a failed update, which leaves theta half updated."""

    def __init__(self) -> None:
        self._is_complete = True

    @contextmanager
    def update(self) -> Iterator[None]:
        """Wraps an update; theta counts as complete again only if the body raises no error."""
        self._is_complete = False
        yield
        self._is_complete = True

    def check(self) -> None:
        """Refuse to use a half-updated theta. Errors: EngineError."""
        if not self._is_complete:
            raise EngineError(
                "the device failed during an update, so theta is half updated: load a checkpoint, or restart"
            )


class Slot:
    """A staging buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.free: Sequence[Event] = ()
        """Events after which the buffer may be refilled."""


class Ring:
    """Staging buffers on a device, used in turn."""

    def __init__(self, device: torch.device, num_bytes: int = STAGING, num_slots: int = 3) -> None:
        if num_bytes > MAX_STAGING:
            raise EngineError(f"{num_bytes} bytes of staging buffers exceed the limit of {MAX_STAGING}")
        self.size = num_bytes // num_slots // 4 // BLOCK * BLOCK
        """Number of elements of one buffer."""
        self._buffers = [torch.empty(self.size, dtype=torch.float32, device=device) for _ in range(num_slots)]

    def slots(self) -> Iterator[Slot]:
        """An endless cycle over the buffers for one pass; all of them start free."""
        return cycle([Slot(buffer) for buffer in self._buffers])

    def cut(self, region: Region) -> Iterator[tuple[Region, int]]:
        """Split a region into parts that fit into a buffer with the gaps between their rows; see Region.cut."""
        rows = max(0, self.size - region.width) // region.stride + 1
        return region.cut(rows * region.width if region.rows > 1 and region.width <= self.size else self.size)


class _Part(NamedTuple):
    """The elements that go through a staging buffer at a time."""

    held: Held
    start: int
    planes: list[torch.Tensor]
    staged: list[torch.Tensor]
    pieces: Pieces


class Streamed:
    """Updates one rank's slice of an arena. Device errors are those of torch (RuntimeError)."""

    def __init__(
        self,
        arena: Arena,
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        ring: Ring | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.arena, self._device = arena, device
        self._rank, self._num_ranks = rank, num_ranks
        self._ring, self._streams = ring or Ring(device), streams or streams_on(device)
        self._held = held_by(arena)
        self._size = self._ring.size // (1 + len(optimisers.STATE[arena.optimiser])) // BLOCK * BLOCK
        trained = [held for held in self._held.values() if held.trained]
        parts = [(held, start) for held in trained for start in range(0, held.theta.numel(), self._size)]
        mine, slots = parts[rank::num_ranks], self._ring.slots()
        self._parts = [self._part(held, start, next(slots).buffer) for held, start in mine]
        self._guard = UpdateGuard()
        self._rest: int | None = None
        self._digest_of_state: int | None = None

    def apply(self, commits: Sequence[Commit]) -> UpdateReport:
        """Apply commits to this rank's slice; see Arena.apply."""
        begin = time.monotonic()
        self._guard.check()
        updates = self.arena.updates(commits)
        if not updates:
            return self.arena.apply([], rank=self._rank, num_ranks=self._num_ranks)
        if any(update.rank for update in updates):  # the GPU has no kernels for it yet; the host gives the same bits
            self._digest_of_state = None
            return self.arena.apply(commits, rank=self._rank, num_ranks=self._num_ranks)
        rest = self._untrained()
        with self._guard.update():
            trace = in_passes(updates, self._pass)
        self.arena.version += len(updates)
        digests = tuple((rest + digest) % 2**64 for digest in trace.digests)
        return UpdateReport(digests, tuple(trace.squares), time.monotonic() - begin)

    def reload(self) -> None:
        """Note that the arena was reloaded."""
        self._guard, self._rest, self._digest_of_state = UpdateGuard(), None, None

    def _part(self, held: Held, start: int, buffer: torch.Tensor) -> "_Part":
        planes = [plane[start : start + self._size] for plane in held.planes]
        staged = [buffer[i * self._size :][: plane.numel()] for i, plane in enumerate(planes)]
        state = [State(values, kept.ident) for values, kept in zip(staged[1:], held.state, strict=True)]
        return _Part(
            held, start, planes, staged, Pieces([Piece(staged[0], held.ident, start, state=state)], self._device)
        )

    def _pass(self, updates: Sequence[Update]) -> Trace:
        plan = cuda.Plan.of(updates, self._device)
        with self._streams as lanes:
            for part, slot in zip(self._parts, self._ring.slots(), strict=False):
                copied = lanes.submit("in", partial(_copy, part.staged, part.planes), slot.free)
                done = lanes.submit("compute", partial(plan.run, part.pieces), [copied])
                slot.free = [lanes.submit("out", partial(_copy, part.planes, part.staged), [done])]
        trace = plan.trace()
        self._digest_of_state = plan.digest_of_state
        return trace

    def _untrained(self) -> int:
        """Share of the digest of the untrained tensors, which is constant; remembered until the arena is reloaded."""
        if self._rest is None:
            fixed = [(held.theta, held.ident, 0) for held in self._held.values() if not held.trained]
            self._rest = digest_of(fixed[self._rank :: self._num_ranks])
        return self._rest


class StreamedBase(Streamed):
    """The base (params/base.py) that streams members from the arena through the device."""

    unheld = 0

    def __init__(
        self,
        arena: Arena,
        targets: Sequence[tuple[Region, torch.Tensor]],
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        ring: Ring | None = None,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(arena, device, rank, num_ranks, ring=ring, streams=streams)
        slots = self._ring.slots()
        self._writes = [
            self._write(part, live[at : at + part.size], next(slots).buffer)
            for region, live in targets
            for part, at in self._ring.cut(region)
        ]

    def write(self, member: Member | None) -> int:
        """See Base.write."""
        self._guard.check()
        noisy, total = perturbation_of(member), cuda.zero(self._device)
        with self._streams as lanes:
            for (theta, staged, pieces), slot in zip(self._writes, self._ring.slots(), strict=False):
                copied = lanes.submit("in", partial(_copy, [staged], [theta]), slot.free)
                slot.free = [lanes.submit("compute", partial(pieces.perturb, noisy, total), [copied])]
        return (int(total) + self._state_digest() + self.unheld) % 2**64

    def _write(
        self, part: Region, live: torch.Tensor, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Pieces]:
        """The part's memory in the arena, its staging buffer, and the pieces that write it to live memory."""
        held = self._held[part.name]
        theta = held.theta[part.start : part.end]
        staged, rows = buffer[: theta.numel()], part.noise_rows
        piece = Piece(staged, held.ident, part.start, rows, live, trained=held.trained, counts=part.counts)
        return theta, staged, Pieces([piece], self._device)

    def _state_digest(self) -> int:
        """This rank's share of the digest of the optimiser's state: from the last update, or computed before one."""
        if self._digest_of_state is None:
            self._digest_of_state = digest_of(
                (values, kept.ident, part.start)
                for part in self._parts
                for values, kept in zip(part.planes[1:], part.held.state, strict=True)
            )
        return self._digest_of_state


def in_passes(updates: Sequence[Update], run: Callable[[Sequence[Update]], Trace]) -> Trace:
    """Apply updates in passes of at most VERSIONS each; return the trace of all of them."""
    traces = [run(updates[first : first + VERSIONS]) for first in range(0, len(updates), VERSIONS)]
    return Trace([d for trace in traces for d in trace.digests], [s for trace in traces for s in trace.squares])


def digest_of(parts: Iterable[tuple[torch.Tensor, int, int]]) -> int:
    """Digest of parts in host memory, computed on all cores. A part is (values, tensor id, index of the first
    value)."""
    pieces = [
        (values[at : at + CHUNK].numpy(), ident, start + at)
        for values, ident, start in parts
        for at in range(0, values.numel(), CHUNK)
    ]
    shares = list[int]()
    threads.run(lambda piece: shares.append(kernels().digest(piece[0], piece[1], start=piece[2])), pieces)
    return sum(shares) % 2**64


def _copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    for target, values in zip(to, source, strict=True):
        target.copy_(values, non_blocking=True)
