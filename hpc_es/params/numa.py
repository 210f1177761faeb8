"""Spread memory over the NUMA nodes whose cores stream through it: memory lies where it is touched first, and one
thread that reads a checkpoint would put all of it behind one node's bandwidth.

Invariant: placement only, never contents; and no error. With one node, or where the kernel refuses, memory stays as it
is. A process bound to the cores beside its GPU has one node, so its memory is near that GPU without being asked.
"""

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Set
from pathlib import Path

import numpy as np

NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3

Mbind = Callable[[int, int, int], None]
"""Interleave `size` bytes from a page's address over the nodes of a bit mask. Errors: OSError."""


def nodes(folder: Path = NODES, cpus: Set[int] | None = None) -> list[int]:
    """The nodes that the CPUs of this process lie on; none where the system does not say."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    found = []
    for node in folder.glob("node[0-9]*"):
        lists = node / "cpulist"
        if lists.is_file() and cpus & _members(lists.read_text(encoding="utf-8")):
            found.append(int(node.name.removeprefix("node")))
    return sorted(found)


def _mbind(address: int, size: int, mask: int) -> None:
    """The system call; glibc has no wrapper of its own."""
    words = [mask >> shift & 2**64 - 1 for shift in range(0, mask.bit_length(), 64)]
    bits = (ctypes.c_uint64 * len(words))(*words)
    call = ctypes.CDLL(None, use_errno=True).syscall
    # the kernel looks at one bit less than it is told of
    arguments = [address, size, _INTERLEAVE, ctypes.addressof(bits), 64 * len(words) + 1, 0]
    if call(ctypes.c_long(_MBIND[platform.machine()]), *map(ctypes.c_ulong, arguments)):
        raise OSError(ctypes.get_errno(), "mbind")


def spread(memory: mmap.mmap, folder: Path = NODES, cpus: Set[int] | None = None, mbind: Mbind = _mbind) -> bool:
    """Interleave memory that nobody has touched yet over nodes(). False: it is left as it is."""
    over = nodes(folder, cpus)
    if len(over) < 2:
        return False
    try:
        mbind(np.frombuffer(memory, np.uint8).ctypes.data, len(memory), sum(1 << node for node in over))
    except (OSError, KeyError):  # a sandbox that forbids it, a kernel without NUMA, another architecture
        return False
    return True


def spread_memory(num_bytes: int, folder: Path = NODES, cpus: Set[int] | None = None) -> mmap.mmap | None:
    """Fresh private memory, interleaved; None where there is one node, so that any memory will do."""
    if len(nodes(folder, cpus)) < 2:
        return None
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    spread(memory, folder, cpus)
    return memory


def _members(listed: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    found = set[int]()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
