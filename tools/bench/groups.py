"""Cost of a change of membership and of a broadcast by the number of members, over loopback and Gloo.

    python tools/bench/groups.py [--members 16 64 256 512] [--mesh 16 64] [--processes 8] [--files N] [--json]

This process is the head's end of the collective plane. Its members share `--processes` other processes, with a thread
each, and run the same code as real workers. "epoch change" is the second epoch: all leave the first, a new group is
made, and all join it. "first broadcast" opens the connections that it needs, "next broadcast" finds them open.
"sockets" are open files that the change and the broadcasts added, for the head and on average for each member. "control
plane" is the same record sent to as many connected workers in separate messages, until the last one has it. "usual" is
Gloo's default, in which every member connects to every other, for the sizes that `--mesh` names.

All members share this machine's cores, so seconds are an upper bound: in a cluster each has its own. `--files` limits
the open files of this process, the head, as `ulimit -n` does.
"""

import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import zmq
from harness import Row, arguments, show
from torch.distributed import ProcessGroupGloo

from hpc_es.paths import RunPaths
from hpc_es.transport import limits, sockets
from hpc_es.transport import messages as m
from hpc_es.transport.collective import EpochEvent, EpochUp, HeadCollective, WorkerCollective, sha256
from hpc_es.transport.control import HeadServer
from hpc_es.transport.rendezvous import read_rendezvous
from hpc_es.transport.secrets import create_secrets, load_secrets

CREATE_DEVICE = ProcessGroupGloo.create_device
HOST, TIMEOUT_S = "127.0.0.1", 120.0
RECORD = os.urandom(1000)
"""Size of a record: about the commit of 64 members."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "hpc_es.transport.collective", "hpc_es.transport.control"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument(
        "--mesh", type=int, nargs="*", default=[16, 64], help="numbers of members to measure Gloo's default with"
    )
    parser.add_argument("--processes", type=int, default=8, help="number of processes that the members share")
    parser.add_argument("--files", type=int, help="largest number of open files of the head")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.files or most, most))
    rows = list[Row]()
    for num_members in options.members:
        spent = measure(num_members, options.processes, mesh=False)
        usual = measure(num_members, options.processes, mesh=True) if num_members in options.mesh else None
        rows += rows_of(num_members, spent, usual)
        told = tell(num_members, options.processes)
        rows.append(Row(f"{num_members} members: a record on the control plane", "ms", 1000 * told))
    show("groups", rows, as_json=options.json)


@dataclass(frozen=True)
class Spent:
    change_s: float
    first_s: float
    next_s: float
    head_files: float
    member_files: float


def rows_of(num_members: int, spent: Spent, usual: Spent | None) -> list[Row]:
    def row(what: str, unit: str, value: Callable[[Spent], float]) -> Row:
        return Row(f"{num_members} members: {what}", unit, value(spent), usual=value(usual) if usual else None)

    return [
        row("epoch change", "ms", lambda spent: 1000 * spent.change_s),
        row("first broadcast", "ms", lambda spent: 1000 * spent.first_s),
        row("next broadcast", "ms", lambda spent: 1000 * spent.next_s),
        row("sockets of the head", "files", lambda spent: spent.head_files),
        row("sockets of a member", "files", lambda spent: spent.member_files),
    ]


def measure(num_members: int, num_processes: int, *, mesh: bool) -> Spent:
    """Measure epochs 1 and 2 with this number of members."""
    connect_everybody(mesh)
    crowd = Crowd(num_members, num_processes, ("members", mesh))
    events: SimpleQueue[EpochEvent] = SimpleQueue()
    files, files_there = num_files(), crowd.ask("files", None)
    head = HeadCollective(HOST, TIMEOUT_S, events.put)

    def open_epoch(epoch: int) -> float:
        began = time.monotonic()
        calls = head.open(epoch, crowd.names, "gloo")
        crowd.ask("join", calls)
        event = events.get(timeout=2 * TIMEOUT_S)
        if not isinstance(event, EpochUp):
            raise SystemExit(f"{num_members} members: {event}")
        return time.monotonic() - began

    def broadcast(epoch: int) -> float:
        began = time.monotonic()
        head.broadcast(epoch, RECORD)
        assert set(crowd.ask("receive", (epoch, len(RECORD)))) == {sha256(RECORD)}
        return time.monotonic() - began

    try:
        open_epoch(1)
        broadcast(1)
        change_s, first_s = open_epoch(2), broadcast(2)
        next_s = statistics.median(broadcast(2) for _ in range(5))
        head_files = num_files() - files
        there = sum(crowd.ask("files", None)) - sum(files_there)
        return Spent(change_s, first_s, next_s, head_files, there / num_members)
    finally:
        crowd.end()
        head.close()


def tell(num_members: int, num_processes: int) -> float:
    """Seconds until this number of connected workers have the record from the control plane."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = RunPaths(Path(scratch))
        create_secrets(paths)
        server = HeadServer(paths, 1, "groups", HOST, largest=limits.HEADROOM)  # all may connect at once
        crowd = Crowd(num_members, num_processes, ("dealers", paths))
        try:
            present = set[bytes]()
            while len(present) < num_members:
                present |= {peer for peer, _ in server.receive(1.0)}
            announced = m.Announce(1, 0, len(RECORD), sha256(RECORD), RECORD)
            seconds = []
            for _ in range(5):
                began = time.monotonic()
                server.send_all({name: [announced] for name in crowd.names})
                crowd.ask("hear", None)
                seconds.append(time.monotonic() - began)
            return statistics.median(seconds)
        finally:
            crowd.end()
            server.close()


