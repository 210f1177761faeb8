"""The collective plane under joins and losses at random moments: real Gloo groups, each worker a process of its own.

The head's decisions (Plane) and its end of the groups are the real ones. The control plane is a pipe per worker, which
loses nothing. Whatever happens, each living worker has each record, by broadcast or by asking for it.
"""

import random
import time
from collections import Counter
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest
from builders import built_commit
from collective_peers import HOST, PROCESSES, Worker

from hpc_es.config.schema import TransportConfig
from hpc_es.errors import TransportError
from hpc_es.head.crew import Crew
from hpc_es.head.instructions import Broadcast, Instruction, OpenGroup, Send
from hpc_es.head.plane import Plane
from hpc_es.transport import messages
from hpc_es.transport.backends import Offer
from hpc_es.transport.collective import EpochEvent, EpochUp, HeadCollective, WorkerCollective, sha256

TIMEOUT_S = 1.0
PATIENCE_S = 40.0
LONGEST_CALL_S = 0.9
"""Of the head's loop into the plane and the collective: less than a time limit, and more than a thread waits for its
turn on a busy machine."""
FAULTS = ("nothing", "join", "join", "kill", "stop", "restart head")


def serve(pipe: Connection) -> None:
    """Does what worker/loop.py does with announcements and calls; tells (version, hash, how it came), or asks."""
    collective = WorkerCollective(TIMEOUT_S)
    pipe.send("up")
    while True:
        message = pipe.recv()
        if isinstance(message, messages.OpenEpoch):
            try:
                collective.join(message)
            except TransportError as error:
                pipe.send(messages.EpochReady("", message.epoch, False, str(error)))
        elif isinstance(message, messages.Announce):
            try:
                data = message.record or collective.receive(message.epoch, message.length)
                assert sha256(data) == message.sha256
                pipe.send((message.version, sha256(data), "told" if message.record else "broadcast"))
            except TransportError:
                pipe.send(messages.Fetch("", message.version, message.version))
        else:
            return


class Process(Worker):
    def __init__(self) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self.answer() == "up"
        self.stopped = False


