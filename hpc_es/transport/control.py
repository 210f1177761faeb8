"""The control plane: small authenticated messages between one head and its workers.

The head has a ROUTER socket, each worker's front process a DEALER socket, both encrypted with CURVE. Invariants: the
head receives nothing from a peer without the workers' key; a worker obeys only the highest generation that it has seen;
a head ignores messages for another generation; a report is resent until it is acknowledged, and no other message is
ever sent twice.
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
"""Flags of a send as plain integers: pyzmq's send_multipart spends more time on its enums than on sending."""
WORKER_LINGER_MS, HEAD_LINGER_MS = 1_000, 5_000
"""How long a closing socket may take to send its queued messages; the head may have a thousand workers to tell."""
JOIN_S = 10.0
"""How long `close` waits for the client's thread."""
SEARCH_INTERVAL_S = 0.5
"""How often a worker without a connection looks for a head."""
RECEIVE_QUEUE = 100
"""Messages per worker that the head's socket queues while the head is busy; further ones wait at their sender."""
BACKLOG = 1024
"""Connections that may wait to be accepted: a whole array of workers starts at once."""


class HeadServer:
    """The head's side. One thread calls receive, send and close; any thread, or a signal handler, may call wake.

    Receiving never fails because of what a peer sent. Sending never blocks; messages to a disconnected peer are
    dropped. A peer is identified by the name of the worker's incarnation, in UTF-8.
    """

    def __init__(self, paths: RunPaths, generation: int, run_id: str, host: str, *, largest: int = limits.TO_HEAD):
        """Bind a free port on `host` (see `resolve_host`) and publish rendezvous.json.

        largest: maximum size in bytes of a message to the head (see `limits.to_head`).
        Errors: TransportError (keys, address); Superseded if a newer head has published.
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
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects keeps its identity
        self._router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._router.setsockopt(zmq.MAXMSGSIZE, largest)  # applies before the handshake, too
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.setsockopt(zmq.BACKLOG, BACKLOG)
        self._router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
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
        """Return received messages as (peer, envelope), at most MAX_BATCH.

        Waits until there is one, until `wake` is called, or for `timeout_s`.
        """
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
        """Send one message. Errors: TransportError if it is larger than a worker accepts."""
        self._transmit(peer, [self._encode(message)])

    def send_all(self, outgoing: Mapping[str, Sequence[AnyMessage]]) -> None:
        """Send all messages of each peer together, which costs both sides less than sending one after the other.

        A message to several peers is encoded once. Errors: as for `send`.
        """
        encoded: dict[int, bytes] = {}
        for peer, messages in outgoing.items():
            for message in messages:
                if id(message) not in encoded:
                    encoded[id(message)] = self._encode(message)
            self._transmit(peer.encode(), [encoded[id(message)] for message in messages])

    def _encode(self, message: AnyMessage) -> bytes:
        return limits.check(encode(self.generation, message), limits.TO_WORKER, message)

    def _transmit(self, peer: bytes, frames: list[bytes]) -> None:
        """Send frames in one multipart message; the peer's DEALER splits it, so each frame arrives as a message."""
        with suppress(zmq.Again):
            for frame in (peer, *frames[:-1]):
                self._router.send(frame, _MORE)
            self._router.send(frames[-1], _LAST)

    def wake(self) -> None:
        """Make the current `receive` in another thread return, or else the next one."""
        self._wake.set()

    def close(self) -> None:
        """Send all queued messages, for at most five seconds, and close the socket."""
        self.guard.close()
        self._router.close(HEAD_LINGER_MS)
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
                    self.send(peer, envelope.message)  # the reply tells the worker that this loop is alive
                received.append((peer, envelope))
        return received

    def _receive(self) -> list[bytes]:
        """Return the frames of the next message, and mark its connection as authenticated. Errors: zmq.Again."""
        if not self.guard.num_unauthenticated:
            return self._router.recv_multipart(zmq.NOBLOCK)
        frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)  # only uncopied frames have SRCFD
        self.guard.mark_authenticated(frames[-1].get(zmq.SRCFD))
        return [frame.bytes for frame in frames]

    def _understand(self, peer: bytes, frames: list[bytes]) -> Envelope | None:
        try:
            envelope = decode(b"".join(frames))
        except TransportError as error:
            self.num_undecodable += 1
            self._rare_log.warning("a message was dropped", error)
            # The sender runs another version of hpc_es, and would send the message again and again.
            self.send(peer, Refused(f"{error}; install the same hpc_es everywhere"))
            return None
        meant_for_us = envelope.generation in (0, self.generation) or isinstance(envelope.message, Hello)
        return envelope if meant_for_us else None


