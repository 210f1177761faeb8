"""Send theta from the head's arena to workers that join a running run, in buckets, through separate process groups.

A group consists of the head and the workers that sent Hello since the last transfer, never of workers that run
evaluations. The head lists the participants once all invited workers have come or the time is up, so a late worker
costs the others a short wait only. If a worker is lost during the transfer, there is a second round, which starts at
the first bucket that any of the others lacks. Invariants: each step and the whole transfer have time limits; only the
receiver writes to its own arena. It compares the digest that came by the control plane, since store and groups are not
authenticated.
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
"""Size of a bucket. For Gloo it should fit into the CPU cache: on loopback, buckets of 4 MiB are as fast as plain
sockets, buckets of 32 MiB are slower. The value for NCCL is an estimate that should hide the cost per bucket; it was
not measured.
"""
ROUNDS = 2
MIN_BYTES_PER_SECOND = 100e6
"""A slower transfer is aborted, because the head's next update waits for it."""
_GO = "go"
_POLL_S = 0.02
_GROUP_ERRORS = (OSError, RuntimeError, TransportError)
"""What a broken group may raise."""


class Sent(Struct, frozen=True):
    """Outcome of a transfer at the head."""

    workers: tuple[str, ...]
    """Workers that received all buckets. Each still has to compare the digest."""
    num_bytes: int
    seconds: float
    """Time for the buckets alone."""


class _TooLate(TransportError):
    """Another round would not help."""


class _Start(NamedTuple):
    """What the head decides at the start of a round."""

    first: int
    """Index of the first bucket."""
    places: list[int]
    """Indices of the workers that take part, among the invited ones."""


class Sending:
    """The head's side of one transfer."""

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
        """number: never used before. store: host and port of the head's store. timeout_s: time limit for each step.
        stop: aborts the transfer after its current step."""
        self._number, self._workers, self._backend = number, list(workers), backend
        self._bucket_bytes = BUCKET_BYTES[backend]
        self._host, self._port = store
        self._timeout_s, self._interface = timeout_s, interface
        self._stop = stop or Event()

    def calls(self, version: int, digest: int, num_bytes: int) -> dict[str, OpenTransfer]:
        """Return the message that each worker must receive before `send` is called; `digest`: of theta_version."""
        common = (self._backend, self._host, self._port, version, digest, num_bytes, self._bucket_bytes)
        return {worker: OpenTransfer(self._number, place, *common) for place, worker in enumerate(self._workers)}

    def send(self, memory: memoryview) -> Sent:
        """Send `memory`, which must not change meanwhile; blocks.

        Errors: TransportError; any number of workers may then have received all of it.
        """
        deadline = time.monotonic() + 2 * ROUNDS * self._timeout_s + len(memory) / MIN_BYTES_PER_SECOND
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
            except _GROUP_ERRORS as error:
                number += 1
                if number == ROUNDS:
                    raise TransportError(str(error)) from error
                log.warning("transfer %d is tried again with the remaining workers: %s", self._number, str(error))

    def _start(self, store: "Store", asked: Sequence[int]) -> _Start:
        """Start a round with the workers that have come, once all have come or the time is up."""
        deadline = time.monotonic() + self._timeout_s
        missing = set(asked)
        while missing and time.monotonic() < deadline:
            self._check_stop()
            missing -= {place for place in missing if store.check([_came(place)])}
            time.sleep(_POLL_S if missing else 0)
        places = [place for place in asked if place not in missing]
        if not places:
            raise _TooLate(f"no worker came within {self._timeout_s:g} s")
        start = _Start(min(int(store.get(_came(place))) for place in places), places)
        store.set(_GO, " ".join(map(str, (start.first, *places))))
        return start

    def _send(self, memory: memoryview, store: "Store", start: _Start, deadline: float) -> float:
        """Send the buckets from `start.first` on; returns how many seconds they took."""
        place = Place(ROOT, len(start.places) + 1, self._host, self._interface)
        group = Group(self._backend, store, place, self._timeout_s)
        began = time.monotonic()
        try:
            for at in range(start.first * self._bucket_bytes, len(memory), self._bucket_bytes):
                self._check_stop()
                if time.monotonic() > deadline:
                    slowest = f"{MIN_BYTES_PER_SECOND / 1e6:g} MB/s"
                    raise _TooLate(f"slower than {slowest}, at {at} of {len(memory)} bytes")
                group.share(memory[at : at + self._bucket_bytes])
            return time.monotonic() - began
        finally:
            group.abandon()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _TooLate("the head stops or exits")


class Receiving:
    """A worker's side: an iterable of all buckets in order, each once.

    A bucket is valid until the next one is requested. Iteration blocks and may raise TransportError. Compare the digest
    afterwards.
    """

    def __init__(
        self, call: OpenTransfer, *, timeout_s: float, interface: str | None = None, stop: Event | None = None
    ):
        """timeout_s: time limit for each step. stop: aborts the transfer."""
        self._call, self._timeout_s, self._interface = call, timeout_s, interface
        self._stop = stop or Event()
        self._num_buckets = -(-call.num_bytes // call.bucket_bytes)
        self._num_received = 0

    def __iter__(self) -> Iterator[memoryview]:
        call = self._call
        for number in range(ROUNDS):
            try:
                yield from self._round(number)
            except _TooLate:
                raise
            except _GROUP_ERRORS as error:
                share = f"{self._num_received} of {self._num_buckets} buckets"
                progress = f"transfer {call.number} failed after {share}: {error}"
                if number + 1 == ROUNDS:
                    raise TransportError(progress) from error
                log.warning("%s; trying again", progress)
            else:
                return

    def _round(self, number: int) -> Iterator[memoryview]:
        """Yield the missing buckets that arrive in this round."""
        self._check_stop()
        call = self._call
        store = open_store(call.store_host, call.store_port, _prefix(call.number, number), self._timeout_s)
        store.set(_came(call.place), str(self._num_received))
        start = self._await_start(store)
        if call.place not in start.places:
            raise _TooLate("the head started without this worker, which came too late")
        rank = ROOT + 1 + start.places.index(call.place)
        place = Place(rank, len(start.places) + 1, call.store_host, self._interface)
        # new memory for each round: an abandoned broadcast of the last round may still write to its own
        memory = memoryview(bytearray(min(call.bucket_bytes, call.num_bytes)))
        group = Group(call.backend, store, place, self._timeout_s)
        try:
            for index in range(start.first, self._num_buckets):
                self._check_stop()
                bucket = memory[: min(call.bucket_bytes, call.num_bytes - index * call.bucket_bytes)]
                group.share(bucket)
                if index >= self._num_received:
                    self._num_received = index + 1
                    yield bucket
        finally:
            group.abandon()

    def _await_start(self, store: "Store") -> _Start:
        # The head may notice a broken step later than we do, and then waits up to one step for other workers
        limit_s = 3 * self._timeout_s
        deadline = time.monotonic() + limit_s
        while not store.check([_GO]):
            self._check_stop()
            if time.monotonic() > deadline:
                raise _TooLate(f"the head has not started after {limit_s:g} s")
            time.sleep(_POLL_S)
        first, *places = map(int, store.get(_GO).split())
        return _Start(first, places)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _TooLate("the worker exits, or was invited to another transfer")


def _prefix(number: int, round_: int) -> str:
    return f"transfer-{number}.{round_}"


def _came(place: int) -> str:
    """Key in the store that a worker sets when it comes; the value is the number of buckets that it has received."""
    return f"came-{place}"
