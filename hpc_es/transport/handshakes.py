"""Handshakes at the head: which connections are accepted, and how much memory they may use before authentication.

A separate thread decides for libzmq which keys are accepted (ZAP), and counts the connections that have not yet sent a
message with the workers' key. Invariant: at most `maximum` connections are unauthenticated. If there are more, the
address with the most of them loses its oldest one, so a flood from one machine does not affect other machines. Their
memory is bounded by `maximum` times libzmq's limit on the size of a message, and freed by its handshake timeout.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from hpc_es.transport.sockets import Wake

log = logging.getLogger(__name__)

HANDSHAKE_MS = 10_000
"""Time after which libzmq closes an unauthenticated connection. A CURVE handshake takes milliseconds."""
UNAUTHENTICATED_BYTES = 2**26
"""Limit on the total memory for incomplete messages of unauthenticated connections."""
MAX_UNAUTHENTICATED, MIN_UNAUTHENTICATED = 1024, 16
"""Bounds on the number of unauthenticated connections, for any message size. A thousand workers may start at once; with
a very low limit, a flood of connections would keep all workers out."""
LOG_INTERVAL_S = 60.0
"""Seconds between two warnings of the same kind."""
_JOIN_S = 5.0

Peer = tuple[str, int]
"""Address and port."""


def max_unauthenticated(largest_message: int, num_files: int) -> int:
    """Return how many unauthenticated connections a head allows, given the memory of each and the open-file limit."""
    return max(MIN_UNAUTHENTICATED, min(MAX_UNAUTHENTICATED, UNAUTHENTICATED_BYTES // largest_message, num_files // 4))


class RateLimitedLog:
    """Warnings about peers, at most one per kind and minute with a count, so that peers cannot fill the disk."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._num_suppressed: defaultdict[str, int] = defaultdict(int)

    def warning(self, kind: str, detail: object = "") -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            self._num_suppressed[kind] += 1
            return
        self._logged[kind] = now
        more = self._num_suppressed.pop(kind, 0)
        note = f" ({more} more since the last warning)" if more else ""
        log.warning("%s%s%s", kind, f": {detail}" if detail else "", note)


class HandshakeGuard:
    """Guards one ROUTER socket, which must not be bound yet. Call `close` before closing the socket."""

    def __init__(self, context: "zmq.Context[Any]", router: "zmq.Socket[bytes]", workers_key: bytes, maximum: int):
        self.maximum = maximum
        self._router, self._workers_key = router, workers_key
        self._rare_log = RateLimitedLog()
        self._unauthenticated: dict[int, Peer] = {}  # by file descriptor, oldest first
        self._by_address: Counter[str] = Counter()  # number of them per address
        self._lock = threading.Lock()  # guards both
        # libzmq sends a request to this address, within the context, for every handshake
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="head-handshakes", daemon=True)
        self._thread.start()

    @property
    def num_unauthenticated(self) -> int:
        """Number of unauthenticated connections."""
        return len(self._unauthenticated)

    def mark_authenticated(self, descriptor: int) -> None:
        """Record that this connection has sent a message with the workers' key. Thread-safe."""
        with self._lock:
            self._forget(descriptor)

    def close(self) -> None:
        # First, while our thread still reads the events: libzmq's thread would block if nobody read them
        self._router.disable_monitor()
        self._wake.set()
        self._thread.join(_JOIN_S)

    # --- on the guard's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        while self._wake.fileno() not in (ready := dict(poller.poll())):
            if self._monitor in ready:
                self._watch()
            if self._zap in ready:
                self._answer()
        for source in (self._monitor, self._zap):
            source.close(0)
        self._wake.close()

    def _answer(self) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._workers_key]
        if not known:
            self._rare_log.warning("a connection without the workers' key was refused")
        self._zap.send_multipart([version, request, b"200" if known else b"400", b"", b"", b""])

    def _watch(self) -> None:
        happened = recv_monitor_message(self._monitor)
        event, descriptor = happened["event"], int(happened["value"])
        with self._lock:
            self._forget(descriptor)  # closed earlier; the system may have reused its number
            if event == zmq.EVENT_ACCEPTED and (peer := _peer(descriptor)) is not None:
                self._unauthenticated[descriptor] = peer
                self._by_address[peer[0]] += 1
            if len(self._unauthenticated) > self.maximum:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        ((address, count),) = self._by_address.most_common(1)
        oldest = next(descriptor for descriptor, peer in self._unauthenticated.items() if peer[0] == address)
        _shut_down(oldest, self._unauthenticated[oldest])
        self._forget(oldest)
        self._rare_log.warning(
            f"more than {self.maximum} connections are unauthenticated, so the oldest one is closed",
            f"{count} of them are from {address}",
        )

    def _forget(self, descriptor: int) -> None:
        if (peer := self._unauthenticated.pop(descriptor, None)) is not None:
            self._by_address[peer[0]] -= 1
            if not self._by_address[peer[0]]:
                del self._by_address[peer[0]]


@contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """Duplicate one of libzmq's connections, so that its number is not reused meanwhile. Errors: OSError."""
    held = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=held)
    except OSError:  # not a socket, or no longer one
        os.close(held)
        raise
    with connection:
        yield connection


def _peer(descriptor: int) -> Peer | None:
    """Return the address of the other end; None if the connection is already closed."""
    with suppress(OSError), _copy(descriptor) as connection:
        address, port, *_ = connection.getpeername()
        return address, port
    return None


def _shut_down(descriptor: int, peer: Peer) -> None:
    """Shut a connection down at the system level; libzmq then notices that it is closed and frees it."""
    with suppress(OSError), _copy(descriptor) as connection:
        if connection.getpeername()[:2] == peer:
            connection.shutdown(socket.SHUT_RDWR)