class _Pending(msgspec.Struct):
    """A report that is not acknowledged yet, with its ages converted to times of the monotonic clock."""

    report: Report
    started_at: float
    finished_at: float
    sent_at: float = 0.0


class HeadClient:
    """A worker's side: a thread that finds the head, follows it to a new address, and exchanges messages with it.

    On every connection, to a new head or again to the same one, it sends `make_hello(generation)` first and then all
    unacknowledged reports. While no head is connected, other messages are dropped: the Hello contains the worker's
    state. Callbacks run on the client's thread and must be fast; with asyncio, use
    `loop.call_soon_threadsafe(queue.put_nowait)`.
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
        """Start the thread.

        on_lost: called once, with HeadSilent if no message came from a head for `head_timeout_s` (see `wait_again`),
        with another TransportError if the head refused our key. largest: maximum size in bytes of a message to the
        head. Errors: TransportError (keys).
        """
        self.generation = 0
        """Highest generation seen so far; 0: none yet."""
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
        """Queue a message; thread-safe, never blocks. Errors: TransportError if it is larger than the head accepts."""
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
        """Seconds since the last message from the head."""
        return time.monotonic() - self._heard_at

    def wait_again(self) -> None:
        """Wait for another `head_timeout_s` after the head was lost by its silence; then `on_lost` is called again."""
        self._waits_since = time.monotonic()
        self._lost = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until every report is acknowledged; False if some are not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """Send all queued messages, for at most a second, and end the thread. No callback is called afterwards."""
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
                        self._heartbeat_s if is_ready else min(SEARCH_INTERVAL_S, self._heartbeat_s)
                    )
                self._exchange(max(0.0, next_beat - time.monotonic()))
            self._empty_outbox()
        except Exception as error:
            log.exception("the thread that communicates with the head failed")
            self._lose(TransportError(f"the thread that communicates with the head failed: {error!r}"))
        finally:
            if self._connection is not None:
                self._connection.close(WORKER_LINGER_MS if self._connection.is_ready else 0)
            self._context.term()
            self._wake.close()

    def _beat(self) -> None:
        """Look for a newer head, send a heartbeat, resend unacknowledged reports, and check the head's last message."""
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
                    f"no message from a head for {now - self._heard_at:.0f} s (transport.head_timeout): {where}. If no "
                    f"head runs, start it again (`hpc-es submit {root}`, or `hpc-es run {root}` without Slurm); if one "
                    "runs, this node cannot reach it: check for a firewall between them, or set another "
                    "transport.interface"
                )
            )

    def _follow(self) -> None:
        try:
            there = read_rendezvous(self._paths.rendezvous)
        except OSError as error:  # a stale NFS handle while the file is being replaced; tried again soon
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
            self._rare_log.warning("a message from the head was dropped", error)
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
        """Send the unacknowledged reports that were last sent before this time (0: those never sent)."""
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
        """Name the unacknowledged report in the Hello.

        A new head receives the Hello before the report. It would otherwise dispatch the finished evaluation again.
        """
        with self._changed:
            reported = next(reversed(self._pending), None)
        return msgspec.structs.replace(hello, holding=hello.holding or reported)

    def _lose(self, error: TransportError) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(error)


def _bind(router: "zmq.Socket[bytes]", host: str) -> int:
    """Bind to a free port that the system chooses, and return the port."""
    router.setsockopt(zmq.IPV6, family(host) == socket.AF_INET6)
    try:
        router.bind(f"tcp://{with_port(host, '*')}")
    except zmq.ZMQError as error:
        raise TransportError(
            f"the head cannot listen on {host} ({error}); set transport.host or transport.interface to an address of "
            f"this machine"
        ) from error
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
