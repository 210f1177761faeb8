"""The collective plane: one broadcast carries a commit record to every worker of a membership epoch.

Each epoch is a torch.distributed process group of its own, over a prefix of a store that the head hosts; the default
group is never touched, vLLM initialises it for itself. Invariants: the head's loop never waits for anything here; an
error or a late member ends the epoch, and the next one starts from nothing. Store and groups are not authenticated,
so receivers check the hash that the control plane announced. Torch is imported on first use only.
"""

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import Struct

from hpc_es.errors import TransportError
from hpc_es.transport.address import address_towards
from hpc_es.transport.messages import OpenEpoch

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

Backend = Literal["none", "gloo", "nccl"]
HEAD_RANK = 0
_GO = "go"
_POLL_S = 0.02
_GRACE_S = 1.0
"""By how much our patience exceeds torch's own, whose errors say more."""
_T = TypeVar("_T")


class EpochUp(Struct, frozen=True):
    """Every member has joined; broadcasts may go out."""

    epoch: int


class EpochFailed(Struct, frozen=True):
    """The epoch is over. What was broadcast in it may have reached some members, all or none."""

    epoch: int
    detail: str


EpochEvent = EpochUp | EpochFailed


def sha256(data: bytes) -> bytes:
    """What Announce carries, and what a receiver compares."""
    return hashlib.sha256(data).digest()


def available_backend() -> Backend:
    """The best that this process can join; "none" where torch is not installed."""
    try:
        import torch
        from torch import distributed
    except ImportError:
        return "none"
    if not distributed.is_available():
        return "none"
    if distributed.is_nccl_available() and torch.cuda.is_available():
        return "nccl"
    return "gloo" if distributed.is_gloo_available() else "none"


def choose_backend(wanted: str, offers: Sequence[str]) -> Backend:
    """The backend of an epoch, from transport.backend and what head and members offer (`available_backend`).

    Errors: TransportError when NCCL is demanded and somebody lacks it.
    """
    if wanted == "none" or not offers or "none" in offers:
        return "none"
    if all(offer == "nccl" for offer in offers) and wanted in ("auto", "nccl"):
        return "nccl"
    if wanted == "nccl":
        raise TransportError(
            f"transport.backend=nccl needs CUDA at the head and at every worker, and they offer {', '.join(offers)}; "
            f"use auto or gloo"
        )
    return "gloo"


