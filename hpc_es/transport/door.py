"""The head's door: who is let in, and how much memory those take who have not shown a key yet.

A thread of its own answers every handshake (ZAP) and counts the connections that have said nothing under the workers'
key. Invariant: of those there are at most `most`; beyond that the oldest one from the address with the most of them is
cut off, so a crowd from one machine pushes out its own and not the workers of another. With libzmq's limit on the size
of a message this bounds the memory, and with its limit on the time of a handshake nobody stays at the door for long.
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
"""libzmq closes a connection that has not shown a key by then. A CURVE handshake takes milliseconds."""
WAITING_BYTES = 2**26
"""What all connections at the door may hold together, in messages that are not complete."""
MOST_WAITING, LEAST_WAITING = 1024, 16
"""Bounds of how many connections may be at the door, whatever the size of a message: a thousand workers start at once;
and with few places a crowd would keep everybody out."""
QUIET_S = 60.0
"""Between two lines in the log about the same thing that peers do, however often they do it."""
_JOIN_S = 5.0

Peer = tuple[str, int]
"""Address and port."""


def num_waiting(largest_message: int, num_files: int) -> int:
    """How many connections may be at the door, by what each may hold and by the files that this process may open."""
    return max(LEAST_WAITING, min(MOST_WAITING, WAITING_BYTES // largest_message, num_files // 4))


class Complaints:
    """Log lines about what peers do, who could otherwise fill the disk: one of a kind in QUIET_S, with a count."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._left_out: defaultdict[str, int] = defaultdict(int)

    def log(self, kind: str, detail: object = "") -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -QUIET_S) < QUIET_S:
            self._left_out[kind] += 1
            return
        self._logged[kind] = now
        more = self._left_out.pop(kind, 0)
        log.warning("%s%s%s", kind, f": {detail}" if detail else "", f" ({more} more since the last line)" * bool(more))


class Door:
    """Of one ROUTER, which must not be bound yet. `close` before the router is closed."""

    def __init__(self, context: "zmq.Context[Any]", router: "zmq.Socket[bytes]", workers_key: bytes, most: int):
        self.most = most
        self._router, self._workers_key = router, workers_key
        self._complaints = Complaints()
        self._waiting: dict[int, Peer] = {}  # by file descriptor, oldest first
        self._crowds: Counter[str] = Counter()  # how many of them by address
        self._lock = threading.Lock()  # guards both
        # libzmq asks here, in this context, about every handshake
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="head-door", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """How many are at the door."""
        return len(self._waiting)

    def let_in(self, descriptor: int) -> None:
        """A message under the workers' key has come over this connection. From any thread."""
        with self._lock:
            self._forget(descriptor)

    def close(self) -> None:
        # First, and while the thread still reads: libzmq's own thread waits where nobody takes its events
        self._router.disable_monitor()
        self._wake.set()
        self._thread.join(_JOIN_S)

    # --- on its own thread -------------------------------------------------------------------------------------

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
            self._complaints.log("a connection without the workers' key was refused")
        self._zap.send_multipart([version, request, b"200" if known else b"400", b"", b"", b""])

    def _watch(self) -> None:
        happened = recv_monitor_message(self._monitor)
        event, descriptor = happened["event"], int(happened["value"])
        with self._lock:
            self._forget(descriptor)  # closed, and its number perhaps in use again
            if event == zmq.EVENT_ACCEPTED and (peer := _peer(descriptor)) is not None:
                self._waiting[descriptor] = peer
                self._crowds[peer[0]] += 1
            if len(self._waiting) > self.most:
                self._cut_one()

    def _cut_one(self) -> None:
        ((address, count),) = self._crowds.most_common(1)
        oldest = next(descriptor for descriptor, peer in self._waiting.items() if peer[0] == address)
        _cut(oldest, self._waiting[oldest])
        self._forget(oldest)
        self._complaints.log(
            f"more than {self.most} connections have shown no key, so the oldest is cut off",
            f"{count} of them come from {address}",
        )

    def _forget(self, descriptor: int) -> None:
        if (peer := self._waiting.pop(descriptor, None)) is not None:
            self._crowds[peer[0]] -= 1
            if not self._crowds[peer[0]]:
                del self._crowds[peer[0]]


@contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """One of libzmq's connections, held so that its number cannot come to mean another one. Errors: OSError."""
    held = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=held)
    except OSError:  # no socket (any more)
        os.close(held)
        raise
    with connection:
        yield connection


def _peer(descriptor: int) -> Peer | None:
    """Who is at the other end; None where it is gone already."""
    with suppress(OSError), _copy(descriptor) as connection:
        address, port, *_ = connection.getpeername()
        return address, port
    return None


def _cut(descriptor: int, peer: Peer) -> None:
    """End a connection behind libzmq's back, which finds it ended and closes it."""
    with suppress(OSError), _copy(descriptor) as connection:
        if connection.getpeername()[:2] == peer:
            connection.shutdown(socket.SHUT_RDWR)
