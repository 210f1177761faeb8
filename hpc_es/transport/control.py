"""The control plane: small authenticated messages between one head and its workers.

The head owns a ROUTER, each worker's front process a DEALER, both under CURVE. Invariants: who does not hold the
workers' key says nothing that the head hears; a worker obeys only the highest generation it has seen, a head hears
only what was meant for it; a report is resent until it is acknowledged, and nothing else is ever sent twice.
"""

import logging
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec
import zmq
from zmq.utils import z85

from hpc_es.errors import HeadSilent, TransportError
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId
from hpc_es.transport import limits
from hpc_es.transport.address import family, with_port
from hpc_es.transport.handshakes import HANDSHAKE_MS, HandshakeGuard, RateLimitedLog, max_unauthenticated
from hpc_es.transport.messages import (
    Ack,
    AnyMessage,
    Envelope,
    Heartbeat,
    Hello,
    Refused,
    Report,
    decode,
    encode,
)
from hpc_es.transport.rendezvous import Rendezvous, publish, read_rendezvous
from hpc_es.transport.secrets import load_secrets
from hpc_es.transport.sockets import HEARTBEAT_MS, SILENCE_MS, Connection, Wake, milliseconds

log = logging.getLogger(__name__)

MAX_BATCH = 256
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Flags of a send, as plain numbers: pyzmq's send_multipart spends more time on them than on sending."""
FAREWELL_MS, HEAD_FAREWELL_MS = 1_000, 5_000
"""How long a closing socket may spend on what it still has to send; the head has a thousand workers to send home."""
JOIN_S = 10.0
LOOKOUT_S = 0.5
"""Pause between two looks for a head while there is none."""
UNREAD = 100
"""Messages of one worker that the head keeps while it is busy; more stay with their sender."""
BACKLOG = 1024
"""Connections that wait to be accepted: a whole array of workers starts at once."""


class HeadServer:
    """The head's end. One thread calls receive, send and close; any thread, or a signal handler, calls wake.

    Receiving never fails because of what a peer sent; sending never blocks and drops what a vanished peer would get.
    A peer is the identity that a worker chose: its incarnation, in UTF-8.
    """

    def __init__(self, paths: RunPaths, generation: int, run_id: str, host: str, *, largest: int = limits.TO_HEAD):
        """Bind a free port on `host` (see `resolve_host`) and publish rendezvous.json.

        `largest`: bytes of a message to the head (see `limits.to_head`).
        Errors: TransportError (keys, address), Superseded when a newer head has published.
        """
        keys = load_secrets(paths)
        self.generation = generation
        self.num_undecodable = 0
        self._rare_log = RateLimitedLog()
        self._wake = Wake()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_secretkey = keys.head.secret.encode()
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"hpc_es")
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects takes its identity with it
        self._router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._router.setsockopt(zmq.MAXMSGSIZE, largest)  # before the handshake, too
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.setsockopt(zmq.BACKLOG, BACKLOG)
        self._router.setsockopt(zmq.RCVHWM, UNREAD)
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        workers_key = z85.decode(keys.workers.public)
        self.guard = HandshakeGuard(self._context, self._router, workers_key, max_unauthenticated(largest, num_files))
        self._poller = zmq.Poller()
        for source in (self._router, self._wake):
            self._poller.register(source, zmq.POLLIN)
        try:
            self.host, self.port = host, _bind(self._router, host)
            here = Rendezvous(run_id, generation, host, self.port, os.getpid(), os.uname().nodename)
            publish(paths.rendezvous, here)
        except BaseException:
            self.close()
            raise

    def receive(self, timeout_s: float) -> list[tuple[bytes, Envelope]]:
        """(peer, envelope) of what is there, at most 256; waits for the first, for a wake, or for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            ready = dict(self._poller.poll(milliseconds(remaining_s)))
            received = self._drain() if self._router in ready else []
            if received or not remaining_s:
                return received
            if self._wake.fileno() in ready:
                self._wake.clear()
                return received

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Errors: TransportError when it is larger than what a worker takes."""
        self._transmit(peer, [self._encode(message)])

    def send_all(self, letters: Mapping[str, Sequence[AnyMessage]]) -> None:
        """What each peer is told, in one piece: that costs both ends less than one message after the other.

        A message that several peers are sent is encoded once. Errors: as in `send`.
        """
        encoded: dict[int, bytes] = {}
        for peer, messages in letters.items():
            for message in messages:
                if id(message) not in encoded:
                    encoded[id(message)] = self._encode(message)
            self._transmit(peer.encode(), [encoded[id(message)] for message in messages])

    def _encode(self, message: AnyMessage) -> bytes:
        return limits.check(encode(self.generation, message), limits.TO_WORKER, message)

    def _transmit(self, peer: bytes, frames: list[bytes]) -> None:
        """To the peer, every frame is a message of its own."""
        with suppress(zmq.Again):
            for frame in (peer, *frames[:-1]):
                self._router.send(frame, _MORE)
            self._router.send(frames[-1], _LAST)

    def wake(self) -> None:
        """Make a receive that waits in another thread, or the next one, return."""
        self._wake.set()

    def close(self) -> None:
        """Send what was handed over, for five seconds at most."""
        self.guard.close()
        self._router.close(HEAD_FAREWELL_MS)
        self._context.term()
        self._wake.close()

    def _drain(self) -> list[tuple[bytes, Envelope]]:
        received = []
        with suppress(zmq.Again):
            for _ in range(MAX_BATCH):
                peer, *frames = self._receive()
                envelope = self._understand(peer, frames)
                if envelope is None:
                    continue
                if isinstance(envelope.message, Heartbeat):
                    self.send(peer, envelope.message)  # the echo tells the worker that this loop is alive
                received.append((peer, envelope))
        return received

    def _receive(self) -> list[bytes]:
        """The next message; the connection that it came over has shown the key. Errors: zmq.Again."""
        if not self.guard.num_unauthenticated:
            return self._router.recv_multipart(zmq.NOBLOCK)
        frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)  # only these say where they came from
        self.guard.mark_authenticated(frames[-1].get(zmq.SRCFD))
        return [frame.bytes for frame in frames]

    def _understand(self, peer: bytes, frames: list[bytes]) -> Envelope | None:
        try:
            envelope = decode(b"".join(frames))
        except TransportError as error:
            self.num_undecodable += 1
            self._rare_log.warning("a message was dropped", error)
            # Or its sender would send it again for ever: it is another program than this head's.
            self.send(peer, Refused(f"{error}; install the same hpc_es everywhere"))
            return None
        meant_for_us = envelope.generation in (0, self.generation) or isinstance(envelope.message, Hello)
        return envelope if meant_for_us else None


