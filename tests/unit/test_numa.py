"""Memory is spread over the nodes of this process's cores, and left alone wherever that makes no sense."""

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from hpc_es.params import numa
from hpc_es.params.arena import Arena
from hpc_es.params.tiny_llama import write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two nodes with cores and one that has only memory."""
    for node, cpus in {0: "0-3,8\n", 1: "4-7,9\n", 2: "\n", 70: "10\n"}.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    (tmp_path / "possible").write_text("0-70\n")
    return tmp_path


def test_a_process_has_the_nodes_of_its_cores(folder: Path) -> None:
    assert numa.nodes(folder, {0, 9}) == [0, 1]
    assert numa.nodes(folder, {8}) == [0]
    assert numa.nodes(folder, set(range(11))) == [0, 1, 70]
    assert numa.nodes(folder / "missing", {0}) == []


def test_memory_is_interleaved_over_them(folder: Path) -> None:
    asked = list[tuple[int, int, int]]()
    with mmap.mmap(-1, 2**14) as memory:
        assert numa.spread(memory, folder, {1, 4, 10}, lambda *call: asked.append(call))
    ((address, size, mask),) = asked
    assert (address % mmap.PAGESIZE, size, mask) == (0, 2**14, 1 | 2 | 1 << 70)


def test_one_node_is_left_alone(folder: Path) -> None:
    with mmap.mmap(-1, 2**14) as memory:
        assert not numa.spread(memory, folder, {0, 1, 2}, lambda *call: pytest.fail("nothing to spread"))
    assert numa.spread_memory(2**14, folder, {0}) is None


def test_a_refusal_is_silent(folder: Path) -> None:
    def refuse(*call: int) -> None:
        raise OSError(errno.EPERM, "mbind")

    with mmap.mmap(-1, 2**14) as memory:
        assert not numa.spread(memory, folder, {0, 4}, refuse)


def test_the_system_call_reaches_the_kernel() -> None:
    """Works for the one node that every Linux has; for a missing node, the kernel reports an error."""
    with mmap.mmap(-1, 2**14) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            numa._mbind(address, len(memory), 1)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                pytest.skip("this sandbox forbids mbind")
            raise
        placed = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if f"{address:x} " in line]
        assert not placed or "interleave:0" in placed[0]
        with pytest.raises(OSError, match="mbind"):
            numa._mbind(address, len(memory), 1 << 1000)


def test_an_arena_in_spread_memory_has_the_same_bits(folder: Path, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    memory = numa.spread_memory(Arena.from_pretrained(model).num_bytes, folder, {0, 4})
    assert memory is not None
    assert Arena.from_pretrained(model, buffer=memory).base_digest == Arena.from_pretrained(model).base_digest


def test_an_arena_that_is_shared_is_spread_before_it_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = list[bytes]()
    monkeypatch.setattr(numa, "spread", lambda memory: spread.append(memory[:]))
    arena = Arena.from_pretrained(write_tiny_llama(tmp_path / "model"), shared=True)
    assert spread == [bytes(arena.num_bytes)]
