"""theta on its way to workers that join a run under way: the head's arena, in buckets, through groups of its own.

A group holds the head and those who said Hello since the last transfer, never the workers that roll out. The head names
who takes part once all have come or the time is up, so someone late costs the others a wait and no more; someone lost
on the way costs them a second round, from the first bucket that one of them lacks. Invariants: each step has its time
limit, and the whole has one; nothing writes to a receiver's arena but the receiver, which compares the digest that came
by the control plane, for store and groups are not authenticated.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from hpc_es.errors import TransportError
from hpc_es.transport.backends import Backend
from hpc_es.transport.groups import ROOT, Group, Place, open_store
from hpc_es.transport.messages import OpenTransfer

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

BUCKET_BYTES: dict[Backend, int] = {"gloo": 2**22, "nccl": 2**25}
"""Gloo's pass through the processor's cache: measured on loopback, 4 MiB move as fast as plain sockets, 32 MiB do not.
NCCL's are as large as was thought to hide what each costs; nobody has measured them.
"""
ROUNDS = 2
SLOWEST = 100e6
"""Bytes per second; a slower transfer is given up, and the head's next update waits no longer."""
_GO = "go"
_POLL_S = 0.02
_BREAKS = (OSError, RuntimeError, TransportError)
"""What a group that breaks comes up with."""


class Sent(Struct, frozen=True):
    """What came of a transfer at the head."""

    workers: tuple[str, ...]
    """Workers that took part to the end. Each still has to compare the digest."""
    num_bytes: int
    seconds: float
    """Seconds of the buckets alone."""


class _TooLate(TransportError):
    """Another round would not help."""


class _Start(NamedTuple):
    """What the head decides when a round begins."""

    first: int
    """The first bucket."""
    places: list[int]


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
        stop: Event | None = None,
    ):
        """`number` was never used before; `store`: where the head's store is; `timeout_s` bounds each step; `stop` ends
        it early, within a step."""
        self._number, self._workers, self._backend = number, list(workers), backend
        self._bucket_bytes = BUCKET_BYTES[backend]
        self._host, self._port = store
        self._timeout_s, self._interface = timeout_s, interface
        self._stop = stop or Event()

    def calls(self, version: int, digest: int, num_bytes: int) -> dict[str, OpenTransfer]:
        """What each worker must be told before `send`; digest: of theta_version."""
        common = (self._backend, self._host, self._port, version, digest, num_bytes, self._bucket_bytes)
        return {worker: OpenTransfer(self._number, place, *common) for place, worker in enumerate(self._workers)}

    def send(self, memory: memoryview) -> Sent:
        """Blocks. `memory`, bytes, must not change meanwhile. Errors: TransportError; perhaps nobody has all of it."""
        deadline = time.monotonic() + 2 * ROUNDS * self._timeout_s + len(memory) / SLOWEST
        asked, number = list(range(len(self._workers))), 0
        while True:
            self._check_stop()
            try:
                store = open_store(self._host, self._port, _prefix(self._number, number), self._timeout_s)
                start = self._start(store, asked)
                seconds = self._send(memory, store, start, deadline)
                return Sent(tuple(self._workers[place] for place in start.places), len(memory), seconds)
            except _TooLate:
                raise
            except _BREAKS as error:
                number += 1
                if number == ROUNDS:
                    raise TransportError(str(error)) from error
                log.warning("transfer %d is tried again with those who are left: %s", self._number, str(error))

    def _start(self, store: "Store", asked: Sequence[int]) -> _Start:
        """Begin with those who have come, once all have or the time is up."""
        deadline = time.monotonic() + self._timeout_s
        missing = set(asked)
        while missing and time.monotonic() < deadline:
            self._check_stop()
            missing -= {place for place in missing if store.check([_came(place)])}
            time.sleep(_POLL_S if missing else 0)
        places = [place for place in asked if place not in missing]
        if not places:
            raise _TooLate(f"nobody came within {self._timeout_s:g} s")
        start = _Start(min(int(store.get(_came(place))) for place in places), places)
        store.set(_GO, " ".join(map(str, (start.first, *places))))
        return start

    def _send(self, memory: memoryview, store: "Store", start: _Start, deadline: float) -> float:
        """Seconds that the buckets from `start.first` on took."""
        place = Place(ROOT, len(start.places) + 1, self._host, self._interface)
        group = Group(self._backend, store, place, self._timeout_s)
        began = time.monotonic()
        try:
            for at in range(start.first * self._bucket_bytes, len(memory), self._bucket_bytes):
                self._check_stop()
                if time.monotonic() > deadline:
                    raise _TooLate(f"slower than {SLOWEST / 1e6:g} MB/s, at {at} of {len(memory)} bytes")
                group.share(memory[at : at + self._bucket_bytes])
            return time.monotonic() - began
        finally:
            group.abandon()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _TooLate("the head ends")


