"""theta on its way to workers that join a run under way: the head's arena, in buckets, through a group of its own.

The group holds the head and those who said Hello since the last transfer, never the workers that roll out. The head
names who takes part once all have come or the time is up, so someone late or lost costs the others a wait and no more.
Invariants: each step has its time limit, and the whole has one; nothing writes to a receiver's arena but the receiver,
which compares the digest that came by the control plane, for store and group are not authenticated.
"""

import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_es.errors import TransportError
from hpc_es.transport.backends import Backend
from hpc_es.transport.groups import ROOT, Group, Place, open_store
from hpc_es.transport.messages import OpenTransfer

if TYPE_CHECKING:
    from torch.distributed import Store

BUCKET_BYTES = 2**25
SLOWEST = 100e6
"""Bytes per second; a transfer slower than this is given up, and the head's next update waits no longer."""
_GO = "go"
_POLL_S = 0.02


class Sent(Struct, frozen=True):
    """What came of a transfer at the head."""

    workers: tuple[str, ...]
    """Who took part. Each still has to compare the digest."""
    num_bytes: int
    seconds: float
    """Of the buckets alone."""


class Sending:
    """The head's end of one transfer."""

    def __init__(
        self,
        number: int,
        workers: Sequence[str],
        backend: Backend,
        store: tuple[str, int],
        *,
        timeout_s: float,
        interface: str | None = None,
    ):
        """`number` was never used before; `store`: address and port of the head's store. `timeout_s` bounds each step.

        Errors: TransportError.
        """
        self._number, self._workers, self._backend = number, list(workers), backend
        self._host, self._port = store
        self._timeout_s, self._interface = timeout_s, interface
        try:
            self._store = open_store(self._host, self._port, _prefix(number), timeout_s)
        except RuntimeError as error:
            raise TransportError(f"the head's own store does not answer: {error}") from error

    def calls(self, version: int, digest: int, num_bytes: int) -> dict[str, OpenTransfer]:
        """What each worker must be told before `send`; digest: of theta_version."""
        common = (self._backend, self._host, self._port, version, digest, num_bytes, BUCKET_BYTES)
        return {worker: OpenTransfer(self._number, place, *common) for place, worker in enumerate(self._workers)}

    def send(self, memory: memoryview) -> Sent:
        """Blocks. `memory`, bytes, must not change meanwhile. Errors: TransportError; nobody then has all of it."""
        present = self._present()
        if not present:
            raise TransportError(f"none of {', '.join(self._workers)} came within {self._timeout_s:g} s")
        group = None
        try:
            self._store.set(_GO, " ".join(map(str, present)))
            place = Place(ROOT, len(present) + 1, self._host, self._interface)
            group = Group(self._backend, self._store, place, self._timeout_s)
            began = time.monotonic()
            for start in range(0, len(memory), BUCKET_BYTES):
                if time.monotonic() - began > self._timeout_s + len(memory) / SLOWEST:
                    raise TransportError(f"slower than {SLOWEST / 1e6:g} MB/s, at {start} of {len(memory)} bytes")
                group.share(memory[start : start + BUCKET_BYTES])
            seconds = time.monotonic() - began
        except (OSError, RuntimeError) as error:
            raise TransportError(str(error)) from error
        finally:
            if group is not None:
                group.abandon()
        return Sent(tuple(self._workers[place] for place in present), len(memory), seconds)

    def _present(self) -> list[int]:
        """The places of those who have come, once all have or the time is up."""
        deadline = time.monotonic() + self._timeout_s
        missing = set(range(len(self._workers)))
        try:
            while missing and time.monotonic() < deadline:
                missing -= {place for place in missing if self._store.check([_came(place)])}
                time.sleep(_POLL_S if missing else 0)
        except RuntimeError as error:
            raise TransportError(str(error)) from error
        return [place for place in range(len(self._workers)) if place not in missing]


def received(
    call: OpenTransfer, *, timeout_s: float, interface: str | None = None, stop: Event | None = None
) -> Iterator[memoryview]:
    """The buckets of a transfer in order, each valid until the next. Blocks while iterated over.

    Compare the digest afterwards. `stop` ends it early. Errors: TransportError.
    """
    group = None
    stop = stop or Event()
    try:
        store = open_store(call.store_host, call.store_port, _prefix(call.number), timeout_s)
        store.set(_came(call.place), "")
        # the head may wait for others for as long as we are ready to wait for it
        places = _await_go(store, 2 * timeout_s, stop)
        if call.place not in places:
            raise TransportError("the head began without this worker, which came too late")
        rank = ROOT + 1 + places.index(call.place)
        place = Place(rank, len(places) + 1, call.store_host, interface)
        group = Group(call.backend, store, place, timeout_s)
        for start in range(0, call.num_bytes, call.bucket_bytes):
            if stop.is_set():
                raise TransportError("the worker ends")
            # a fresh one each time: a broadcast that was given up may still write to its own
            bucket = bytearray(min(call.bucket_bytes, call.num_bytes - start))
            group.share(bucket)
            yield memoryview(bucket)
    except (OSError, RuntimeError) as error:
        raise TransportError(f"transfer {call.number} of theta_{call.version}: {error}") from error
    finally:
        if group is not None:
            group.abandon()


def _await_go(store: "Store", seconds: float, stop: Event) -> list[int]:
    deadline = time.monotonic() + seconds
    while not store.check([_GO]):
        if stop.is_set():
            raise TransportError("the worker ends")
        if time.monotonic() > deadline:
            raise TransportError(f"the head has not begun after {seconds:g} s")
        time.sleep(_POLL_S)
    return [int(place) for place in store.get(_GO).split()]


def _prefix(number: int) -> str:
    return f"transfer-{number}"


def _came(place: int) -> str:
    return f"came-{place}"
