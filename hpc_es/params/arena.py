"""The arena: one flat fp32 buffer that holds theta, followed by the optimiser's state.

Invariant: the layout is a pure function of the checkpoint's headers, the scope and the optimiser (see layout.py), so
that another process can attach to the same memory by path. theta is always theta_version and changes only by
consecutive commits or by loading, never by subtracting noise. The digest also covers the optimiser's state, because it
decides what theta becomes.
"""

import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hpc_es.errors import ModelError, StoreError
from hpc_es.methods.es import optimiser as optimisers
from hpc_es.methods.es.low_rank import noise_scale
from hpc_es.noise import Array, Matrix, Perturbation, State, Step, Trace, Update, kernels, threads
from hpc_es.params import checkpoint as checkpoints
from hpc_es.params.layout import Slot, as_floats, attach_memory, lay_out, num_elements, share_memory
from hpc_es.params.report import UpdateReport
from hpc_es.params.weights import Stored, scan_file
from hpc_es.records import Commit, Member

Dtype = Literal["float32", "bfloat16", "float16"]
CAST: dict[Dtype, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
"""numpy type of a perturbed tensor; bfloat16 is kept as its bits."""

CHUNK = 2**19
"""Elements that one thread processes at a time."""


class Piece(NamedTuple):
    """Consecutive elements of one tensor, starting at a block boundary."""

    slot: Slot
    start: int
    theta: Array
    state: tuple[State, ...]
    """Optimiser state of the same elements."""

    def digest(self) -> int:
        return self.theta_digest() + self.state_digest()

    def theta_digest(self) -> int:
        return kernels().digest(self.theta, self.slot.ident, start=self.start)

    def state_digest(self) -> int:
        return sum(kernels().digest(kept.values, kept.ident, start=self.start) for kept in self.state)


class Arena:
    """theta and optimiser state in fp32. Not safe for two writers; a reader sees a mix of versions while `apply`
    runs."""

    version: int
    base_digest: int
    memory_path: Path | None
    """Path by which another process can attach to the memory while this one lives; None if the memory is private."""
    optimiser: optimisers.Kind
    """The optimiser whose state is kept beside theta."""
    seconds_to_load: float = 0.0
    """Seconds that reading theta_0 took; 0 if another process read it."""

    def __init__(
        self, slots: Sequence[Slot], buffer: Any | None, memory_path: Path | None, optimiser: optimisers.Kind
    ) -> None:
        """Internal; use from_pretrained or attach."""
        self._slots = {slot.stored.name: slot for slot in slots}
        self.optimiser = optimiser
        size = num_elements(slots)
        self._flat = np.zeros(size, np.float32) if buffer is None else as_floats(buffer, size)
        self.memory_path = memory_path

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        buffer: Any | None = None,
        *,
        shared: bool = False,
        optimiser: optimisers.Kind = "none",
    ) -> "Arena":
        """Load theta_0 from a Hugging Face folder, with the optimiser's state at zero.

        `include` and `exclude` are fnmatch patterns that select the tensors to train; all others stay fixed.
        `buffer` is writable memory of num_bytes(...) bytes to use, for example pinned memory. `shared` puts the arena
        into memory that other processes can attach to; it is freed when the last of them ends, even by a crash.
        `optimiser` is es.optimiser.kind of the run; commits of another optimiser are refused. Errors: ModelError.
        """
        slots = lay_out(path, include, exclude, optimiser)
        if shared:
            memory, descriptor = share_memory(4 * num_elements(slots))
            arena = cls(slots, memory, Path(f"/proc/{os.getpid()}/fd/{descriptor}"), optimiser)
            weakref.finalize(arena, os.close, descriptor)
        else:
            arena = cls(slots, buffer, None, optimiser)
        begin = time.monotonic()
        arena._begin()
        arena.seconds_to_load = time.monotonic() - begin
        arena.version, arena.base_digest = 0, arena.digest()
        return arena

    @classmethod
    def attach(
        cls,
        memory_path: str | Path,
        model_path: str | Path,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        *,
        version: int,
        base_digest: int,
        optimiser: optimisers.Kind = "none",
    ) -> "Arena":
        """Attach to the arena that another process made with shared=True, at `memory_path`; nothing is copied.

        Errors: ModelError when the memory is gone or its size does not fit the model.
        """
        memory_path = Path(memory_path)
        slots = lay_out(model_path, include, exclude, optimiser)
        arena = cls(slots, attach_memory(memory_path), memory_path, optimiser)
        arena.version, arena.base_digest = version, base_digest
        return arena

    @property
    def names(self) -> list[str]:
        """Canonical names, in canonical order."""
        return list(self._slots)

    @property
    def trained(self) -> list[str]:
        """Names of the tensors that noise and updates apply to."""
        return [name for name, slot in self._slots.items() if slot.trained]

    @property
    def num_parameters(self) -> int:
        return sum(slot.stored.size for slot in self._slots.values())

    @property
    def num_bytes(self) -> int:
        return self._flat.nbytes

    @property
    def memory(self) -> Array:
        """The whole buffer, fp32; for registering it as pinned memory."""
        return self._flat

    def matrix(self, name: str) -> Matrix | None:
        """A tensor as noise of low rank sees it; None if that does not reach it."""
        return self._slot(name).matrix

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slot(name).stored.shape

    def stored_dtype(self, name: str) -> str:
        """The type in the base checkpoint, as safetensors spells it: F32, BF16 or F16."""
        return self._slot(name).stored.dtype

    def tensor(self, name: str) -> Array:
        """A float32 view of one tensor of theta."""
        slot = self._slot(name)
        return self._at(slot.offset, slot).reshape(slot.stored.shape)

    def contents(self) -> dict[str, Array]:
        """Everything that makes up this version, as float32 views: theta by name, then `<name>#m` and `<name>#v`."""
        theta = {name: self.tensor(name) for name in self._slots}
        state = {
            kept.name: self._at(kept.offset, slot).reshape(slot.stored.shape)
            for slot in self._slots.values()
            for kept in slot.state
        }
        return theta | state

    def digest(self) -> int:
        """64-bit digest of the bits of every tensor of theta, trained or not, and of the optimiser's state."""
        return self._sum(Piece.digest)

    def digest_of(self, names: Iterable[str]) -> int:
        """Share of the digest of these tensors and their optimiser state."""
        return self._sum(Piece.digest, names)

    def theta_digest(self) -> int:
        """Digest of theta alone: the base digest of an arena loaded from an export of this one."""
        return self._sum(Piece.theta_digest)

    def perturbed(self, name: str, member: Member | None, dtype: Dtype, out: Array | None = None) -> Array:
        """One tensor as cast(theta + sigma * sign * eps); cast(theta) for the centre (None) and untrained tensors.

        Returns float32, float16, or uint16 bits for bfloat16, in the tensor's shape. `out`, if given, is filled
        (contiguous, any shape).
        """
        slot = self._slot(name)
        if out is None:
            out = np.empty(slot.stored.shape, CAST[dtype])
        self.perturb_into({name: out}, member)
        return out.reshape(slot.stored.shape)

    def perturb_into(self, outs: Mapping[str, Array], member: Member | None) -> int:
        """Like `perturbed`, for many tensors at once: fill contiguous arrays of float32, float16 or bfloat16 bits.

        Returns these tensors' share of the digest, computed in the same pass. The optimiser's state does not affect the
        member, but it is part of the digest that every result reports.
        """
        flat = {name: _flat_view(self._slot(name), out) for name, out in outs.items()}
        noisy, shares = perturbation_of(member), list[int]()

        def perturb(piece: Piece) -> None:
            out = flat[piece.slot.stored.name][piece.start : piece.start + piece.theta.size]
            reached = noisy if piece.slot.trained else None
            slot, start = piece.slot, piece.start
            shares.append(kernels().perturb(piece.theta, out, slot.ident, reached, start=start, matrix=slot.matrix))
            shares.append(piece.state_digest())

        threads.run(perturb, self._pieces(map(self._slot, outs)))
        return sum(shares) % 2**64

    def stream(self, member: Member | None, dtype: Dtype, buffer_bytes: int = 2**26) -> "Stream":
        """Iterate over (name, perturbed tensor) in canonical order, computing many tensors at once.

        The arrays share one buffer of `buffer_bytes` (or the size of the largest tensor, if that is more) that later
        steps overwrite: copy what must outlive the next step.
        """
        return Stream(self, list(self._slots.values()), member, dtype, buffer_bytes)

    def update(self, members: Sequence[tuple[int, float]], rank: int = 0) -> UpdateReport:
        """Apply (seed, fp32 coefficient) pairs, in this order, as one version; `rank` is that of their noise."""
        seeds, coefficients = [seed for seed, _ in members], [coefficient for _, coefficient in members]
        return self._advance([Update(seeds, coefficients, rank=rank)], 0, 1)

    def apply(self, commits: Sequence[Commit], *, rank: int = 0, num_ranks: int = 1) -> UpdateReport:
        """Apply the commits version + 1, version + 2, ... in one streaming pass.

        If several ranks share the memory, each updates a disjoint slice and reports partial sums (see combine).
        Errors: those of `updates`, before anything has changed.
        """
        return self._advance(self.updates(commits), rank, num_ranks)

    def updates(self, commits: Sequence[Commit]) -> list[Update]:
        """The kernel updates for the commits version + 1, version + 2, ...

        Errors: StoreError when the commits do not continue from this version, or need another optimiser's state.
        """
        expected = list(range(self.version + 1, self.version + 1 + len(commits)))
        if (versions := [commit.version for commit in commits]) != expected:
            raise StoreError(f"commits {versions} do not continue from version {self.version}; expected {expected}")
        kinds = {commit.seeds.step.kind if commit.seeds.step else "none" for commit in commits}
        if other := kinds - {self.optimiser}:
            raise StoreError(
                f"commits with es.optimiser.kind={other.pop()} cannot be applied to an arena with the state of "
                f"{self.optimiser}"
            )
        return [update_of(commit) for commit in commits]

    def reload(self, checkpoint: Path | None) -> None:
        """Load theta and state from a checkpoint folder of the run, or theta_0 and zero state (None). Sets `version`.

        Errors: StoreError for a damaged checkpoint or a checkpoint of another base model, ModelError when the base
        model has changed.
        """
        if checkpoint is None:
            self._begin()
            if (digest := self.digest()) != self.base_digest:
                raise ModelError(f"the base model has changed: digest {digest:016x}, not {self.base_digest:016x}")
            self.version = 0
            return
        manifest = checkpoints.read_numbered(checkpoint)
        if manifest.base_digest != self.base_digest:
            raise StoreError(f"{checkpoint} belongs to another base model; use the model that the run started from")
        try:
            self._fill(self.contents(), scan_file(checkpoint / checkpoints.THETA))
        except ModelError as error:
            raise StoreError(
                f"the checkpoint {checkpoint} is damaged ({error}); remove it, and an older one is used"
            ) from error
        if self.digest() != manifest.digest:
            raise StoreError(
                f"the checkpoint {checkpoint} is damaged (its digest differs); remove it, and an older one is used"
            )
        self.version = manifest.version

    def _slot(self, name: str) -> Slot:
        try:
            return self._slots[name]
        except KeyError:
            near = get_close_matches(name, self._slots, n=1)
            raise ModelError(
                f"the model has no tensor {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            ) from None

    def _at(self, offset: int, slot: Slot) -> Array:
        """The elements of a tensor, or of its optimiser state, as a flat view."""
        return self._flat[offset : offset + slot.stored.size]

    def _pieces(self, slots: Iterable[Slot]) -> list[Piece]:
        pieces = list[Piece]()
        for slot in slots:
            theta, state = self._at(slot.offset, slot), [State(self._at(k.offset, slot), k.ident) for k in slot.state]
            for start in range(0, slot.stored.size, CHUNK):
                part = slice(start, start + CHUNK)
                pieces.append(
                    Piece(slot, start, theta[part], tuple(State(kept.values[part], kept.ident) for kept in state))
                )
        return pieces

    def _sum(self, share: Callable[[Piece], int], names: Iterable[str] | None = None) -> int:
        shares: list[int] = []
        slots = map(self._slot, self.names if names is None else names)
        threads.run(lambda piece: shares.append(share(piece)), self._pieces(slots))
        return sum(shares) % 2**64

    def _begin(self) -> None:
        """Set theta to theta_0 and the state to zero. Errors: ModelError."""
        contents = self.contents()
        self._fill({name: contents.pop(name) for name in self.names}, [slot.stored for slot in self._slots.values()])
        for kept in contents.values():
            kept[...] = 0

    def _fill(self, contents: Mapping[str, Array], tensors: Sequence[Stored]) -> None:
        """Fill contents with the stored values of tensors with exactly these names and shapes. Errors: ModelError."""
        stored = {tensor.name: tensor for tensor in tensors}
        shapes = {name: values.shape for name, values in contents.items()}
        if {name: tensor.shape for name, tensor in stored.items()} != shapes:
            raise ModelError("the names or shapes of its tensors differ from the model's")
        threads.run(lambda item: stored[item[0]].read_into(item[1].reshape(-1)), contents.items())

    def _advance(self, updates: list[Update], rank: int, num_ranks: int) -> UpdateReport:
        """Apply one rank's share of the updates; this rank owns every num_ranks-th piece."""
        begin = time.monotonic()
        traces: dict[int, Trace] = {}
        pieces = self._pieces(self._slots.values())

        def advance(index: int) -> None:
            piece = pieces[index]
            slot = piece.slot
            if slot.trained and updates:
                traces[index] = kernels().update(
                    piece.theta, slot.ident, updates, start=piece.start, state=piece.state, matrix=slot.matrix
                )
            else:
                traces[index] = Trace([piece.digest()] * max(1, len(updates)), [0.0] * len(updates))

        threads.run(advance, range(rank, len(pieces), num_ranks))
        self.version += len(updates)
        ordered = [traces[index] for index in sorted(traces)]
        digests = [sum(trace.digests[i] for trace in ordered) % 2**64 for i in range(max(1, len(updates)))]
        squares = [math.fsum(trace.squares[i] for trace in ordered) for i in range(len(updates))]
        return UpdateReport(tuple(digests), tuple(squares), time.monotonic() - begin)


class Stream:
    """Iterates once over the perturbed tensors of an arena."""

    digest = 0
    """Digest of the arena; complete after the last tensor."""

    def __init__(self, arena: Arena, slots: list[Slot], member: Member | None, dtype: Dtype, buffer_bytes: int) -> None:
        self._arena, self._member, self._dtype = arena, member, dtype
        self._groups, filled = list[list[Slot]](), 0
        for slot in slots:
            size = slot.stored.size * CAST[dtype].itemsize
            filled += size
            if not self._groups or filled > buffer_bytes:
                self._groups.append([])
                filled = size
            self._groups[-1].append(slot)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        largest = max((sum(slot.stored.size for slot in group) for group in self._groups), default=0)
        buffer = np.empty(largest, CAST[self._dtype])
        for group in self._groups:
            ends = np.cumsum([slot.stored.size for slot in group])
            parts = np.split(buffer[: ends[-1]], ends[:-1])
            outs = {s.stored.name: part.reshape(s.stored.shape) for s, part in zip(group, parts, strict=True)}
            self.digest = (self.digest + self._arena.perturb_into(outs, self._member)) % 2**64
            yield from outs.items()


def _flat_view(slot: Slot, out: Array) -> Array:
    if not out.flags.c_contiguous or out.dtype not in CAST.values() or out.size != slot.stored.size:
        raise ModelError(
            f"the output for {slot.stored.name} must be a contiguous array of float32, float16 or bfloat16 bits "
            f"(uint16) with {slot.stored.size} elements; this one is {out.dtype} with {out.size}"
        )
    return out.reshape(-1)


def perturbation_of(member: Member | None) -> Perturbation | None:
    """A member's noise as the kernels take it; None for the centre."""
    if member is None:
        return None
    scale = float(np.float32(member.sigma * member.sign / noise_scale(member.rank)))
    where = member.subspace, member.num_subspaces, member.partition_seed
    return Perturbation(member.seed, scale, *where, member.rank)


def update_of(commit: Commit) -> Update:
    """A commit's change of theta as the kernels take it."""
    body = commit.seeds
    terms = () if commit.null else body.terms
    step = None
    if (s := body.step) is not None:
        step = Step(s.rate, s.decay_m, s.gain_m, s.decay_v, s.gain_v, s.epsilon)
    return Update(
        [term.seed for term in terms],
        [term.coefficient for term in terms],
        [term.subspace for term in terms],
        body.num_subspaces,
        [term.partition_seed for term in terms],
        step,
        body.rank,
    )
