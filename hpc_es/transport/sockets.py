"""The few things about ZeroMQ that head and client both need: a wake-up, and one watched connection to a head.

Sockets belong to one thread; only `Wake.set` may be called from another one, or from a signal handler.
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
"""ZMTP's own heartbeats: they end connections whose other machine has vanished without a word."""

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)


def milliseconds(seconds: float) -> int:
    """Rounded up, so that a poll never ends before the time it was given."""
    return math.ceil(seconds * 1000)


class Wake:
    """Ends another thread's poll. Without a lock, so that a signal handler may use it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with suppress(OSError):  # full: awake already; closed: nobody sleeps
            self._writer.send(b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Connection:
    """A DEALER to one head. `is_ready` from the handshake to the disconnection; ZeroMQ reconnects by itself."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", to: Rendezvous, secrets: Secrets, identity: bytes):
        self.to = to
        self.is_ready = False
        self.is_over = False
        """ZeroMQ has given this connection up; try another one."""
        self.is_refused = False
        """The head does not know our key; another connection would fare no better."""
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
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.TO_WORKER)  # whoever listens there may not be a head
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.setsockopt(zmq.IPV6, family(to.host) == socket.AF_INET6)
        self.socket.connect(f"tcp://{there}")

    def watch(self) -> bool:
        """Take in what happened to the connection. True when it has just become ready (again)."""
        became_ready = False
        while self.monitor.poll(0):
            happened = recv_monitor_message(self.monitor)
            event, was_ready = happened["event"], self.is_ready
            self.is_ready = became_ready = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.trouble = "it took the message and did not answer"
            elif event == zmq.EVENT_CONNECTED:
                self.trouble = "the connection is accepted, but no handshake follows: the head may be stopped"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                # 400 is the verdict of the head's ZAP handler; anything else comes from a head that is just closing
                self.is_over, self.is_refused = True, happened["value"] == 400
                self.trouble = "the head refused the workers' key"
            elif event == zmq.EVENT_DISCONNECTED and was_ready:
                self.trouble = "the connection broke and did not come back"
            elif event != zmq.EVENT_DISCONNECTED:
                self.trouble = "the handshake failed: the head's key is another one, or no head listens there"
        return became_ready

    def send(self, data: bytes) -> None:
        """Hand over to ZeroMQ; dropped when its queue is full."""
        with suppress(zmq.Again):
            self.socket.send(data, zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """What is there, at most 256 messages."""
        received: list[bytes] = []
        with suppress(zmq.Again):
            while len(received) < 256:
                received.append(self.socket.recv(zmq.NOBLOCK))
        return received

    def close(self, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
