"""How many results per second one head accepts, and what each costs, with a thousand connected workers.

    python tools/bench/head_capacity.py [--clients 1000] [--updates 30] [--tasks 1 16] [--modes sync natural]

A real head process (`hpc_es head RUN --local`) serves `--clients` connections under CURVE, all from this process. Each
client answers an assignment with a result at once, like a worker whose evaluations take no time, so only the control
plane, the head's decisions, the journal with its fsyncs and run.h5 are at work. The population is the number of
clients; the collective plane is off, so every client is sent every commit record. The model has a thousand parameters,
so that the head's pass over its arena ("arena": its wall-clock time as a percentage of the head's CPU time) does not
hide the rest; a real model's pass runs beside the loop. No two results have the same fitness. `--tasks`: episodes per
result, T.

The first two updates warm up. "results/s" is per second of wall-clock time from their commit to the last one, and
depends on the cores that the clients leave. "per CPU-s" is per second of the head's CPU time, all threads, user and
system, from that commit until the head has ended, including its last write of run.h5. "clients" is this process's CPU
time. At the end the journal and run.h5 are read: "lost" counts acknowledged results that either lacks, "double" those
that it has or counts more than once.
"""

import argparse
import os
import resource
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import starmap
from pathlib import Path

import numpy as np
import pandas as pd
import zmq

from hpc_es.config import Config, config_digest
from hpc_es.envs.manifest import settle_tasks
from hpc_es.launch import prepare
from hpc_es.launch.process import Family, last_lines
from hpc_es.params import Arena
from hpc_es.params.weights import Spec, write
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Commit, Episode, EvalId, Result, from_first_release
from hpc_es.store import read
from hpc_es.store import records as journal
from hpc_es.store.frames import Frames
from hpc_es.store.journal import read_journal
from hpc_es.transport import messages
from hpc_es.transport.messages import decode, encode
from hpc_es.transport.rendezvous import Rendezvous, read_rendezvous
from hpc_es.transport.secrets import load_secrets
from hpc_es.transport.sockets import Connection

