"""Heads, workers, unauthenticated peers and broken connections for tests of the control plane."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from hpc_es.errors import TransportError
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId
from hpc_es.transport import messages as m
from hpc_es.transport.control import HeadClient, HeadServer
from hpc_es.transport.secrets import Secrets, create_secrets

HOST = "127.0.0.1"
PATIENCE_S = 60.0
BEAT_S = 0.05

EVAL_ID = EvalId(3, 1, 2)
HELLO = m.Hello("w", "0", "node1", 4, 2**63, {"torch": "2"}, holding=EVAL_ID, collective="gloo")


@contextmanager
def serving(paths: RunPaths, generation: int = 1, host: str = HOST) -> Iterator[HeadServer]:
    server = HeadServer(paths, generation, "run", host)
    try:
        yield server
    finally:
        server.close()


class Worker:
    """A HeadClient and the messages that it received."""

    def __init__(
        self, paths: RunPaths, name: str = "w", head_timeout_s: float = 60.0, holding: EvalId | None = EVAL_ID
    ):
        self.told: list[Any] = []
        self.lost: list[TransportError] = []
        self.client = HeadClient(
            paths,
            name,
            heartbeat_s=BEAT_S,
            head_timeout_s=head_timeout_s,
            make_hello=lambda generation: msgspec.structs.replace(HELLO, worker=name, pid=generation, holding=holding),
            make_heartbeat=lambda: m.Heartbeat(name),
            on_message=self.told.append,
            on_lost=self.lost.append,
        )

    def fail(self, message: m.AnyMessage) -> None:
        raise RuntimeError("a fault in the callback")


@contextmanager
def working(paths: RunPaths, **options: Any) -> Iterator[Worker]:
    worker = Worker(paths, **options)
    try:
        yield worker
    finally:
        worker.client.close()


def pump(server: HeadServer, until: Callable[[list[Any]], bool]) -> list[Any]:
    """Messages that the head receives, without heartbeats, until `until` holds."""
    heard: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while not until(heard):
        assert time.monotonic() < deadline, f"the head only heard {heard}"
        received = server.receive(0.02)
        heard += [envelope.message for _, envelope in received if not isinstance(envelope.message, m.Heartbeat)]
    return heard


def hear(server: HeadServer, kind: type[Any]) -> Any:
    return pump(server, lambda heard: any(isinstance(message, kind) for message in heard))[-1]


def hear_only_heartbeats(server: HeadServer) -> None:
    time.sleep(2 * BEAT_S)
    while server.receive(0):
        pass  # drop messages that were sent earlier
    deadline = time.monotonic() + 8 * BEAT_S
    while time.monotonic() < deadline:
        assert all(isinstance(envelope.message, m.Heartbeat) for _, envelope in server.receive(BEAT_S))


def hear_nothing(server: HeadServer, seconds: float = 0.3) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.receive(0.05) == []


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@contextmanager
def raw_dealer(server: HeadServer, keys: Secrets | None, identity: bytes = b"raw") -> "Iterator[zmq.Socket[bytes]]":
    """A plain DEALER socket that does not follow our protocol; without keys it does not use CURVE."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.identity = identity
    if keys is not None:
        dealer.curve_serverkey = keys.head.public.encode()
        dealer.curve_publickey = keys.workers.public.encode()
        dealer.curve_secretkey = keys.workers.secret.encode()
    dealer.connect(f"tcp://{server.host}:{server.port}")
    try:
        yield dealer
    finally:
        dealer.close(0)
        context.term()


def stranger(tmp_path: Path, server_paths: RunPaths, *, knows_head: bool) -> RunPaths:
    """A run folder with keys of its own that points at the head of another run."""
    paths = RunPaths(tmp_path / "stranger")
    create_secrets(paths)
    paths.rendezvous.write_bytes(server_paths.rendezvous.read_bytes())
    if knows_head:
        (paths.secrets / "head.json").write_bytes((server_paths.secrets / "head.json").read_bytes())
    return paths


class Forwarder:
    """A TCP connection to the head that can be cut and restored."""

    def __init__(self, server: HeadServer):
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.head = (server.host, server.port)
        self.is_cut = False
        self.num_turned_away = 0
        self.ends: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if self.is_cut:
                    self.num_turned_away += 1
                    near.close()
                    continue
                far = socket.create_connection(self.head)
                self.ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    self.threads.append(threading.Thread(target=self._copy, args=(source, target)))
                    self.threads[-1].start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def mend(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        self.cut()
        for thread in self.threads[1:]:
            thread.join()
        for end in (self.listener, *self.ends):
            end.close()


@contextmanager
def forwarding(server: HeadServer) -> Iterator[Forwarder]:
    forwarder = Forwarder(server)
    try:
        yield forwarder
    finally:
        forwarder.close()