class _Pending(msgspec.Struct):
    """A report on its way, with its ages as stamps of the monotonic clock."""

    report: Report
    started_at: float
    finished_at: float
    sent_at: float = 0.0


class HeadClient:
    """A worker's end: a thread that finds the head, follows it, and keeps talking while the worker is busy.

    At every connection, to a new head or again to the same, `make_hello(generation)` is sent first and unacknowledged
    reports follow. While no head is connected, other messages are dropped: the Hello says where the worker stands.
    Callbacks run on the client's thread and must be quick: from asyncio, `loop.call_soon_threadsafe(queue.put_nowait)`.
    """

    def __init__(
        self,
        paths: RunPaths,
        identity: str,
        *,
        heartbeat_s: float,
        head_timeout_s: float,
        make_hello: Callable[[int], Hello],
        make_heartbeat: Callable[[], Heartbeat],
        on_message: Callable[[AnyMessage], None],
        on_lost: Callable[[TransportError], None],
        largest: int = limits.TO_HEAD,
    ):
        """`on_lost` is called once: with HeadSilent when no head was heard for `head_timeout_s` (see `wait_again`),
        with another TransportError when it refused our key. `largest`: bytes of a message that the head takes.

        Errors: TransportError (keys).
        """
        self.generation = 0
        """The highest that was seen; 0: none yet."""
        self._paths = paths
        self._identity = identity.encode()
        self._keys = load_secrets(paths)
        self._heartbeat_s, self._head_timeout_s = heartbeat_s, head_timeout_s
        self._make_hello, self._make_heartbeat = make_hello, make_heartbeat
        self._on_message, self._on_lost = on_message, on_lost
        self._largest = largest
        self._rare_log = RateLimitedLog()
        self._outbox: deque[AnyMessage] = deque()
        self._pending: dict[EvalId, _Pending] = {}
        self._changed = threading.Condition()  # guards _pending
        self._closing = threading.Event()
        self._lost = False
        self._connection: Connection | None = None
        self._heard_at = self._waits_since = time.monotonic()
        self._wake = Wake()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="head-client", daemon=True)
        self._thread.start()

    def send(self, message: AnyMessage) -> None:
        """From any thread; never blocks. Errors: TransportError when it is larger than what the head takes."""
        limits.check(encode(self.generation, message), self._largest, message)
        if isinstance(message, Report):
            now = time.monotonic()
            pending = _Pending(message, now - message.started_age, now - message.finished_age)
            with self._changed:
                self._pending[message.result.eval_id] = pending
        self._outbox.append(message)
        self._wake.set()

    @property
    def silence_s(self) -> float:
        """How long ago the head was last heard."""
        return time.monotonic() - self._heard_at

    def wait_again(self) -> None:
        """Wait for another `head_timeout_s` after the head was lost by its silence; then `on_lost` is called again."""
        self._waits_since = time.monotonic()
        self._lost = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until every report is acknowledged. False when some are not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """Send what was handed over, for a second at most, and end the thread. No callback comes afterwards."""
        self._closing.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    # --- on the client's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.monotonic()
        try:
            while not self._closing.is_set():
                if time.monotonic() >= next_beat:
                    self._beat()
                    is_ready = self._connection is not None and self._connection.is_ready
                    next_beat = time.monotonic() + (
                        self._heartbeat_s if is_ready else min(LOOKOUT_S, self._heartbeat_s)
                    )
                self._exchange(max(0.0, next_beat - time.monotonic()))
            self._empty_outbox()
        except Exception as error:
            log.exception("the thread that talks to the head ends")
            self._lose(TransportError(f"the thread that talks to the head failed: {error!r}"))
        finally:
            if self._connection is not None:
                self._connection.close(FAREWELL_MS if self._connection.is_ready else 0)
            self._context.term()
            self._wake.close()

    def _beat(self) -> None:
        """Look for a newer head, say that we live, resend what waits for its acknowledgement, notice silence."""
        self._follow()
        now = time.monotonic()
        if self._connection is not None and self._connection.is_ready:
            self._transmit(self._make_heartbeat())
            self._send_reports(sent_before=now - self._heartbeat_s)
        if now - max(self._heard_at, self._waits_since) > self._head_timeout_s:
            root = self._paths.root
            where = self._connection.trouble if self._connection else f"{self._paths.rendezvous} does not exist"
            self._lose(
                HeadSilent(
                    f"no head was heard for {now - self._heard_at:.0f} s (transport.head_timeout): {where}. If no head "
                    f"runs, start it again (`hpc-es submit {root}`, or `hpc-es run {root}` without Slurm); if one "
                    f"runs, this node cannot reach it: a firewall is between them, or transport.interface must differ"
                )
            )

    def _follow(self) -> None:
        try:
            there = read_rendezvous(self._paths.rendezvous)
        except OSError as error:  # a stale NFS handle while the file is being replaced; the next look will do
            log.warning("rendezvous.json cannot be read: %s", error)
            return
        if there is None or there.generation < self.generation:
            return
        connection = self._connection
        if connection is not None and connection.to == there and not connection.is_over:
            return
        if connection is not None:
            connection.close()
        log.info("connecting to the head of generation %d at %s", there.generation, with_port(there.host, there.port))
        self.generation = there.generation
        self._connection = Connection(self._context, there, self._keys, self._identity)

    def _exchange(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        connection = self._connection
        if connection is not None:
            poller.register(connection.socket, zmq.POLLIN)
            poller.register(connection.monitor, zmq.POLLIN)
        poller.poll(milliseconds(timeout_s))
        self._wake.clear()
        if connection is not None:
            if connection.watch():
                self._transmit(self._make_hello(self.generation))
                self._send_reports(sent_before=time.monotonic())
            if connection.is_refused:
                self._lose(TransportError(f"{connection.trouble} ({self._paths.secrets})"))
            for data in connection.receive():
                self._deliver(data)
        self._empty_outbox()

    def _deliver(self, data: bytes) -> None:
        try:
            envelope = decode(data)
        except TransportError as error:
            self._rare_log.warning("a message of the head was dropped", error)
            return
        if envelope.generation < self.generation:
            return
        self.generation = envelope.generation
        self._heard_at = time.monotonic()
        message = envelope.message
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Ack):
            with self._changed:
                self._pending.pop(message.eval_id, None)
                self._changed.notify_all()
        self._on_message(message)

    def _empty_outbox(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Report):
                self._send_reports(sent_before=0.0)
            else:
                self._transmit(message)

    def _send_reports(self, sent_before: float) -> None:
        """Send those that wait for an acknowledgement and were last sent before this time (0: never yet)."""
        if self._connection is None or not self._connection.is_ready:
            return
        now = time.monotonic()
        with self._changed:
            due = [pending for pending in self._pending.values() if pending.sent_at <= sent_before]
        for pending in due:
            pending.sent_at = now
            self._transmit(
                msgspec.structs.replace(
                    pending.report, started_age=now - pending.started_at, finished_age=now - pending.finished_at
                )
            )

    def _transmit(self, message: AnyMessage) -> None:
        if self._connection is not None and self._connection.is_ready:
            if isinstance(message, Hello):
                message = self._with_unacknowledged(message)
            self._connection.send(encode(self.generation, message))

    def _with_unacknowledged(self, hello: Hello) -> Hello:
        """A new head hears this before the report, and would else hand out at once what has been done."""
        with self._changed:
            reported = next(reversed(self._pending), None)
        return msgspec.structs.replace(hello, holding=hello.holding or reported)

    def _lose(self, error: TransportError) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(error)


def _bind(router: "zmq.Socket[bytes]", host: str) -> int:
    """Bind a port that the system chooses, and return it."""
    router.setsockopt(zmq.IPV6, family(host) == socket.AF_INET6)
    try:
        router.bind(f"tcp://{with_port(host, '*')}")
    except zmq.ZMQError as error:
        raise TransportError(
            f"the head cannot listen on {host} ({error}); set transport.host or transport.interface to an address of "
            f"this machine"
        ) from error
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