GOAL = 5000
WARM_UP = 2
NUM_PARAMETERS = 1024
START_TIMEOUT_S, SILENCE_S = 60.0, 60.0
COLUMNS = ("results/s", "per CPU-s", "goal", "head CPU", "clients", "arena", "fsyncs", "MB sent", "lost", "double")
WIDTH = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000, help="number of clients, which is also the population N")
    parser.add_argument("--updates", type=int, default=30, help="number of updates after the warm-up")
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 16], help="episodes per result, T")
    parser.add_argument("--modes", nargs="+", choices=("sync", "natural"), default=["sync", "natural"])
    parser.add_argument("--folder", type=Path, help="folder for the runs; default: the system's temporary folder")
    options = parser.parse_args()
    needed = 4 * options.clients + 100
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        sys.exit(f"{options.clients} clients need {needed} open files, but the limit is {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

    print(f"{options.clients} clients, N {options.clients}, {options.updates} updates after {WARM_UP}\n")
    print(f"{'':16}" + "".join(f"{title:>{WIDTH}}" for title in COLUMNS))
    for mode in options.modes:
        for tasks in options.tasks:
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                config = make_config(Path(scratch), options.clients, WARM_UP + options.updates, tasks, mode)
                print(f"{f'{mode}, T {tasks}':16}{measure(config)}", flush=True)


def make_config(folder: Path, clients: int, num_updates: int, tasks: int, mode: str) -> Config:
    staleness = {"mode": mode, **({"max_lag": 1} if mode == "natural" else {})}
    return Config.model_validate(
        {
            "run": {"name": "capacity", "dir": folder, "num_updates": num_updates},
            "model": {"path": str(small_model(folder / "model")), "dtype": "float32"},
            "task": {"env": "lab", "chat": False},
            "es": {"population": clients, "tasks_per_member": tasks},
            "eval": {"num_tasks": 0},
            "staleness": staleness,
            "transport": {"backend": "none"},
            "checkpoint": {"every": 1000},
        }
    )


def small_model(folder: Path, num_parameters: int = NUM_PARAMETERS) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    spec = Spec("weight", "F32", (num_parameters,))
    write(folder / "model.safetensors", [spec], lambda name: np.zeros(num_parameters, np.float32))
    return folder


def prepared_folder(config: Config) -> RunPaths:
    """Prepare a run folder for a head: what a launcher does, without the checks of a real model."""
    paths, _ = prepare.write_folder(config)
    settle_tasks(paths.tasks, config, has_begun=False)
    return paths


def measure(config: Config) -> str:
    """Measure one row of the table."""
    paths = prepared_folder(config)
    children_before = children_cpu()
    with Family() as family:
        command = [sys.executable, "-m", "hpc_es", "head", str(paths.root), "--local", "--parent", str(os.getpid())]
        head = family.start(command, log=paths.log("head"))
        crowd = Crowd(paths, config, wait_for_head(paths))
        crowd.run(lambda: head.poll() is not None)
        while head.poll() is None:
            time.sleep(0.02)
        if head.poll() != 0:
            sys.exit(f"the head ended with code {head.poll()}:\n{last_lines(paths.log('head'))}")
    head_cpu = children_cpu() - children_before - crowd.head_cpu_before
    account = Account.read(paths)
    num_results, seconds, arena_s = account.measured()
    lost, double = account.wrong(crowd.acknowledged, paths)
    cells = (
        f"{num_results / seconds:,.0f}",
        f"{num_results / head_cpu:,.0f}",
        f"{GOAL:,}",
        f"{head_cpu:.2f} s",
        f"{crowd.cpu:.2f} s",
        f"{arena_s / head_cpu:.0%}",
        f"{num_fsyncs(paths):,}",
        f"{crowd.num_bytes / 1e6:.0f}",
        f"{lost}",
        f"{double}",
    )
    return "".join(f"{cell:>{WIDTH}}" for cell in cells)


# --- the clients ------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """One connected worker, as the head sees it."""

    name: str
    connection: Connection


class Crowd:
    """All clients of a run, on one thread. They share one arena, which gives them the digests of theta."""

    def __init__(self, paths: RunPaths, config: Config, head: Rendezvous, num_clients: int | None = None) -> None:
        """`num_clients` defaults to the population."""
        num_clients = num_clients or config.es.population
        self.config, self.head = config, head
        self.acknowledged: list[EvalId] = []
        self.head_cpu_before = self._cpu_before = self.cpu = 0.0
        """CPU seconds of this process since the warm-up."""
        self.num_bytes = 0
        """Bytes received from the head."""
        self._arena = Arena.from_pretrained(config.model.path)
        self._digests = {0: self._arena.base_digest}
        self._early: dict[int, list[tuple[Client, Assignment]]] = {}
        """Assignments at versions that are not known yet."""
        self._config_digest = config_digest(config)
        self._present = num_clients
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 3 * num_clients + 100)
        self._poll = select.epoll()
        self._clients: dict[int, Client] = {}
        keys = load_secrets(paths)
        for i in range(num_clients):
            name = f"client-{i}"
            client = Client(name, Connection(self._context, head, keys, name.encode()))
            descriptor = client.connection.socket.getsockopt(zmq.FD)
            assert isinstance(descriptor, int)
            self._clients[descriptor] = client
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def run(self, head_ended: Callable[[], bool]) -> None:
        """Serve until the head has dismissed every client. Ends the process if the head falls silent."""
        try:
            self._talk(head_ended)
            self.cpu = time.process_time() - self._cpu_before
        finally:
            self._context.destroy(linger=0)

    def _talk(self, head_ended: Callable[[], bool]) -> None:
        for client in self._clients.values():
            self._say(client, self._hello(client.name))
        beat_at = time.monotonic() + self.config.transport.heartbeat
        silent_at = time.monotonic() + SILENCE_S
        while self._present and not head_ended():
            for descriptor, _ in self._poll.poll(max(beat_at - time.monotonic(), 0.0)):
                silent_at = time.monotonic() + SILENCE_S
                self._listen(self._clients[descriptor])
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + self.config.transport.heartbeat
                for client in self._clients.values():
                    self._say(client, messages.Heartbeat(client.name))
                    self._listen(client)
            if time.monotonic() > silent_at:
                sys.exit(f"the head was silent for {SILENCE_S:g} s while {self._present} clients were connected")

    def _listen(self, client: Client) -> None:
        """Answer all waiting messages: ZeroMQ's descriptor signals new messages only once, and sending may clear it."""
        while heard := client.connection.receive():
            for data in heard:
                self.num_bytes += len(data)
                self._answer(client, decode(data).message)

    def _answer(self, client: Client, message: messages.AnyMessage) -> None:
        match message:
            case messages.Work(assignment=assignment):
                self._work(client, assignment)
            case messages.Ack(eval_id=eval_id):
                self.acknowledged.append(eval_id)
            case messages.Announce(version=version, record=record) if record is not None:
                if version not in self._digests:
                    self._learn(messages.decode_commit(record))
            case messages.Unknown():
                self._say(client, self._hello(client.name))
            case messages.Refused() | messages.Rebuild():
                sys.exit(f"{client.name} was told {message}")
            case messages.Leave():
                self._present -= 1

    def _learn(self, commit: Commit) -> None:
        """Bring the shared arena to the new version, for all clients."""
        self._digests[commit.version] = self._arena.apply([commit]).digest
        for client, assignment in self._early.pop(commit.version, ()):
            self._work(client, assignment)
        if commit.version == WARM_UP:
            self.head_cpu_before, self._cpu_before = cpu_of(self.head.pid), time.process_time()

    def _work(self, client: Client, assignment: Assignment) -> None:
        """Report a fitness that is a pure function of the member: the mean of one reward and zeros."""
        digest = self._digests.get(assignment.version)
        if digest is None:  # it joined late: only others were told of this version, and have not read it yet
            self._early.setdefault(assignment.version, []).append((client, assignment))
            return
        assert assignment.member is not None
        reward, (first, *others) = assignment.member.seed / 2**64, assignment.tasks
        episodes = (episode(first, reward), *map(unrewarded, others))
        result = Result(assignment.eval_id, reward / len(episodes), episodes, digest, 0.01, 0.02, 0.03)
        self._say(client, messages.Report(client.name, result, 0.0, 0.0))

    def _hello(self, name: str) -> messages.Hello:
        facts = {"config": self._config_digest}
        return messages.Hello(name, name, "here", os.getpid(), self._arena.base_digest, facts)

    def _say(self, client: Client, message: messages.AnyMessage) -> None:
        client.connection.send(encode(self.head.generation, message))


