"""Process groups of torch.distributed that are members of no world: made, used and given up one at a time.

The default group is never touched, vLLM initialises it for itself. Invariant: no call into torch, which nothing can
interrupt, is waited for longer than its time limit; what is late is given up and its group aborted. Torch is imported
on first use only.

NCCL: a group lives in the front process and uses that process's first visible GPU (a tensor-parallel engine's rank 0
runs there too). This takes a CUDA context and NCCL's buffers: some hundred MiB of that GPU, after vLLM has measured how
much is free, and nothing where no NCCL group is made.
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
"""By how much our patience exceeds torch's own, whose errors say more."""
_POLL_S = 0.001
_NCCL_DEVICE = "cuda:0"
_T = TypeVar("_T")


class Place(NamedTuple):
    """Where this process stands in a group."""

    rank: int
    size: int
    peer: str
    """An address of the head; Gloo listens where it is reached from."""
    interface: str | None = None
    """transport.interface"""


GLOO_END_S = 0.5
"""How long the end of a Gloo group is waited for; it takes milliseconds unless an operation is stuck."""


class Group:
    """One process group over a store of its own prefix."""

    def __init__(self, backend: str, store: "Store", place: Place, timeout_s: float):
        """Made within `timeout_s`; NCCL's members are connected then, Gloo's when they first need to be.

        Errors: TransportError, or whatever torch raises.
        """
        connect = {"gloo": _gloo, "nccl": _nccl}.get(backend)
        if connect is None:
            raise TransportError(f"a group with backend {backend!r} cannot be opened; allowed: gloo, nccl")
        self._device = _NCCL_DEVICE if backend == "nccl" else "cpu"
        self._is_root = place.rank == ROOT
        self._timeout_s = timeout_s
        self._pg = within(timeout_s, lambda: connect(store, place, timedelta(seconds=timeout_s)))

    def broadcast(self, data: bytes, length: int) -> bytes:
        """`data` at the root, `length` bytes; what the root sent, everywhere."""
        content = bytearray(data) if self._is_root else bytearray(length)
        self.share(content)
        return bytes(content)

    def share(self, memory: bytearray | memoryview) -> None:
        """The root's bytes into everyone's `memory`, of equal length.

        After an error the memory may still be written for a while: throw it away. Errors: TransportError, or torch's.
        """
        within(self._timeout_s, lambda: self._share(memory))

    def abandon(self) -> None:
        """Let go of it. Torch waits for an operation that is stuck until that times out; we wait no longer.

        A Gloo pair that is still connecting holds its group even beyond that, so Gloo gets a moment: what it does not
        end by then is left to its thread, and whoever received nothing has waited for one time limit, not for two.
        """
        try:
            limit_s = self._timeout_s if self._device == _NCCL_DEVICE else min(self._timeout_s, GLOO_END_S)
            within(limit_s, self._dismantle)
        except TransportError:
            log.warning("a process group did not end in time and is left behind")

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
    """The result of a call, made in a thread of its own. Errors: TransportError when it takes longer."""
    future: Future[_T] = Future()
    threading.Thread(target=_carry_out, args=(future, call), name="torch-call", daemon=True).start()
    try:
        return future.result(seconds + _GRACE_S)
    except TimeoutError:
        raise TransportError(f"torch was still busy after {seconds + _GRACE_S:g} s") from None
    finally:
        del future  # as below


def _carry_out(future: "Future[_T]", call: Callable[[], _T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        # An error's traceback holds these frames, and what torch left in them. If they held the error too, the group's
        # connections would stay open until the next garbage collection, and its other members would wait for nothing.
        del future, call


def import_distributed() -> Any:
    """Errors: TransportError."""
    try:
        from torch import distributed
    except ImportError as error:
        raise TransportError(
            "the collective plane needs torch: install hpc_es[worker], or set transport.backend: none"
        ) from error
    return distributed


def open_store(host: str, port: int, prefix: str, timeout_s: float) -> "Store":
    """A part of the head's store, over a connection of its own: a store's client serves one call at a time.

    Errors: TransportError; RuntimeError of torch when the head is gone.
    """
    distributed = import_distributed()
    timeout = timedelta(seconds=timeout_s)
    client = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store: Store = distributed.PrefixStore(prefix, client)
    return store


def _gloo(store: "Store", place: Place, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    # By default Gloo takes the address of this machine's name, which may be loopback or the wrong network
    here = address_for_peers(place.peer, os.environ.get("GLOO_SOCKET_IFNAME") or place.interface)
    # Lazily, only the pairs that exchange something are connected: the broadcast's tree. Otherwise every member is, to
    # every other one, which for 256 members took 30 times as long and 37 times as many files (tools/bench/groups.py).
    options._devices = [ProcessGroupGloo.create_device(hostname=here, lazy_init=True)]
    options._timeout = timeout
    return ProcessGroupGloo(store, place.rank, place.size, options)


def _nccl(store: "Store", place: Place, timeout: timedelta) -> Any:
    """The communicator is made here, not at the first broadcast: what keeps NCCL from working shows at the join.

    Never run so far: no GPU was there to try it on.
    """
    import torch
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    settings = {
        # read by the constructor: otherwise torch's watchdog ends the whole process when a peer is lost
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }
    if place.interface is not None:
        settings["NCCL_SOCKET_IFNAME"] = place.interface  # read by the process's first communicator
    with _environment(settings):
        torch.cuda.set_device(_NCCL_DEVICE)  # of this thread
        pg = ProcessGroupNCCL(store, place.rank, place.size, options)
        pg.eager_connect_single_device(torch.device(_NCCL_DEVICE))
    return pg


def _await_device(work: Any, seconds: float) -> None:
    """Until the device has done it, looking again and again: a lost peer leaves the kernel spinning, and waiting for
    the stream would wait with it. Errors: TransportError, and those of torch for a communicator in trouble."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TransportError(f"the device has not finished after {seconds:g} s: a member is lost or slow")
        time.sleep(_POLL_S)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set for a while what is not set by the user: vLLM's processes shall not inherit it."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