class HeadCollective:
    """The head's end: rank 0 of every epoch. Its methods return at once; `on_event` comes from its own thread."""

    def __init__(self, host: str, timeout_s: float, on_event: Callable[[EpochEvent], None]):
        """Host the store at a free port of `host`, the address that the head publishes. Imports torch: seconds.

        `timeout_s` bounds each step: the joining, the connecting, one broadcast. Errors: TransportError.
        """
        distributed = _import_distributed()
        try:
            # A socket of our own, because the store by itself would listen on every interface
            listener = socket.create_server((host, 0))
            self._port: int = listener.getsockname()[1]
            self._store = distributed.TCPStore(
                host,
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise TransportError(
                f"the head cannot host a torch store on {host}: {error}; set transport.host"
            ) from error
        self._host, self._timeout_s, self._on_event = host, timeout_s, on_event
        self._epoch: int | None = None
        self._group: _Group | None = None
        self._wanted = -1  # the newest epoch that was asked for
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head-collective", daemon=True)
        self._thread.start()

    def open(self, epoch: int, workers: Sequence[str], backend: Backend) -> dict[str, OpenEpoch]:
        """End the epoch before it, if any, and wait for these to join `epoch`, a number never used before.

        Returns what each worker must be told. EpochUp or EpochFailed follows.
        """
        self._wanted = epoch
        self._orders.put(lambda: self._open(epoch, workers, backend))
        size = len(workers) + 1
        return {
            worker: OpenEpoch(epoch, rank, size, backend, self._host, self._port)
            for rank, worker in enumerate(workers, start=HEAD_RANK + 1)
        }

    def broadcast(self, epoch: int, data: bytes) -> None:
        """Send to all members, in order. Nothing happens when the epoch is not up (any more)."""
        self._orders.put(lambda: self._broadcast(epoch, data))

    def close(self) -> None:
        """End the epoch and the store; what is under way has the time it always had."""
        self._closing.set()
        self._orders.put(None)
        self._thread.join(3 * (self._timeout_s + _GRACE_S))

    # --- on its own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._closing.is_set():
            order()
        self._end()
        del self._store

    def _open(self, epoch: int, workers: Sequence[str], backend: Backend) -> None:
        self._end()
        try:
            store = _prefixed(self._store, epoch)
            self._await_members(epoch, store, workers)
            size = len(workers) + 1
            self._group = _Group(backend, store, HEAD_RANK, size, self._host, self._timeout_s)
            self._epoch = epoch
        except Exception as error:  # whatever torch comes up with ends this epoch, not the run
            self._on_event(EpochFailed(epoch, str(error)))
        else:
            self._on_event(EpochUp(epoch))

    def _await_members(self, epoch: int, store: "Store", workers: Sequence[str]) -> None:
        """Only when all are there does anyone connect: a process group's constructor cannot be interrupted."""
        deadline = time.monotonic() + self._timeout_s
        missing = dict(enumerate(workers, start=HEAD_RANK + 1))
        while missing := {rank: worker for rank, worker in missing.items() if not store.check([_joined(rank)])}:
            if self._closing.is_set() or self._wanted != epoch:
                raise TransportError("given up for a newer epoch, or because the head ends")
            if time.monotonic() > deadline:
                raise TransportError(f"not joined within {self._timeout_s:g} s: {', '.join(missing.values())}")
            time.sleep(_POLL_S)
        store.set(_GO, "")

    def _broadcast(self, epoch: int, data: bytes) -> None:
        if self._group is None or self._epoch != epoch:
            return
        try:
            self._group.broadcast(data, len(data))
        except Exception as error:  # as above
            self._end()
            self._on_event(EpochFailed(epoch, f"broadcast of {len(data)} bytes: {error}"))

    def _end(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group = self._epoch = None


class WorkerCollective:
    """A worker's end. Its methods block, so they belong into a thread, one call at a time."""

    def __init__(self, timeout_s: float):
        """`timeout_s` bounds each step, as at the head."""
        self.epoch: int | None = None
        """The epoch that this worker is a member of."""
        self._timeout_s = timeout_s
        self._group: _Group | None = None

    def join(self, call: OpenEpoch) -> None:
        """Leave the former epoch and join this one; returns when all members are connected.

        Errors: TransportError; the worker is then in no epoch.
        """
        self.leave()
        distributed = _import_distributed()
        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = distributed.TCPStore(
                call.store_host, call.store_port, is_master=False, wait_for_workers=False, timeout=timeout
            )
            prefixed = _prefixed(store, call.epoch)
            prefixed.set(_joined(call.rank), "")
            prefixed.wait([_GO], timeout)
            here = address_towards(call.store_host)
            self._group = _Group(call.backend, prefixed, call.rank, call.size, here, self._timeout_s)
        except (OSError, RuntimeError) as error:
            raise TransportError(f"epoch {call.epoch} cannot be joined as rank {call.rank}: {error}") from error
        self.epoch = call.epoch

    def receive(self, epoch: int, length: int) -> bytes:
        """The next broadcast of `epoch`, which was announced with this length in bytes. Check its hash.

        Errors: TransportError; the worker is then in no epoch.
        """
        if self._group is None or self.epoch != epoch:
            raise TransportError(f"a broadcast in epoch {epoch} was announced to a worker that is in {self.epoch}")
        try:
            return self._group.broadcast(b"", length)
        except (TransportError, RuntimeError) as error:
            self.leave()
            raise TransportError(f"the broadcast in epoch {epoch} did not arrive: {error}") from error

    def leave(self) -> None:
        """Leave the epoch, without a word to the others."""
        if self._group is not None:
            self._group.abandon()
        self._group = self.epoch = None


class _Group:
    """One process group. Every call into torch, which nothing can interrupt, is given up when it is late."""

    def __init__(self, backend: str, store: "Store", rank: int, size: int, host: str, timeout_s: float):
        build = {"gloo": _gloo, "nccl": _nccl}.get(backend)
        if build is None:
            raise TransportError(f"an epoch with backend {backend!r} cannot be opened; allowed: gloo, nccl")
        self._device = "cuda" if backend == "nccl" else "cpu"
        self._is_root = rank == HEAD_RANK
        self._timeout_s = timeout_s
        self._pg = _within(timeout_s, lambda: build(store, rank, size, host, timedelta(seconds=timeout_s)))

    def broadcast(self, data: bytes, length: int) -> bytes:
        """`data` at the root, `length` bytes; what the root sent, everywhere."""
        return _within(self._timeout_s, lambda: self._broadcast(data, length))

    def abandon(self) -> None:
        """Let go of it. Torch waits for an operation that is stuck until that times out; we wait no longer."""
        try:
            _within(self._timeout_s, self._dismantle)
        except TransportError:
            log.warning("a process group did not end in time and is left behind")

    def _broadcast(self, data: bytes, length: int) -> bytes:
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = HEAD_RANK, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        content = bytearray(data) if self._is_root else bytearray(length)
        tensor = torch.frombuffer(content, dtype=torch.uint8).to(self._device)
        self._pg.broadcast([tensor], options).wait(options.timeout)
        return bytes(tensor.cpu().numpy())

    def _dismantle(self) -> None:
        pg, self._pg = self._pg, None
        pg.abort()


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a call, made in a thread of its own. Errors: TransportError when it takes longer."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="torch-call", daemon=True).start()
    try:
        return future.result(seconds + _GRACE_S)
    except TimeoutError:
        raise TransportError(f"torch was still busy after {seconds + _GRACE_S:g} s") from None


def _import_distributed() -> Any:
    try:
        from torch import distributed
    except ImportError as error:
        raise TransportError(
            "the collective plane needs torch: install hpc_es[worker], or set transport.backend: none"
        ) from error
    return distributed


def _prefixed(store: "Store", epoch: int) -> "Store":
    from torch.distributed import PrefixStore

    return PrefixStore(f"epoch-{epoch}", store)


def _joined(rank: int) -> str:
    return f"joined-{rank}"


def _gloo(store: "Store", rank: int, size: int, host: str, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    # By default Gloo takes the address of this machine's name, which may be loopback or the wrong network
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: "Store", rank: int, size: int, host: str, timeout: timedelta) -> Any:
    """Never run so far: there was no second GPU to try it on. NCCL chooses its interface by NCCL_SOCKET_IFNAME."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        # read by the constructor: otherwise torch's watchdog ends the whole process when a peer is lost
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set for a while what is not set by the user: vLLM's processes shall not inherit it."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