def episode(task: int, reward: float) -> Episode:
    return Episode(task, reward, False, 1, 0, 120, 1, 0.02, 0.001, "terminated")


@cache
def unrewarded(task: int) -> Episode:
    return episode(task, 0.0)


def wait_for_head(paths: RunPaths) -> Rendezvous:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (there := read_rendezvous(paths.rendezvous)) is None:
        if time.monotonic() > deadline:
            sys.exit(f"no head within {START_TIMEOUT_S:g} s:\n{last_lines(paths.log('head'))}")
        time.sleep(0.02)
    return there


# --- results ----------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """Results and commits in the journal."""

    reported: Counter[EvalId] = field(default_factory=Counter)
    consumed: Counter[EvalId] = field(default_factory=Counter)
    void: int = 0
    times: dict[int, float] = field(default_factory=dict)
    """Time of each commit."""
    reported_at: list[float] = field(default_factory=list)
    arena_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, paths: RunPaths) -> "Account":
        account = cls()
        for record in read_journal(paths.root):
            match record:
                case journal.Reported(result=result, time=when):
                    account.reported[result.eval_id] += 1
                    account.reported_at.append(when)
                case journal.Committed(commit=commit, time=when):
                    account.consumed.update(each.eval_id for each in commit.consumed)
                    account.times[commit.version] = when
                case journal.Digested(version=version, seconds=seconds):
                    account.arena_s[version] = seconds
                case journal.Voided():
                    account.void += 1
        return account

    def measured(self) -> tuple[int, float, float]:
        """Number of results after the warm-up, their seconds, and the seconds of the head's passes over its arena."""
        begin, end = self.times[WARM_UP], self.times[max(self.times)]
        num_results = sum(begin < when <= end for when in self.reported_at)
        return num_results, end - begin, sum(s for version, s in self.arena_s.items() if version > WARM_UP)

    def wrong(self, acknowledged: list[EvalId], paths: RunPaths) -> tuple[int, int]:
        """Number of lost and of double results."""
        tables = read(
            paths.hdf5.rename(paths.root / "alone.h5")
        )  # under its own name, the reader would use the journal instead
        rows = tables.evaluations
        done, accepted = rows[rows.fitness.notna()], rows[rows.status == "accepted"]
        stored = Counter(ids(done))
        lost = len(set(acknowledged) - self.reported.keys()) + (self.reported - stored).total() + self.void
        lost += (self.consumed - Counter(ids(accepted))).total()
        double = (Counter(acknowledged) - self.reported).total() + (stored - self.reported).total()
        double += (Counter(ids(accepted)) - self.consumed).total()
        double += sum(count - 1 for counts in (self.reported, self.consumed) for count in counts.values())
        double += abs(int(tables.workers.num_results.sum()) - self.reported.total())
        return lost, double


def ids(rows: pd.DataFrame) -> Iterator[EvalId]:
    keys = zip(rows.dispatch_version, rows.slot, rows.replacement, strict=True)
    return map(from_first_release, starmap(EvalId, keys))


def num_fsyncs(paths: RunPaths) -> int:
    """Number of frames in the journal, each made durable by one fsync."""
    path = paths.segment(1)
    return sum(1 for _ in Frames(path, path.read_bytes()).payloads())


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_of(pid: int) -> float:
    """CPU seconds of all threads of a live process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
