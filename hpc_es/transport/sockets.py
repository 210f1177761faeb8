"""ZeroMQ helpers for head and clients: a way to wake a polling thread, and a monitored connection to a head.

A socket may be used by one thread only; `Wake.set` may also be called from other threads and from signal handlers.
"""

import math
import socket
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from hpc_es.transport import limits
from hpc_es.transport.address import family, with_port
from hpc_es.transport.rendezvous import Rendezvous
from hpc_es.transport.secrets import Secrets

HEARTBEAT_MS, SILENCE_MS = 5_000, 20_000
"""Interval and timeout of ZeroMQ's own heartbeats, which close connections to a machine that has disappeared."""

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)


def milliseconds(seconds: float) -> int:
    """Convert seconds to milliseconds, rounded up, so that a poll never returns before its timeout."""
    return math.ceil(seconds * 1000)


class Wake:
    """Ends the poll of another thread. It uses no lock, so that a signal handler may call it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with suppress(OSError):  # full: the thread is awake already; closed: no thread waits
            self._writer.send(b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Connection:
    """A DEALER socket to one head, which ZeroMQ reconnects by itself. `is_ready`: the handshake is done."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", to: Rendezvous, secrets: Secrets, identity: bytes):
        self.to = to
        self.is_ready = False
        self.is_over = False
        """Whether ZeroMQ has given up this connection, so that a new one is needed."""
        self.is_refused = False
        """Whether the head refused our key, so that a new connection would not help."""
        there = with_port(to.host, to.port)
        self.trouble = f"nothing listens at {there}"
        self.socket = context.socket(zmq.DEALER)
        self.socket.identity = identity
        self.socket.curve_publickey = secrets.workers.public.encode()
        self.socket.curve_secretkey = secrets.workers.secret.encode()
        self.socket.curve_serverkey = secrets.head.public.encode()
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.TO_WORKER)  # another program may listen at this address
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.setsockopt(zmq.IPV6, family(to.host) == socket.AF_INET6)
        self.socket.connect(f"tcp://{there}")

    def watch(self) -> bool:
        """Process events of the connection; returns whether it has just become ready, for the first time or again."""
        became_ready = False
        while self.monitor.poll(0):
            happened = recv_monitor_message(self.monitor)
            event, was_ready = happened["event"], self.is_ready
            self.is_ready = became_ready = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.trouble = "it accepted the message and did not answer"
            elif event == zmq.EVENT_CONNECTED:
                self.trouble = "the connection is accepted, but no handshake follows: the head may be stopped"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                # 400 is sent by the head's ZAP handler; other codes come from a head that is closing its socket
                self.is_over, self.is_refused = True, happened["value"] == 400
                self.trouble = "the head refused the workers' key"
            elif event == zmq.EVENT_DISCONNECTED and was_ready:
                self.trouble = "the connection broke and did not come back"
            elif event != zmq.EVENT_DISCONNECTED:
                self.trouble = "the handshake failed: the head has another key, or another program listens there"
        return became_ready

    def send(self, data: bytes) -> None:
        """Pass a message to ZeroMQ; it is dropped if ZeroMQ's queue is full."""
        with suppress(zmq.Again):
            self.socket.send(data, zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived, at most 256."""
        received: list[bytes] = []
        with suppress(zmq.Again):
            while len(received) < 256:
                received.append(self.socket.recv(zmq.NOBLOCK))
        return received

    def close(self, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