class Receiving:
    """A worker's end: an iterable of the buckets in order, each once, and valid until the next.

    Blocks while iterated over; raises TransportError. Compare the digest afterwards.
    """

    def __init__(
        self, call: OpenTransfer, *, timeout_s: float, interface: str | None = None, stop: Event | None = None
    ):
        """`stop` ends it early."""
        self._call, self._timeout_s, self._interface = call, timeout_s, interface
        self._stop = stop or Event()
        self._num_buckets = -(-call.num_bytes // call.bucket_bytes)
        self._had = 0

    def __iter__(self) -> Iterator[memoryview]:
        call = self._call
        for number in range(ROUNDS):
            try:
                yield from self._round(number)
            except _TooLate:
                raise
            except _BREAKS as error:
                progress = f"transfer {call.number} broke after {self._had} of {self._num_buckets} buckets: {error}"
                if number + 1 == ROUNDS:
                    raise TransportError(progress) from error
                log.warning("%s; trying again", progress)
            else:
                return

    def _round(self, number: int) -> Iterator[memoryview]:
        """The buckets that are missing, as far as this round brings them."""
        self._check_stop()
        call = self._call
        store = open_store(call.store_host, call.store_port, _prefix(call.number, number), self._timeout_s)
        store.set(_came(call.place), str(self._had))
        start = self._await_start(store)
        if call.place not in start.places:
            raise _TooLate("the head began without this worker, which came too late")
        rank = ROOT + 1 + start.places.index(call.place)
        place = Place(rank, len(start.places) + 1, call.store_host, self._interface)
        # of this round alone: a broadcast that was given up may still write to it
        memory = memoryview(bytearray(min(call.bucket_bytes, call.num_bytes)))
        group = Group(call.backend, store, place, self._timeout_s)
        try:
            for index in range(start.first, self._num_buckets):
                self._check_stop()
                bucket = memory[: min(call.bucket_bytes, call.num_bytes - index * call.bucket_bytes)]
                group.share(bucket)
                if index >= self._had:
                    self._had = index + 1
                    yield bucket
        finally:
            group.abandon()

    def _await_start(self, store: "Store") -> _Start:
        # the head may wait for others as long as a step may take, after a step that we found broken sooner than it did
        patience_s = 3 * self._timeout_s
        deadline = time.monotonic() + patience_s
        while not store.check([_GO]):
            self._check_stop()
            if time.monotonic() > deadline:
                raise _TooLate(f"the head has not begun after {patience_s:g} s")
            time.sleep(_POLL_S)
        first, *places = map(int, store.get(_GO).split())
        return _Start(first, places)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _TooLate("the worker ends, or was called to another transfer")


def _prefix(number: int, round_: int) -> str:
    return f"transfer-{number}.{round_}"


def _came(place: int) -> str:
    """The key under which a worker says that it has come, with the number of buckets that it has."""
    return f"came-{place}"
