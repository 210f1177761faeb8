"""Bytes on the wire per worker: a commit, whose cost does not depend on the model's size, and all other messages.

    python tools/bench/wire.py [--workers 3] [--commits 20] [--population 30] [--tasks 16] [--json]

A head and its workers, each in a process of its own, over loopback, with the real sockets: ZeroMQ under CURVE, the
torch store, Gloo. The kernel's TCP counts the bytes of all sockets of a worker (TCP_INFO: payload received, and sent
and acknowledged), so frames, nonces and authentication codes, acknowledgements of Gloo and the store's messages are
included. Headers of TCP and IP are not: the rows with headers add 66 bytes (Ethernet, IP, TCP with timestamps) for each
of the segments that the kernel counted, which here are those of loopback.

"commit": announcement and update record of `--population` members, by broadcast in an epoch or on the control plane,
for three kinds of populations. Bytes that a worker passes on to others in the broadcast's tree count at both of them.
Not counted: ZeroMQ's own pings every five seconds, and at a join the short exchange with the torch store.
"""

import multiprocessing
import os
import random
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from harness import Row, arguments, show

from hpc_es.config.schema import TransportConfig
from hpc_es.head.crew import Crew
from hpc_es.head.instructions import Broadcast, Instruction, OpenGroup, Send
from hpc_es.head.plane import Plane
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Candidate, Commit, Consumed, Episode, EvalId, Member, Result, Seeds, Term
from hpc_es.transport import messages as m
from hpc_es.transport.backends import Offer
from hpc_es.transport.collective import EpochEvent, HeadCollective, WorkerCollective
from hpc_es.transport.control import HeadClient, HeadServer
from hpc_es.transport.secrets import create_secrets

HOST, TIMEOUT_S, SETTLE_S = "127.0.0.1", 20.0, 0.2
GOAL = 1500
HEADERS = 66
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "hpc_es.transport.collective"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--population", type=int, default=30, help="members per commit, N")
    parser.add_argument("--tasks", type=int, default=16, help="episodes per result, T")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wire = Wire(RunPaths(Path(scratch)), options.workers)
        try:
            joining = wire.spent(wire.open_epoch, 1)
            rows = commit_rows(wire, "by broadcast", options.population, options.commits)
            wire.end_epoch()
            rows += commit_rows(wire, "on the control plane", options.population, options.commits)
            rows += other_rows(wire, options.tasks)
            rows.append(Row("joining an epoch, Gloo's connections", "bytes", joining.received + joining.sent))
        finally:
            wire.close()
    show("wire", rows, as_json=options.json)


def commit_rows(wire: "Wire", where: str, population: int, num_commits: int) -> list[Row]:
    kinds: dict[str, dict[str, Any]] = {"": {}, ", mirrored": {"mirrored": True}, ", 4 subspaces": {"subspaces": 4}}
    rows = []
    for kind, how in kinds.items():
        commits = [commit(number, population, **how) for number in range(1, num_commits + 1)]
        spent = wire.spent(partial(wire.commit_all, commits), num_commits)
        what = f"commit of N={population}{kind}, {where}"
        note = f"received {spent.received:.0f}, sent {spent.sent:.0f}, record {len(m.encode_commit(commits[0]))}"
        rows.append(Row(what, "bytes", spent.received + spent.sent, goal=GOAL, note=note))
        rows.append(Row(f"  with headers of {spent.segments:.1f} segments", "bytes", spent.with_headers))
    return rows


