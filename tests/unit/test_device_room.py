"""The place of theta, and the share of a device's memory that it may take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_kernels
import pytest
import small_checkpoint
import torch
from device_cases import DEVICE, HAS_KERNELS, MEMBERS, SHAPES, arena_of, commits, live

from hpc_es.errors import EngineError
from hpc_es.params import device as devices
from hpc_es.params.device import DeviceBase, bytes_needed, device_base, extra_memory
from hpc_es.params.pinned import pin
from hpc_es.params.room import Residence
from hpc_es.params.streamed import MAX_STAGING, Ring, StreamedBase

on_a_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU (HPC_ES_TEST_DEVICE=cuda)")


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_KERNELS:
        host_kernels.install(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model", small_checkpoint.values(SHAPES))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how many bytes are free, on a device whose allocator tells nothing."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(devices, "pin", lambda memory, owner: True)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return lambda free: monkeypatch.setattr(devices, "bytes_free", lambda device: free)


def test_theta_lies_on_the_device_where_there_is_room(model: Path, room: Any) -> None:
    arena = arena_of(model, "adam")
    targets = live(arena, 0, 1, "bfloat16")
    needed = bytes_needed(arena, [region for region, _ in targets])
    assert needed == arena.num_bytes, "with state, of the trained tensors only"
    room(needed + devices.RESERVE)
    assert isinstance(device_base(arena, targets, 0, 1, "auto"), DeviceBase)
    assert isinstance(device_base(arena, targets, 0, 1, "host"), StreamedBase)
    room(needed + devices.RESERVE - 1)
    assert isinstance(device_base(arena, targets, 0, 1, "auto"), StreamedBase)
    with pytest.raises(EngineError, match=rf"needs {needed} bytes .* are free"):
        device_base(arena, targets, 0, 1, "device")


def test_ranks_that_share_an_arena_choose_alike(model: Path, room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = arena_of(model)
    targets = live(arena, 0, 2, "bfloat16")
    room(2**40)
    assert isinstance(device_base(arena, targets, 0, 2, "auto"), StreamedBase), "nobody can ask the other rank"
    group = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=lambda: 2, ReduceOp=devices.distributed.ReduceOp, all_reduce=None
    )
    monkeypatch.setattr(devices, "distributed", group)
    for other, base in [(0, StreamedBase), (1, DeviceBase)]:
        group.all_reduce = lambda vote, operation, other=other: vote.clamp_(max=other)
        assert isinstance(device_base(arena, targets, 0, 2, "auto"), base)


def test_staging_is_bounded(model: Path) -> None:
    assert 3 * 4 * Ring(torch.device("meta")).size <= MAX_STAGING
    with pytest.raises(EngineError, match="exceed the limit"):
        Ring(torch.device("meta"), MAX_STAGING + 1)


def test_a_base_that_takes_more_than_was_announced_is_refused(
    model: Path, room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = arena_of(model)
    room(0)
    monkeypatch.setattr(devices, "MAX_STAGING", -1)
    with pytest.raises(EngineError, match="more than the expected -1"):
        device_base(arena, live(arena, 0, 1, "bfloat16"), 0, 1, "host")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("residence", ["host", "device"])
def test_members_and_updates_take_next_to_no_memory(model: Path, residence: Residence) -> None:
    arena = arena_of(model, "adam")
    base = device_base(arena, live(arena, 0, 1, "bfloat16"), 0, 1, residence)
    with extra_memory(DEVICE) as extra:
        base.write(MEMBERS[1])
        base.apply(commits("adam"))
    assert extra.held < 2**20
    assert extra.peak < 2**24


@pytest.mark.gpu
@on_a_gpu
def test_an_arena_is_pinned_while_it_lives(model: Path) -> None:
    arena = arena_of(model)
    memory = torch.from_numpy(arena.memory)
    assert pin(arena.memory, arena)
    assert memory.is_pinned()
    assert pin(arena.memory, arena), "as it was"
    del arena
    assert not memory.is_pinned()
