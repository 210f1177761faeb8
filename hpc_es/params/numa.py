"""Interleave memory over the NUMA nodes whose cores stream through it.

Linux places memory on the node that touches it first, so one thread that reads a checkpoint would put all of theta
behind the bandwidth of a single node.

Invariant: only the placement changes, never the contents, and nothing here fails. With one node, or if the kernel
refuses, memory stays where it is. A process bound to the cores next to its GPU has one node, so its memory is near that
GPU anyway.
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
"""Interleaves `size` bytes, starting at a page's address, over the nodes of a bit mask. Errors: OSError."""


def nodes(folder: Path = NODES, cpus: Set[int] | None = None) -> list[int]:
    """The NUMA nodes of this process's CPUs; empty if the system does not list them."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    found = []
    for node in folder.glob("node[0-9]*"):
        lists = node / "cpulist"
        if lists.is_file() and cpus & _members(lists.read_text(encoding="utf-8")):
            found.append(int(node.name.removeprefix("node")))
    return sorted(found)


def _mbind(address: int, size: int, mask: int) -> None:
    """Call mbind directly, because glibc has no wrapper for it."""
    words = [mask >> shift & 2**64 - 1 for shift in range(0, mask.bit_length(), 64)]
    bits = (ctypes.c_uint64 * len(words))(*words)
    call = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than the count it is given, so pass one more.
    arguments = [address, size, _INTERLEAVE, ctypes.addressof(bits), 64 * len(words) + 1, 0]
    if call(ctypes.c_long(_MBIND[platform.machine()]), *map(ctypes.c_ulong, arguments)):
        raise OSError(ctypes.get_errno(), "mbind")


def spread(memory: mmap.mmap, folder: Path = NODES, cpus: Set[int] | None = None, mbind: Mbind = _mbind) -> bool:
    """Interleave untouched memory over nodes(); return False if its placement stays unchanged."""
    over = nodes(folder, cpus)
    if len(over) < 2:
        return False
    try:
        mbind(np.frombuffer(memory, np.uint8).ctypes.data, len(memory), sum(1 << node for node in over))
    except (OSError, KeyError):  # a sandbox that forbids it, a kernel without NUMA, another architecture
        return False
    return True


def spread_memory(num_bytes: int, folder: Path = NODES, cpus: Set[int] | None = None) -> mmap.mmap | None:
    """Allocate private interleaved memory; None with a single node, where any memory is as good."""
    if len(nodes(folder, cpus)) < 2:
        return None
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
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
