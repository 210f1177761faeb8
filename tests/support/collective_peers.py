"""A head's collective plane, and workers in processes of their own, for tests with real Gloo groups."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hpc_es.errors import TransportError
from hpc_es.transport.collective import EpochEvent, EpochUp, HeadCollective, WorkerCollective, sha256
from hpc_es.transport.messages import OpenTransfer
from hpc_es.transport.transfer import Receiving

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
# Workers are forked from a process that has imported torch and done nothing else: one import instead of one each
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "hpc_es.transport.collective"])


def serve(pipe: Connection) -> None:
    """A worker process: performs (method, arguments) on a WorkerCollective, answers with the result or the error."""
    collective = WorkerCollective(TIMEOUT_S)
    pipe.send("up")
    while True:
        method, arguments = pipe.recv()
        if method == "exit":
            collective.leave()
            return
        work = take if method == "take" else getattr(collective, method)
        try:
            pipe.send(work(*arguments))
        except TransportError as error:
            pipe.send(error)


def take(call: OpenTransfer, pause_s: float = 0.0) -> bytes:
    """The hash of what a transfer brings, each bucket after a pause."""
    memory = bytearray()
    for bucket in Receiving(call, timeout_s=TIMEOUT_S):
        time.sleep(pause_s)
        memory += bucket
    return sha256(bytes(memory))


class Worker:
    def __init__(self) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def answer(self) -> Any:
        assert self.pipe.poll(30), "the worker does not answer"
        return self.pipe.recv()

    def stop(self) -> None:
        """Stop responding, like a machine that hangs."""
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.start("exit")
        self.process.join(10)
        self.process.close()
        self.pipe.close()


class Head:
    """A HeadCollective and the events that it sent."""

    def __init__(self, host: str = HOST) -> None:
        self.events: SimpleQueue[EpochEvent] = SimpleQueue()
        self.collective = HeadCollective(host, TIMEOUT_S, self.events.put)

    def next_event(self, timeout_s: float = 3 * TIMEOUT_S) -> EpochEvent:
        return self.events.get(timeout=timeout_s)

    def open(self, epoch: int, members: list[Worker]) -> None:
        calls = self.collective.open(epoch, [str(index) for index in range(len(members))], "gloo")
        for worker, call in zip(members, calls.values(), strict=True):
            worker.start("join", call)

    def bring_up(self, epoch: int, members: list[Worker]) -> None:
        self.open(epoch, members)
        assert self.next_event() == EpochUp(epoch)
        assert [worker.answer() for worker in members] == [None] * len(members)

    def broadcast(self, epoch: int, data: bytes, members: list[Worker]) -> list[Any]:
        for worker in members:
            worker.start("receive", epoch, len(data))
        self.collective.broadcast(epoch, data)
        return [worker.answer() for worker in members]