class Crowd:
    """The processes that the members share."""

    def __init__(self, num_members: int, num_processes: int, role: tuple[str, Any]) -> None:
        self.names = [f"member-{number}" for number in range(num_members)]
        self.shares = [self.names[first::num_processes] for first in range(min(num_processes, num_members))]
        self.pipes, self.processes = list[Connection](), []
        for names in self.shares:
            pipe, theirs = PROCESSES.Pipe()
            self.pipes.append(pipe)
            self.processes.append(PROCESSES.Process(target=serve, args=(theirs, names, *role), daemon=True))
            self.processes[-1].start()
            theirs.close()

    def ask(self, what: str, argument: Any) -> list[Any]:
        """Call all processes at once. Returns the answer of each."""
        for pipe, names in zip(self.pipes, self.shares, strict=True):
            pipe.send((what, {name: argument[name] for name in names} if what == "join" else argument))
        answers = []
        for pipe in self.pipes:
            answer = pipe.recv() if pipe.poll(3 * TIMEOUT_S) else TimeoutError("a process of members is silent")
            if isinstance(answer, Exception):
                raise SystemExit(f"{len(self.names)} members: {answer}")
            answers.append(answer)
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def serve(pipe: Connection, names: list[str], role: str, argument: Any) -> None:
    """Serve some of the members until the process is killed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if role == "dealers":
        work = dealers(names, argument)
    else:
        connect_everybody(argument)
        work = members(names)
    while True:
        what, argument = pipe.recv()
        try:
            pipe.send(work[what](argument))
        except Exception as error:
            pipe.send(RuntimeError(str(error)))


def members(names: list[str]) -> dict[str, Callable[[Any], Any]]:
    collectives = {name: WorkerCollective(TIMEOUT_S) for name in names}
    pool = ThreadPoolExecutor(len(names))

    def join(calls: dict[str, m.OpenEpoch]) -> None:
        list(pool.map(lambda name: collectives[name].join(calls[name]), names))

    def receive(announced: tuple[int, int]) -> bytes:
        (received,) = set(pool.map(lambda name: sha256(collectives[name].receive(*announced)), names))
        return received

    return {"join": join, "receive": receive, "files": lambda _: num_files()}


def dealers(names: list[str], paths: RunPaths) -> dict[str, Callable[[Any], Any]]:
    there, keys, context = read_rendezvous(paths.rendezvous), load_secrets(paths), zmq.Context(1)
    assert there is not None
    context.set(zmq.MAX_SOCKETS, 4 * len(names) + 10)
    connections = [sockets.Connection(context, there, keys, name.encode()) for name in names]
    for connection in connections:
        connection.send(m.encode(0, m.Heartbeat("")))

    def hear(_: None) -> None:
        for connection in connections:
            while not isinstance(m.decode(connection.socket.recv()).message, m.Announce):
                pass  # the echo of the heartbeat

    return {"hear": hear}


def connect_everybody(mesh: bool) -> None:
    """Choose whether Gloo in this process connects every member to every other."""
    ProcessGroupGloo.create_device = lambda hostname, lazy_init: CREATE_DEVICE(hostname=hostname, lazy_init=not mesh)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
