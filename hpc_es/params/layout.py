"""The layout of an arena: the offset of each tensor, and the memory that an arena needs.

Invariant: the layout depends only on the checkpoint's headers, the scope and the optimiser. theta's tensors come first,
sorted by name, then the optimiser state of the trained ones; every offset is a multiple of eight elements (one block of
noise).
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hpc_es.errors import ModelError
from hpc_es.methods.es import optimiser as optimisers
from hpc_es.noise import BLOCK, Array, Matrix, tensor_id
from hpc_es.params import numa
from hpc_es.params.weights import Stored, scan

NEVER_TRAINED = "mtp.*"
"""Names of the layers for multi-token prediction. Engines use them for speculative decoding only, so fitness does not
depend on them, and updates would move them at random. The digest covers them like any other tensor."""

_CGROUP_LIMITS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
"""Controllers as /proc/self/cgroup names them (v2: none) -> folder below /sys/fs/cgroup and file with the limit."""


@dataclass(frozen=True)
class StateSlot:
    """The place of one optimiser state of a tensor, in the tensor's shape; offset in elements."""

    name: str
    """`<tensor>#m` or `<tensor>#v`."""
    ident: int
    offset: int


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the arena; offset in elements."""

    stored: Stored
    ident: int
    offset: int
    trained: bool
    state: tuple[StateSlot, ...] = ()
    matrix: Matrix | None = None
    """What noise of low rank sees of it; None: nothing."""


def lay_out(
    path: str | Path,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    optimiser: optimisers.Kind = "none",
) -> list[Slot]:
    """The slots of a checkpoint's tensors, in canonical order.

    Errors: ModelError for an unusable checkpoint, two names with the same id, or a scope that trains nothing.
    """
    slots, offset = list[Slot](), 0
    for tensor in scan(Path(path)):
        trained = _in_scope(tensor.name, include, exclude)
        matrix = matrix_of(tensor.name, tensor.shape)
        slots.append(Slot(tensor, tensor_id(tensor.name), offset, trained, matrix=matrix))
        offset += _padded(tensor.size)
    if not any(slot.trained for slot in slots):
        raise ModelError(
            f"model.include={list(include)} and model.exclude={list(exclude)} select none of the {len(slots)} tensors "
            f"in {path} for training"
            + (f", such as {slots[0].stored.name}" if slots else "")
            + f" ({NEVER_TRAINED} is never trained): include more names, or exclude fewer"
        )
    for kept in optimisers.STATE[optimiser]:
        for number, slot in enumerate(slots):
            if slot.trained:
                name = f"{slot.stored.name}#{kept}"
                slots[number] = replace(slot, state=(*slot.state, StateSlot(name, tensor_id(name), offset)))
                offset += _padded(slot.stored.size)
    _refuse_equal_ids(path, slots)
    return slots


def matrix_of(name: str, shape: Sequence[int]) -> Matrix | None:
    """A tensor as noise of low rank sees it: a matrix, or the matrices of a layer's experts, one after the other.

    Embeddings and heads are matrices too. Everything else, such as norms, biases and convolutions, has no such noise
    (None).
    """
    is_experts = len(shape) == 3 and "experts" in name.split(".")
    if not (len(shape) == 2 or is_experts) or not all(shape):
        return None
    return Matrix(shape[-2], shape[-1], tensor_id(f"{name}#A"), tensor_id(f"{name}#B"))


def num_elements(slots: Sequence[Slot]) -> int:
    """Number of elements of the buffer, padding included."""
    return sum(_padded(slot.stored.size) * (1 + len(slot.state)) for slot in slots)


def num_bytes(
    path: str | Path,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    optimiser: optimisers.Kind = "none",
) -> int:
    """Number of bytes of a checkpoint's arena. Errors: ModelError."""
    return 4 * num_elements(lay_out(path, include, exclude, optimiser))


def memory_limit(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: the least of the node's memory and the limits of its control groups,
    as a Slurm job has them."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files(proc, cgroups):
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _limit_files(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Files that may hold a memory limit: of the group of this process and of all groups around it."""
    own = proc.read_text(encoding="utf-8") if proc.is_file() else ""
    for line in [*own.splitlines(), "0::/", "0:memory:/"]:  # a container may hide the path of its group
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers in _CGROUP_LIMITS:
            folder, name = _CGROUP_LIMITS[controllers]
            inner = PurePosixPath(group.lstrip("/"))
            yield from (cgroups / folder / outer / name for outer in (inner, *inner.parents))


def check_memory(
    path: str | Path,
    num_arenas: int = 1,
    limit: int | None = None,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    optimiser: optimisers.Kind = "none",
) -> None:
    """Refuse arenas that together exceed `limit` bytes on this node (default: memory_limit()). Errors: ModelError."""
    each = num_bytes(path, include, exclude, optimiser)
    limit = memory_limit() if limit is None else limit
    if num_arenas * each > limit:
        state = f" with the state of {optimiser}" if optimiser != "none" else ""
        raise ModelError(
            f"{num_arenas} arenas of {each / 2**30:.2f} GiB for {path}{state} need more than the {limit / 2**30:.2f} "
            f"GiB that this node allows; {limit // each} would fit: start fewer workers here, or request more memory"
        )


def share_memory(size: int) -> tuple[mmap.mmap, int]:
    """Allocate anonymous shared memory; return it with its file descriptor.

    While this process keeps the descriptor open, other processes of the same user can open it as /proc/PID/fd/N.
    Without a name in a file system, the memory cannot outlive its users, however they end.
    """
    descriptor = os.memfd_create("hpc-es-arena")
    os.ftruncate(descriptor, max(size, 1))
    memory = mmap.mmap(descriptor, 0)
    numa.spread(memory)
    return memory, descriptor


def attach_memory(path: Path) -> mmap.mmap:
    """Map memory from share_memory, usually of another process. Errors: ModelError when it is gone."""
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        raise ModelError(f"the arena at {path} cannot be attached ({error}); its owner has ended") from error


def as_floats(buffer: Any, size: int) -> Array:
    """The first `size` floats of a writable buffer. Errors: ModelError when it is too small."""
    floats = np.frombuffer(buffer, np.uint8)
    if floats.nbytes < 4 * size or not floats.flags.writeable:
        raise ModelError(f"the arena needs {4 * size} writable bytes, but the given memory has {floats.nbytes}")
    return floats[: 4 * size].view(np.float32)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _refuse_equal_ids(path: str | Path, slots: Sequence[Slot]) -> None:
    names_by_id = dict[int, str]()
    for slot in slots:
        named = [(slot.stored.name, slot.ident), *((kept.name, kept.ident) for kept in slot.state)]
        if slot.matrix is not None:
            named += [(f"{slot.stored.name}#A", slot.matrix.ident_a), (f"{slot.stored.name}#B", slot.matrix.ident_b)]
        for name, ident in named:
            if (other := names_by_id.setdefault(ident, name)) != name:
                raise ModelError(f"{path}: {other} and {name} have the same 64-bit id; rename one of them")


def _in_scope(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in include) and not any(
        fnmatchcase(name, pattern) for pattern in (*exclude, NEVER_TRAINED)
    )
