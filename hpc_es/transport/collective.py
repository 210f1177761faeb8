"""The collective plane: one broadcast carries a commit record to every worker of a membership epoch.

Each epoch has its own process group (groups.py), which uses its own key prefix in a store that the head hosts.
Invariants: the head's loop never waits for this module; an error or a late member ends the epoch. The next epoch makes
a new group, once the operations of the old one have finished or timed out. Store and groups are not authenticated, so
receivers check the hash that the control plane announced.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_es.errors import TransportError
from hpc_es.transport.address import listen
from hpc_es.transport.backends import Backend
from hpc_es.transport.groups import ROOT, Group, Place, import_distributed, open_store
from hpc_es.transport.messages import OpenEpoch
from hpc_es.transport.transfer import Sending

if TYPE_CHECKING:
    from torch.distributed import Store

_GO = "go"
_POLL_S = 0.02
_CLOSE_GRACE_S = 1.0


class EpochUp(Struct, frozen=True):
    """Every member has joined, so broadcasts are possible."""

    epoch: int


class EpochFailed(Struct, frozen=True):
    """The epoch has ended. Its last broadcast may have reached all, some or no members."""

    epoch: int
    detail: str


EpochEvent = EpochUp | EpochFailed


def sha256(data: bytes) -> bytes:
    """Hash of a commit record, which Announce carries and a receiver compares."""
    return hashlib.sha256(data).digest()


class HeadCollective:
    """The head's side: rank 0 of every epoch. Its methods return at once; `on_event` is called on its own thread."""

    def __init__(
        self, host: str, timeout_s: float, on_event: Callable[[EpochEvent], None], interface: str | None = None
    ):
        """Host the store on a free port of `host`, the address that the head publishes. Importing torch takes seconds.

        timeout_s: time limit for each step: waiting for members, connecting, one broadcast. interface:
        transport.interface. Errors: TransportError.
        """
        distributed = import_distributed()
        try:
            # Pass a socket, because the store would otherwise listen on every interface
            listener = listen(host)
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
        self._host, self._interface, self._timeout_s, self._on_event = host, interface, timeout_s, on_event
        self._epoch: int | None = None
        self._group: Group | None = None
        self._wanted = -1  # the newest epoch that was requested
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._no_transfers = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head-collective", daemon=True)
        self._thread.start()

    def open(self, epoch: int, workers: Sequence[str], backend: Backend) -> dict[str, OpenEpoch]:
        """End the current epoch, if any, and wait for the workers to join `epoch`, a number never used before.

        Returns the message to send to each worker. The event EpochUp or EpochFailed follows.
        """
        self._wanted = epoch
        self._orders.put(lambda: self._open(epoch, workers, backend))
        size = len(workers) + 1
        return {
            worker: OpenEpoch(epoch, rank, size, backend, self._host, self._port)
            for rank, worker in enumerate(workers, start=ROOT + 1)
        }

    def broadcast(self, epoch: int, data: bytes) -> None:
        """Send to all members; broadcasts keep their order. Does nothing if the epoch is not up."""
        self._orders.put(lambda: self._broadcast(epoch, data))

    def sending(self, number: int, workers: Sequence[str], backend: Backend) -> Sending:
        """Return a transfer of theta, which runs on the caller's thread. Errors: TransportError."""
        return Sending(
            number,
            workers,
            backend,
            (self._host, self._port),
            timeout_s=self._timeout_s,
            interface=self._interface,
            stop=self._no_transfers,
        )

    def end_transfers(self) -> None:
        """Abort the running transfer after its current step, and refuse all further ones."""
        self._no_transfers.set()

    def close(self) -> None:
        """End the epoch and the store. Running operations keep their usual time limits."""
        self.end_transfers()
        self._closing.set()
        self._orders.put(None)
        self._thread.join(3 * (self._timeout_s + _CLOSE_GRACE_S))

    # --- on its own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._closing.is_set():
            order()
        self._end()
        del self._store

    def _open(self, epoch: int, workers: Sequence[str], backend: Backend) -> None:
        self._end()
        try:
            store = open_store(self._host, self._port, _prefix(epoch), self._timeout_s)
            self._await_members(epoch, store, workers)
            place = Place(ROOT, len(workers) + 1, self._host, self._interface)
            self._group = Group(backend, store, place, self._timeout_s)
            self._epoch = epoch
        except Exception as error:  # any error of torch ends this epoch, not the run
            self._on_event(EpochFailed(epoch, str(error)))
        else:
            self._on_event(EpochUp(epoch))

    def _await_members(self, epoch: int, store: "Store", workers: Sequence[str]) -> None:
        """Wait until all members have come; then let everyone connect.

        Nobody connects earlier, because the constructor of a process group cannot be interrupted.
        """
        deadline = time.monotonic() + self._timeout_s
        missing = dict(enumerate(workers, start=ROOT + 1))
        while missing := {rank: worker for rank, worker in missing.items() if not store.check([_joined(rank)])}:
            if self._closing.is_set() or self._wanted != epoch:
                raise TransportError("abandoned for a newer epoch, or because the head exits")
            if time.monotonic() > deadline:
                raise TransportError(f"did not join within {self._timeout_s:g} s: {', '.join(missing.values())}")
            time.sleep(_POLL_S)
        store.set(_GO, "")

    def _broadcast(self, epoch: int, data: bytes) -> None:
        if self._group is None or self._epoch != epoch:
            return
        try:
            self._group.broadcast(data, len(data))
        except Exception as error:  # as in _open
            self._end()
            self._on_event(EpochFailed(epoch, f"broadcast of {len(data)} bytes: {error}"))

    def _end(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group = self._epoch = None


class WorkerCollective:
    """A worker's side. Its methods block: call them in a separate thread, one call at a time."""

    def __init__(self, timeout_s: float, interface: str | None = None):
        """timeout_s, interface: as for HeadCollective."""
        self.epoch: int | None = None
        """The epoch that this worker is a member of."""
        self._timeout_s, self._interface = timeout_s, interface
        self._group: Group | None = None

    def join(self, call: OpenEpoch) -> None:
        """Leave the current epoch and join the new one; returns when all members have come.

        Errors: TransportError; the worker is then not in any epoch.
        """
        self.leave()
        place = Place(call.rank, call.size, call.store_host, self._interface)
        try:
            store = open_store(call.store_host, call.store_port, _prefix(call.epoch), self._timeout_s)
            store.set(_joined(call.rank), "")
            store.wait([_GO], timedelta(seconds=self._timeout_s))
            self._group = Group(call.backend, store, place, self._timeout_s)
        except (OSError, RuntimeError) as error:
            raise TransportError(f"epoch {call.epoch} cannot be joined as rank {call.rank}: {error}") from error
        self.epoch = call.epoch

    def receive(self, epoch: int, length: int) -> bytes:
        """Receive the next broadcast of `epoch`, which was announced with this length in bytes. Check its hash.

        Errors: TransportError; the worker is then not in any epoch.
        """
        if self._group is None or self.epoch != epoch:
            raise TransportError(f"a broadcast in epoch {epoch} was announced to a worker that is in {self.epoch}")
        try:
            return self._group.broadcast(b"", length)
        except (TransportError, RuntimeError) as error:
            self.leave()
            raise TransportError(f"the broadcast in epoch {epoch} did not arrive: {error}") from error

    def leave(self) -> None:
        """Leave the epoch without telling the other members."""
        if self._group is not None:
            self._group.abandon()
        self._group = self.epoch = None


def _prefix(epoch: int) -> str:
    return f"epoch-{epoch}"


def _joined(rank: int) -> str:
    return f"joined-{rank}"