def other_rows(wire: "Wire", num_tasks: int) -> list[Row]:
    """Bytes of one message of each kind, as the mean of ten."""
    episodes = tuple(Episode(task, 0.5, False, 3, 0, 120, 48, 1.25, 0.003, "terminated") for task in range(num_tasks))
    eval_id = EvalId(100, 7)
    report = m.Report("local-0.0123abcd", Result(eval_id, 0.5, episodes, 2**63, 1.5, 0.25, 30.5), 32.0, 0.0)
    member = Member(2**63 + 1, 1, 1e-3)
    work = m.Work(Assignment(eval_id, 101, Candidate(100, member), tuple(range(num_tasks)), 2**63))
    to_worker = {
        f"assignment of T={num_tasks}": work,
        "acknowledgement": m.Ack(eval_id),
        "heartbeat, its echo": m.Heartbeat("w"),
    }
    to_head = {f"report of T={num_tasks}": report, "Hello": hello("local-0.0123abcd"), "heartbeat": m.Heartbeat("w")}
    times = 10
    rows = []
    for what, message in to_worker.items():
        spent = wire.spent(partial(wire.tell_all, message, times), times)
        rows.append(Row(what, "bytes", spent.received + spent.sent))
    for what, message in to_head.items():
        spent = wire.spent(partial(wire.say_all, message, times), times)
        rows.append(Row(what, "bytes", spent.received + spent.sent))
    beats = 60 / TransportConfig().heartbeat
    rows.append(Row("heartbeats and echoes, a minute", "bytes", beats * (rows[-1].ours + rows[2].ours)))
    return rows


@dataclass(frozen=True)
class Spent:
    """Mean of bytes and segments over the workers."""

    received: float
    sent: float
    segments: float

    @property
    def with_headers(self) -> float:
        return self.received + self.sent + HEADERS * self.segments


class Wire:
    """The head, in this process, and its workers."""

    def __init__(self, paths: RunPaths, num_workers: int) -> None:
        create_secrets(paths)
        self.server = HeadServer(paths, 1, "wire", HOST)
        self.events: SimpleQueue[EpochEvent] = SimpleQueue()
        self.collective = HeadCollective(HOST, TIMEOUT_S, self.events.put)
        self.crew = Crew()
        self.plane = Plane(TransportConfig(), self.crew, Offer("gloo"), lambda level, what, detail: None)
        self.pipes: dict[str, Connection] = {}
        for number in range(num_workers):
            name = f"local-{number}.0123abcd"
            self.pipes[name], theirs = PROCESSES.Pipe()
            PROCESSES.Process(target=serve, args=(theirs, paths, name), daemon=True).start()
        self._hear(lambda message: isinstance(message, m.Hello), num_workers)
        for name in self.pipes:
            self.crew.join(hello(name), 0.0)

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.send(("end", None))
        self.collective.close()
        self.server.close()

    def spent(self, work: Callable[[], None], times: int) -> Spent:
        """Bytes and segments per repetition, if `work` does the same thing `times` times."""
        before = self._counts()
        work()
        after = self._counts()
        means = [
            statistics.mean(b - a for a, b in zip(*pair, strict=True)) / times
            for pair in zip(before, after, strict=True)
        ]
        return Spent(*means)

    def open_epoch(self) -> None:
        (opened,) = self.plane.change_epoch()
        assert isinstance(opened, OpenGroup)
        for name, call in self.collective.open(opened.epoch, opened.workers, opened.backend).items():
            self.server.send(name.encode(), call)
        self._hear(lambda message: isinstance(message, m.EpochReady) and message.ok, len(self.pipes))
        self.plane.group_up(self.events.get(timeout=TIMEOUT_S).epoch)

    def end_epoch(self) -> None:
        self.plane.epoch = None

    def commit_all(self, commits: list[Commit]) -> None:
        for commit in commits:
            for instruction in self.plane.announce(commit):
                self._perform(instruction)
        for pipe in self.pipes.values():
            assert ask(pipe, "versions", len(commits)) == [commit.version for commit in commits]

    def tell_all(self, message: Any, times: int) -> None:
        for name in self.pipes:
            for _ in range(times):
                self.server.send(name.encode(), message)

    def say_all(self, message: Any, times: int) -> None:
        for pipe in self.pipes.values():
            ask(pipe, "say", (message, times))
        if not isinstance(message, m.Heartbeat):
            self._hear(lambda heard: isinstance(heard, type(message)), times * len(self.pipes))

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Send(worker=worker, message=message):
                self.server.send(worker.encode(), message)
            case Broadcast(epoch=epoch, data=data):
                self.collective.broadcast(epoch, data)

    def _hear(self, wanted: Callable[[Any], bool], count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while count > 0:
            assert time.monotonic() < deadline, "a worker is silent"
            count -= sum(wanted(envelope.message) for _, envelope in self.server.receive(0.1))

    def _counts(self) -> list[tuple[int, ...]]:
        time.sleep(SETTLE_S)
        return list(zip(*(ask(pipe, "count", None) for pipe in self.pipes.values()), strict=True))


def ask(pipe: Connection, what: str, argument: Any) -> Any:
    pipe.send((what, argument))
    assert pipe.poll(TIMEOUT_S), "a worker does not answer"
    return pipe.recv()


# --- a worker ----------------------------------------------------------------------------------------------------


def serve(pipe: Connection, paths: RunPaths, name: str) -> None:
    """Listen to the head as a real worker does, and answer the benchmark."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    client = HeadClient(
        paths,
        name,
        heartbeat_s=3600.0,  # heartbeats are counted separately
        head_timeout_s=3600.0,
        make_hello=lambda generation: hello(name),
        make_heartbeat=lambda: m.Heartbeat(name),
        on_message=inbox.put,
        on_lost=inbox.put,
    )
    versions: SimpleQueue[int] = SimpleQueue()
    Thread(target=listen, args=(name, client, inbox, versions), daemon=True).start()
    while True:
        what, argument = pipe.recv()
        if what == "count":
            pipe.send(tcp_counts())
        elif what == "say":
            message, times = argument
            for _ in range(times):
                client._transmit(message)  # a report that goes through send() is resent until it is acknowledged
            pipe.send(None)
        elif what == "versions":
            pipe.send([versions.get() for _ in range(argument)])
        else:
            client.close()
            os._exit(0)


def listen(name: str, client: HeadClient, inbox: "SimpleQueue[Any]", versions: "SimpleQueue[int]") -> None:
    collective = WorkerCollective(TIMEOUT_S)
    while True:
        message = inbox.get()
        if isinstance(message, m.OpenEpoch):
            collective.join(message)
            client.send(m.EpochReady(name, message.epoch, True))
        elif isinstance(message, m.Announce):
            data = message.record or collective.receive(message.epoch, message.length)
            versions.put(m.decode_commit(data).version)


def tcp_counts() -> tuple[int, int, int]:
    """Bytes received, bytes sent and acknowledged, and segments of all TCP sockets of this process, Gloo's included."""
    received = sent = segments = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144)
                acked, took, out, into = struct.unpack_from("<QQII", info, 120)
                received, sent, segments = received + took, sent + acked, segments + out + into
    return received, sent, segments


