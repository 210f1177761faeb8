"""Handshakes at the head: which connections are admitted, and how much memory they may use before they show a key.

A separate thread answers libzmq's questions about keys (ZAP) and counts the connections that have not yet sent a
message with the workers' key. Invariant: there are at most `maximum` of those; beyond that the oldest connection of the
address with the most of them is closed, so a flood from one machine closes its own connections and not those of other
machines. The memory is bounded by `maximum` times libzmq's limit on the size of a message, and freed by its time limit
for handshakes.
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
"""Time after which libzmq closes a connection that has not shown a key. A CURVE handshake takes milliseconds."""
UNAUTHENTICATED_BYTES = 2**26
"""Total bytes of incomplete messages that connections without a key may hold."""
MAX_UNAUTHENTICATED, MIN_UNAUTHENTICATED = 1024, 16
"""Bounds on the number of connections without a key, whatever the size of a message: a thousand workers may start at
once, and with very few places a flood would keep everyone out."""
LOG_INTERVAL_S = 60.0
"""Seconds between two warnings of the same kind."""
_JOIN_S = 5.0

Peer = tuple[str, int]
"""Address and port."""


def max_unauthenticated(largest_message: int, num_files: int) -> int:
    """Number of connections without a key that a head allows, given the memory of each and the limit on open files."""
    return max(MIN_UNAUTHENTICATED, min(MAX_UNAUTHENTICATED, UNAUTHENTICATED_BYTES // largest_message, num_files // 4))


class RateLimitedLog:
    """Warnings about peers, at most one per kind and minute with a count, so that peers cannot fill the disk."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._left_out: defaultdict[str, int] = defaultdict(int)

    def warning(self, kind: str, detail: object = "") -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            self._left_out[kind] += 1
            return
        self._logged[kind] = now
        more = self._left_out.pop(kind, 0)
        log.warning("%s%s%s", kind, f": {detail}" if detail else "", f" ({more} more since the last line)" * bool(more))


class HandshakeGuard:
    """Guards one ROUTER, which must not be bound yet. Call `close` before the router is closed."""

    def __init__(self, context: "zmq.Context[Any]", router: "zmq.Socket[bytes]", workers_key: bytes, maximum: int):
        self.maximum = maximum
        self._router, self._workers_key = router, workers_key
        self._rare_log = RateLimitedLog()
        self._unauthenticated: dict[int, Peer] = {}  # by file descriptor, oldest first
        self._by_address: Counter[str] = Counter()  # how many of them by address
        self._lock = threading.Lock()  # guards both
        # libzmq asks here, in this context, about every handshake
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="head-handshakes", daemon=True)
        self._thread.start()

    @property
    def num_unauthenticated(self) -> int:
        """Number of connections that have not shown a key yet."""
        return len(self._unauthenticated)

    def mark_authenticated(self, descriptor: int) -> None:
        """Note that this connection has sent a message with the workers' key. Thread-safe."""
        with self._lock:
            self._forget(descriptor)

    def close(self) -> None:
        # First, while the thread still reads: libzmq's own thread would block if nobody took its events
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
            self._forget(descriptor)  # it was closed, and its number may be in use again
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
            f"more than {self.maximum} connections have shown no key, so the oldest is closed",
            f"{count} of them come from {address}",
        )

    def _forget(self, descriptor: int) -> None:
        if (peer := self._unauthenticated.pop(descriptor, None)) is not None:
            self._by_address[peer[0]] -= 1
            if not self._by_address[peer[0]]:
                del self._by_address[peer[0]]


@contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """A duplicate of one of libzmq's connections, so that its number cannot be reused meanwhile. Errors: OSError."""
    held = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=held)
    except OSError:  # not a socket (any more)
        os.close(held)
        raise
    with connection:
        yield connection


def _peer(descriptor: int) -> Peer | None:
    """Address of the other end; None if it is already closed."""
    with suppress(OSError), _copy(descriptor) as connection:
        address, port, *_ = connection.getpeername()
        return address, port
    return None


def _shut_down(descriptor: int, peer: Peer) -> None:
    """Shut a connection down without libzmq, which then finds it closed and frees it."""
    with suppress(OSError), _copy(descriptor) as connection:
        if connection.getpeername()[:2] == peer:
            connection.shutdown(socket.SHUT_RDWR)
