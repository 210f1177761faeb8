"""Strangers who reach the head's port can take neither much memory nor a worker's place."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import pytest
from control_peers import EVAL_ID, PATIENCE_S, Worker, hear, raw_dealer, serving, wait_until, working
from repository import SUPPORT

from hpc_es import bounds
from hpc_es.errors import TransportError
from hpc_es.paths import RunPaths
from hpc_es.quoting import MAX_MESSAGE
from hpc_es.records import Episode, EvalId, Result
from hpc_es.transport import handshakes, limits
from hpc_es.transport import messages as m
from hpc_es.transport.rendezvous import Rendezvous, read_rendezvous
from hpc_es.transport.secrets import create_secrets, load_secrets

MIB = 2**20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""A greeting of ZMTP 3.1, which needs no key."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    create_secrets(paths)
    return paths


@dataclass
class Stranger:
    """A stranger who opens connections to a head and announces a frame on each, without a key."""

    port: int
    address: str = "127.0.0.1"
    connections: list[socket.socket] = field(default_factory=list)

    def knock(self, frame_bytes: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), 5, source_address=(self.address, 0))
        self.connections.append(connection)
        with suppress(OSError):
            connection.sendall(GREETING + b"\x06" + frame_bytes.to_bytes(8, "big"))
        return connection

    def pour(self, frame_bytes: int, seconds: float) -> None:
        """Send all of the frame but its last byte, as far as the head takes it."""
        connection = self.knock(frame_bytes)
        connection.settimeout(seconds)
        with suppress(OSError):
            connection.sendall(bytes(frame_bytes - 1))

    def num_open(self) -> int:
        return sum(map(is_open, self.connections))

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while data := connection.recv(4096):
            del data
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@contextmanager
def head_process(paths: RunPaths, largest: int, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, str(SUPPORT / "flood_head.py"), str(paths.root), str(largest)]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            wait_until(lambda: paths.rendezvous.exists(), 30)
            yield process
        finally:
            process.kill()


def peak_mib(pid: int) -> float:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def report(worker: Worker, slot: int) -> None:
    result = Result(EvalId(1, slot), 0.5, (), 0, 0.1, 0.1, 0.1)
    worker.client.send(m.Report("w", result, 1.0, 0.0))


def test_a_flood_takes_bounded_memory_and_few_lines_and_workers_join_and_report(
    paths: RunPaths, tmp_path: Path
) -> None:
    log = tmp_path / "head.log"
    with head_process(paths, MIB, log) as head, working(paths, name="early", holding=None) as early:
        report(early, 0)
        assert early.client.flush(PATIENCE_S)
        there = read_rendezvous(paths.rendezvous)
        assert there is not None
        before = peak_mib(head.pid)
        with closing(Stranger(there.port)) as stranger:
            for _ in range(250):
                stranger.pour(MIB, seconds=2.0)
            with working(paths, name="late", holding=None) as late:
                for _ in range(250):
                    stranger.pour(MIB, seconds=2.0)
                report(early, 1)
                report(late, 2)
                assert early.client.flush(PATIENCE_S)
                assert late.client.flush(PATIENCE_S)
            wait_until(lambda: stranger.num_open() <= handshakes.max_unauthenticated(MIB, 10**6))
        most = 2 * handshakes.UNAUTHENTICATED_BYTES / MIB
        assert peak_mib(head.pid) - before < most, "500 MiB were poured in"
        assert len(log.read_text().splitlines()) <= 2


@pytest.mark.parametrize("frame_bytes", [3 * 2**30, limits.TO_HEAD + 1])
def test_an_announcement_of_too_much_ends_the_connection_at_once(paths: RunPaths, frame_bytes: int) -> None:
    with serving(paths) as server, closing(Stranger(server.port)) as stranger:
        connection = stranger.knock(frame_bytes)
        wait_until(lambda: not is_open(connection))


def test_a_crowd_from_one_address_pushes_out_its_own_only(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "MAX_UNAUTHENTICATED", 20)
    with (
        serving(paths) as server,
        closing(Stranger(server.port, "127.0.0.2")) as few,
        closing(Stranger(server.port, "127.0.0.3")) as crowd,
    ):
        for _ in range(3):
            few.knock(100)
        for _ in range(60):
            crowd.knock(100)
        wait_until(lambda: crowd.num_open() == 17)
        assert few.num_open() == 3
        assert not is_open(crowd.connections[0])
        assert is_open(crowd.connections[-1])
        assert server.guard.num_unauthenticated == 20


def test_a_connection_with_a_message_under_the_key_is_not_counted_any_more(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_UNAUTHENTICATED", 16)
    keys = load_secrets(paths)
    with serving(paths) as server, closing(Stranger(server.port)) as stranger:
        with raw_dealer(server, keys) as dealer:
            dealer.send(m.encode(0, m.Fetch("w", 1, 1)))
            hear(server, m.Fetch)
            assert server.guard.num_unauthenticated == 0
            for _ in range(40):
                stranger.knock(100)
            wait_until(lambda: stranger.num_open() == 16)
            dealer.send(m.encode(0, m.Fetch("w", 2, 2)))
            assert hear(server, m.Fetch) == m.Fetch("w", 2, 2)
        stranger.close()
        wait_until(lambda: server.guard.num_unauthenticated == 0)


def test_a_stalled_handshake_is_ended(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_es.transport.control.HANDSHAKE_MS", 200)
    with serving(paths) as server, closing(Stranger(server.port)) as stranger:
        connection = stranger.knock(100)
        assert is_open(connection)
        wait_until(lambda: not is_open(connection), 30)


def test_refusals_are_one_line_with_a_count(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log_lines = handshakes.RateLimitedLog()
    for number in range(1000):
        log_lines.warning("refused", f"number {number}")
        log_lines.warning("dropped", f"number {number}")
    assert [record.getMessage() for record in caplog.records] == ["refused: number 0", "dropped: number 0"]
    monkeypatch.setattr(handshakes, "LOG_INTERVAL_S", 0.0)
    log_lines.warning("refused")
    assert caplog.records[-1].getMessage() == "refused (999 more since the last warning)"


@pytest.mark.parametrize(
    ("largest", "num_files", "most"), [(2**16, 10**6, 1024), (2**20, 10**6, 64), (2**30, 10**6, 16), (2**16, 1024, 256)]
)
def test_how_many_may_wait_follows_from_what_each_may_hold_and_from_the_files(
    largest: int, num_files: int, most: int
) -> None:
    assert handshakes.max_unauthenticated(largest, num_files) == most


# --- our own messages fit -----------------------------------------------------------------------------------------


def test_the_longest_episode_is_what_the_limit_counts_on() -> None:
    longest = Episode(2**63, -1.5, False, 2**63, 2**63, 2**63, 2**63, 1.5, 1.5, "terminated", 2**63)
    one, two = (
        len(m.encode(1, m.Report("w", Result(EVAL_ID, 0.5, (longest,) * n, 0, 0.1, 0.1, 0.1), 1.0, 1.0)))
        for n in (1, 2)
    )
    assert two - one <= limits.EPISODE_BYTES


def longest(hint: Any) -> Any:
    """The value of a type that takes most bytes and keeps its rule; of several episodes, one."""
    match bounds.shape(hint):
        case "ruled", bounds.Between(most=most):
            return get_args(hint)[0](most)
        case "ruled", bounds.OneOf(words=words):
            return max(words, key=len)
        case "ruled", bounds.Name(most=most):
            return "\N{CLOWN FACE}" * most
        case "ruled", bounds.Facts(most=most, name=name, most_characters=length):
            return {f"{n:03}{longest(Annotated[str, name])[3:]}": "\N{CLOWN FACE}" * length for n in range(most)}
        case "ruled", bounds.Verbatim(most=most):
            return "\N{CLOWN FACE}" * most
        case "ruled", bounds.Hexadecimal(digits=digits):
            return "f" * digits
        case "ruled", bounds.Text():
            return "\N{CLOWN FACE}" * MAX_MESSAGE
        case "optional", inner:
            return longest(inner)
        case "many", inner:
            return (longest(inner),)
        case "struct", kind:
            return kind(**{name: longest(each) for name, each in get_type_hints(kind, include_extras=True).items()})
    return max(get_args(hint), key=len, default=True if hint is bool else 0.1)


FROM_WORKERS = [kind for kind in get_args(m.AnyMessage) if "worker" in kind.__struct_fields__]


@pytest.mark.parametrize("kind", FROM_WORKERS, ids=lambda kind: kind.__name__)
def test_the_longest_message_that_keeps_its_rules_fits_the_smallest_limit(kind: type) -> None:
    message = longest(kind)
    assert bounds.fault(message) is None
    assert len(m.encode(2**31, message)) <= limits.HEADROOM + limits.EPISODE_BYTES


def test_a_message_that_the_head_would_not_take_is_an_error_at_its_sender(paths: RunPaths) -> None:
    episodes = (Episode(7, 0.5, False, 3, 1, 90, 12, 0.8, 0.1, "terminated"),) * 5000
    with working(paths, holding=None) as worker:
        with pytest.raises(
            TransportError, match=r"a Report of [0-9,]+ bytes cannot be sent: .* accepts at most 335,872"
        ):
            worker.client.send(m.Report("w", Result(EVAL_ID, 0.5, episodes, 0, 0.1, 0.1, 0.1), 1.0, 0.0))
        assert worker.client.flush(0)


def test_a_message_that_a_worker_would_not_take_is_an_error_at_the_head(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TO_WORKER", 1000)
    with serving(paths) as server:
        with pytest.raises(TransportError, match=r"a Leave of [0-9,]+ bytes cannot be sent"):
            server.send(b"w", m.Leave("x" * 1000, False))
        with pytest.raises(TransportError, match=r"a Leave of [0-9,]+ bytes cannot be sent"):
            server.send_all({"w": [m.Leave("x" * 1000, False)]})


def test_a_hostile_endpoint_takes_no_memory_of_a_worker(paths: RunPaths) -> None:
    """It cannot show the head's key, so it can only announce."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Rendezvous("run", 1, "127.0.0.1", listener.getsockname()[1], 1, "node1")
        paths.rendezvous.write_bytes(msgspec.json.encode(here))
        with working(paths, holding=None):
            connection, _ = listener.accept()
            connection.settimeout(5)
            with connection:
                connection.sendall(GREETING + b"\x06" + (3 * 2**30).to_bytes(8, "big"))
                deadline = time.monotonic() + PATIENCE_S
                while is_open(connection):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