# --- messages ----------------------------------------------------------------------------------------------------


def hello(name: str) -> m.Hello:
    facts = {
        "engine": "vllm",
        "vllm": "0.32.0",
        "torch": "2.13.0+cu130",
        "transformers": "4.57.1",
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "tensor_parallel": "1",
        "hpc_es": "0.1.0",
        "config": "0123456789abcdef",
        "noise table": "546c8cb1",
    }
    gpu = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    return m.Hello(name, "local-0", "node0", 12345, 2**63, facts, collective="gloo", gpu=gpu)


def commit(version: int, population: int, *, mirrored: bool = False, subspaces: int = 1) -> Commit:
    rng = random.Random(version)
    seeds = [rng.getrandbits(64) for _ in range(population)]
    partition_seed = rng.getrandbits(64) if subspaces > 1 else 0
    terms = tuple(
        Term(
            seeds[slot // 2] if mirrored else seeds[slot],
            1 - 2 * (slot % 2) if mirrored else 1,
            1e-3,
            slot % subspaces,
            rng.gauss(0, 1),
            float(np.float32(rng.gauss(0, 1e-5))),
            partition_seed,
        )
        for slot in range(population)
    )
    consumed = tuple(Consumed(EvalId(1000 + version, slot), rng.random()) for slot in range(population))
    return Commit(1001 + version, consumed, Seeds(5e-4, terms, subspaces, partition_seed))


if __name__ == "__main__":
    main()
