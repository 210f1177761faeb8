"""Process groups of torch.distributed outside of its default group, made and abandoned one at a time.

The default group is never touched, because vLLM initialises it for itself. Invariant: a call into torch cannot be
interrupted, so nobody waits for one longer than its time limit; a late call is abandoned and its group aborted. Torch
is imported on first use only.

NCCL: a group lives in the worker's front process and uses the first GPU that this process sees (rank 0 of a
tensor-parallel engine runs there too). Its CUDA context and NCCL's buffers take several hundred MiB of that GPU after
vLLM has measured how much is free. Without an NCCL group no GPU memory is used.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpc_es.errors import TransportError
from hpc_es.transport.address import address_for_peers

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

ROOT = 0
"""The head's rank."""
_GRACE_S = 1.0
"""Seconds that we wait longer than torch itself does, since torch's own timeout errors are more informative."""
_POLL_S = 0.001
_NCCL_DEVICE = "cuda:0"
_T = TypeVar("_T")


class Place(NamedTuple):
    """The position of this process in a group, and the addresses to use."""

    rank: int
    size: int
    peer: str
    """An address of the head; Gloo listens on the interface that leads to it."""
    interface: str | None = None
    """transport.interface"""


GLOO_END_S = 0.5
"""Seconds to wait for the end of a Gloo group, which takes milliseconds unless an operation is stuck."""


class Group:
    """One process group, whose store has its own key prefix."""

    def __init__(self, backend: str, store: "Store", place: Place, timeout_s: float):
        """Make the group within `timeout_s`. NCCL connects all members now, Gloo when two first exchange data.

        Errors: TransportError, or any error of torch.
        """
        connect = {"gloo": _gloo, "nccl": _nccl}.get(backend)
        if connect is None:
            raise TransportError(f"a group with backend {backend!r} cannot be opened; allowed: gloo, nccl")
        self._device = _NCCL_DEVICE if backend == "nccl" else "cpu"
        self._is_root = place.rank == ROOT
        self._timeout_s = timeout_s
        self._pg = within(timeout_s, lambda: connect(store, place, timedelta(seconds=timeout_s)))

    def broadcast(self, data: bytes, length: int) -> bytes:
        """Send `data`, `length` bytes, from the root to all members; returns it at every member."""
        content = bytearray(data) if self._is_root else bytearray(length)
        self.share(content)
        return bytes(content)

    def share(self, memory: bytearray | memoryview) -> None:
        """Copy the root's `memory` into that of all members, which has the same length.

        After an error torch may still write to the memory for a while, so do not use it again. Errors: TransportError,
        or any error of torch.
        """
        within(self._timeout_s, lambda: self._share(memory))

    def abandon(self) -> None:
        """End the group. Waits for a stuck operation until that times out, as torch does, and no longer.

        A Gloo pair that is still connecting keeps its group alive even longer. So a Gloo group gets half a second to
        end; after that its thread is left running. Otherwise a worker that received nothing would wait for two time
        limits instead of one.
        """
        try:
            limit_s = self._timeout_s if self._device == _NCCL_DEVICE else min(self._timeout_s, GLOO_END_S)
            within(limit_s, self._dismantle)
        except TransportError:
            log.warning("a process group did not end in time; its thread is left running")

    def _share(self, memory: bytearray | memoryview) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = ROOT, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        tensor = host.to(self._device)
        work = self._pg.broadcast([tensor], options)
        if self._device != "cpu":
            _await_device(work, self._timeout_s)
        work.wait(options.timeout)
        if self._device != "cpu" and not self._is_root:
            host.copy_(tensor)  # waits for the device

    def _dismantle(self) -> None:
        pg, self._pg = self._pg, None
        pg.abort()


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Run a call in its own thread and return its result. Errors: TransportError if it takes longer."""
    future: Future[_T] = Future()
    threading.Thread(target=_carry_out, args=(future, call), name="torch-call", daemon=True).start()
    try:
        return future.result(seconds + _GRACE_S)
    except TimeoutError:
        raise TransportError(f"torch was still busy after {seconds + _GRACE_S:g} s") from None
    finally:
        del future  # for the reason given in _carry_out


def _carry_out(future: "Future[_T]", call: Callable[[], _T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        # An error's traceback refers to these frames and to torch's objects in them. If the frames referred to the
        # error too, that cycle would keep the group's connections open until the next garbage collection, and its
        # other members would wait in vain.
        del future, call


def import_distributed() -> Any:
    """Import torch.distributed. Errors: TransportError if torch is not installed."""
    try:
        from torch import distributed
    except ImportError as error:
        raise TransportError(
            "the collective plane needs torch: install hpc_es[worker], or set transport.backend: none"
        ) from error
    return distributed


def open_store(host: str, port: int, prefix: str, timeout_s: float) -> "Store":
    """Open the part of the head's store under a key prefix.

    It has its own connection, because a client of the store handles one call at a time. Errors: TransportError;
    RuntimeError of torch if the head has exited.
    """
    distributed = import_distributed()
    timeout = timedelta(seconds=timeout_s)
    client = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store: Store = distributed.PrefixStore(prefix, client)
    return store


def _gloo(store: "Store", place: Place, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    # By default Gloo uses the address of this machine's host name, which may be loopback or on the wrong network
    here = address_for_peers(place.peer, os.environ.get("GLOO_SOCKET_IFNAME") or place.interface)
    # lazy_init connects only pairs that exchange data: the edges of the broadcast's tree. Connecting every member to
    # every other one took 30 times as long and 37 times as many files for 256 members (tools/bench/groups.py).
    options._devices = [ProcessGroupGloo.create_device(hostname=here, lazy_init=True)]
    options._timeout = timeout
    return ProcessGroupGloo(store, place.rank, place.size, options)


def _nccl(store: "Store", place: Place, timeout: timedelta) -> Any:
    """Make a group with its communicator now, not at the first broadcast, so that NCCL's errors show at the join.

    This code has not run on a GPU yet.
    """
    import torch
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    settings = {
        # The constructor reads these. With the defaults, torch's watchdog ends the whole process if a peer is lost.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }
    if place.interface is not None:
        settings["NCCL_SOCKET_IFNAME"] = place.interface  # read by the process's first communicator
    with _environment(settings):
        torch.cuda.set_device(_NCCL_DEVICE)  # applies to this thread only
        pg = ProcessGroupNCCL(store, place.rank, place.size, options)
        pg.eager_connect_single_device(torch.device(_NCCL_DEVICE))
    return pg


def _await_device(work: Any, seconds: float) -> None:
    """Poll until the device has finished, for at most `seconds`.

    A blocking wait for the stream would never return after the loss of a peer, since the kernel then never ends.
    Errors: TransportError after this time; torch's errors for a broken communicator.
    """
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TransportError(f"the device has not finished after {seconds:g} s: a member is lost or slow")
        time.sleep(_POLL_S)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, until the block ends: vLLM's processes must not inherit them."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
