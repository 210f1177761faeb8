"""Process groups where no GPU is: how NCCL's would be made and waited for, and what a broken one leaves behind."""

import gc
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from hpc_es.errors import TransportError
from hpc_es.transport import address, groups
from hpc_es.transport.groups import Place, within


class FakeNccl:
    """ProcessGroupNCCL as far as it is used; notes the environment that it was made in."""

    made: "list[FakeNccl]"

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options) -> None:
        self.place, self.timeout = (rank, size), options._timeout
        self.environment = {name: value for name, value in os.environ.items() if "NCCL" in name}
        self.made.append(self)

    def eager_connect_single_device(self, device) -> None:
        self.device = device


@pytest.fixture
def nccl(monkeypatch) -> type[FakeNccl]:
    FakeNccl.made = []
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    return FakeNccl


def test_an_nccl_group_connects_at_once_and_no_watchdog_ends_the_process(nccl, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")  # a user's own setting stays
    groups.Group("nccl", None, Place(1, 3, "10.0.0.1", "ib0"), 7.0)  # type: ignore[arg-type]
    (made,) = nccl.made
    assert (made.place, made.timeout.total_seconds(), made.device) == ((1, 3), 7.0, torch.device("cuda:0"))
    assert made.environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    assert not os.environ.keys() & {"NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def test_nccl_keeps_the_interface_that_the_user_has_set(nccl, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo")
    groups.Group("nccl", None, Place(0, 1, "10.0.0.1", "ib0"), 7.0)  # type: ignore[arg-type]
    assert nccl.made[0].environment["NCCL_SOCKET_IFNAME"] == "^lo"


def test_a_kernel_that_never_ends_is_waited_for_no_longer_than_allowed() -> None:
    answers = iter([False, False, True])
    groups._await_device(SimpleNamespace(is_completed=lambda: next(answers)), 5.0)
    began = time.monotonic()
    with pytest.raises(TransportError, match="a member is lost or slow"):
        groups._await_device(SimpleNamespace(is_completed=lambda: False), 0.05)
    assert time.monotonic() - began < 1


def test_an_error_of_torch_leaves_nothing_alive_that_it_had_hold_of() -> None:
    class Work:
        pass

    kept: list[weakref.ref[Work]] = []

    def fail() -> None:
        work = Work()
        kept.append(weakref.ref(work))
        raise RuntimeError("connection closed by peer")

    gc.disable()  # a collection would hide a cycle
    try:
        with pytest.raises(RuntimeError):
            within(1.0, fail)
        deadline = time.monotonic() + 20
        while kept[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_gloo_connects_a_tree_and_not_everybody_to_everybody() -> None:
    """Each member of a mesh has a connection to every other one, made anew at every change of membership."""
    size, before = 12, len(os.listdir("/proc/self/fd"))
    store = distributed.HashStore()
    with ThreadPoolExecutor(size) as pool:
        made = list(
            pool.map(lambda rank: groups.Group("gloo", store, Place(rank, size, "127.0.0.1"), 10.0), range(size))
        )
        received = pool.map(lambda group: group.broadcast(b"a record", 8), made)
        assert list(received) == [b"a record"] * size
        added = len(os.listdir("/proc/self/fd")) - before
        list(pool.map(lambda group: group.abandon(), made))
    listening = 4 * size
    assert added <= listening + 2 * (size - 1) + 5


def test_gloo_listens_at_the_interface_that_the_run_names_where_there_is_one() -> None:
    assert address.address_for_peers("127.0.0.1", "lo") == "127.0.0.1"
    assert address.address_for_peers("127.0.0.1", "no-such-interface") == "127.0.0.1"