class Run:
    """A head, restarted at will, and its workers."""

    def __init__(self) -> None:
        self.workers: dict[str, Process] = {}
        self.announced: dict[int, messages.Announce] = {}
        self.expected: set[tuple[str, int]] = set()
        self.came: Counter[str] = Counter()
        self.unnoticed: list[str] = []
        self.num_made = 0
        self.longest_call_s = 0.0
        self.ended: list[HeadCollective] = []
        self.start_head()

    def start_head(self) -> None:
        self.events: SimpleQueue[EpochEvent] = SimpleQueue()
        self.collective = HeadCollective(HOST, TIMEOUT_S, self.events.put)
        self.ended.append(self.collective)
        self.crew = Crew()
        self.plane = Plane(TransportConfig(), self.crew, Offer("gloo"), lambda level, what, detail: None)
        for name, worker in self.workers.items():
            if not worker.stopped:
                self.hello(name)

    def hello(self, name: str) -> None:
        self.crew.join(messages.Hello(name, name, "host", 1, 0, {}, collective="gloo"), 0.0)

    def join(self) -> None:
        self.num_made += 1
        name = f"w{self.num_made}"
        self.workers[name] = Process()
        self.hello(name)

    def lose(self, name: str) -> None:
        """The head will notice after the commit: by then it has counted on the worker once more."""
        self.unnoticed.append(name)
        self.expected = {(who, version) for who, version in self.expected if who != name}

    def fault(self, kind: str, rng: random.Random) -> None:
        up = [name for name, worker in self.workers.items() if not worker.stopped]
        if kind == "join" or len(up) < 2:
            self.join()
        elif kind == "kill":
            name = rng.choice(up)
            self.workers.pop(name).kill()
            self.lose(name)
        elif kind == "stop":
            name = rng.choice(up)
            self.workers[name].stop()
            self.workers[name].stopped = True
            self.lose(name)
        elif kind == "restart head":
            self.start_head()

    def commit(self, version: int, rng: random.Random, fault: str) -> None:
        """One commit, with a fault before it, amid its announcement, or just after."""
        when = rng.choice(("before", "amid", "after"))
        if when == "before":
            self.fault(fault, rng)
        self.hear(0.0)
        instructions = self.timed(self.plane.announce, built_commit(version, 0.1, ()))
        instructions += self.timed(self.plane.change_epoch)
        assert sum(isinstance(instruction, OpenGroup) for instruction in instructions) <= 1
        for number, instruction in enumerate(instructions):
            if when == "amid" and number == len(instructions) // 2:
                self.fault(fault, rng)
            self.perform(instruction)
        time.sleep(rng.uniform(0, 0.1))
        if when == "after":
            self.fault(fault, rng)
        self.hear(PATIENCE_S)
        while self.unnoticed:
            self.crew.leave(self.unnoticed.pop())

    def perform(self, instruction: Instruction) -> None:
        match instruction:
            case Send(worker=name, message=messages.Announce() as announce):
                self.announced[announce.version] = announce
                if name in self.workers:
                    self.workers[name].pipe.send(announce)
                    if not self.workers[name].stopped:
                        self.expected.add((name, announce.version))
            case Broadcast(epoch=epoch, data=data):
                self.timed(self.collective.broadcast, epoch, data)
            case OpenGroup(epoch=epoch, workers=names, backend=backend):
                for name, call in self.timed(self.collective.open, epoch, names, backend).items():
                    if name in self.workers:
                        self.workers[name].pipe.send(call)

    def hear(self, patience_s: float) -> None:
        """What workers and groups say, until each worker has each record that it was told of."""
        deadline = time.monotonic() + patience_s
        while True:
            while not self.events.empty():
                event = self.events.get()
                if isinstance(event, EpochUp):
                    self.plane.group_up(event.epoch)
                else:
                    self.plane.end_epoch(event.epoch, event.detail)
            for name, worker in self.workers.items():
                while not worker.stopped and worker.pipe.poll():
                    self.heard(name, worker, worker.pipe.recv())
            if not self.expected or not patience_s:
                return
            assert time.monotonic() < deadline, f"never came: {self.expected}"
            time.sleep(0.01)

    def heard(self, name: str, worker: Process, message: Any) -> None:
        match message:
            case messages.Fetch(first=version):
                announce = self.announced[version]
                data = messages.encode_commit(built_commit(version, 0.1, ()))
                worker.pipe.send(messages.Announce(version, 0, len(data), announce.sha256, data))
            case messages.EpochReady(epoch=epoch, detail=detail):
                self.plane.end_epoch(epoch, detail)
            case (version, sha256_, how):
                assert sha256_ == self.announced[version].sha256
                self.expected.discard((name, version))
                self.came[how] += 1

    def timed(self, call: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        result = call(*arguments)
        self.longest_call_s = max(self.longest_call_s, time.monotonic() - began)
        return result

    def wake_all(self) -> None:
        for name, worker in self.workers.items():
            if worker.stopped:
                worker.go_on()
                worker.stopped = False
                self.hello(name)

    def end(self) -> None:
        self.wake_all()
        for worker in self.workers.values():
            worker.pipe.send("exit")
            worker.process.join(3 * TIMEOUT_S)
            worker.process.kill()
        for collective in self.ended:
            collective.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_living_worker_has_every_record_whatever_happens_and_the_plane_recovers(seed: int) -> None:
    rng, run = random.Random(seed), Run()
    try:
        run.join()
        run.join()
        faults = [*FAULTS, *FAULTS]
        rng.shuffle(faults)
        for version, fault in enumerate(faults, start=1):
            run.commit(version, rng, fault)
            if rng.random() < 0.3:
                run.wake_all()
        run.wake_all()
        before = run.came["broadcast"]
        for version in range(100, 120):  # in peace; the first may still find a broken epoch
            run.commit(version, rng, "nothing")
            if run.came["broadcast"] > before:
                break
            time.sleep(TIMEOUT_S / 4)
        assert run.came["broadcast"] > before, "no record came by broadcast once there was peace"
        assert run.longest_call_s < LONGEST_CALL_S
    finally:
        run.end()
