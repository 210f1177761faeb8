"""The collective plane: NCCL with one rank, and again in a new epoch; two processes on one GPU fall back to Gloo; with
two GPUs also NCCL between two ranks, and the loss of one.

Everything goes through the code that head and workers use. On a CPU, Gloo stands in for NCCL.
"""

import json
import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import msgspec
import torch
from findings import Findings, arguments, begin

from hpc_es.transport.backends import Backend, Offer, choose_backend, own_offer
from hpc_es.transport.collective import EpochEvent, EpochFailed, EpochUp, HeadCollective, WorkerCollective, sha256
from hpc_es.transport.groups import Group, Place, open_store
from hpc_es.transport.messages import OpenEpoch
from hpc_es.transport.transfer import BUCKET_BYTES

HOST, TIMEOUT_S = "127.0.0.1", 20.0
RECORD = bytes(range(256)) * 5
PATIENCE_S = 3 * TIMEOUT_S


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peer", action="store_true", help="be the worker")
    options = parser.parse_args()
    if options.peer:
        peer()
        return
    findings, offer = begin(options), own_offer()
    backend: Backend = "nccl" if findings.on_gpu else "gloo"
    findings.check("what this process offers", offer.backend == backend, f"{offer.backend} {offer.gpu}")
    with findings.step(f"{backend} with one rank"), abandoned(findings, backend):
        one_rank(findings, backend)
    with findings.step("two processes share a GPU"), worker(options, os.environ) as other:
        chosen = choose_backend("auto", [offer, other.offer])
        if findings.on_gpu:
            told = chosen.backend == "gloo" and offer.gpu in chosen.why
            findings.check("head and worker on one GPU get Gloo", told, chosen.why)
        two_ranks(findings, other, "gloo" if findings.on_gpu else chosen.backend)
    if findings.on_gpu and torch.cuda.device_count() < 2:
        findings.not_run("nccl with two ranks", "one GPU is here")
        return
    with findings.step("two ranks"), worker(options, second_gpu()) as other:
        chosen = choose_backend("auto", [offer, other.offer])
        findings.check(f"two GPUs get {backend}", chosen.backend == backend, chosen.why)
        two_ranks(findings, other, backend)


class Head:
    """The head's end, and what it reports."""

    def __init__(self) -> None:
        self._events: SimpleQueue[EpochEvent] = SimpleQueue()
        self.collective = HeadCollective(HOST, TIMEOUT_S, self._events.put)

    def event(self, patience_s: float = PATIENCE_S) -> EpochEvent | None:
        try:
            return self._events.get(timeout=patience_s)
        except Empty:
            return None


@contextmanager
def head() -> Iterator[Head]:
    made = Head()
    try:
        yield made
    finally:
        made.collective.close()


@contextmanager
def abandoned(findings: Findings, backend: Backend) -> Iterator[None]:
    """Whether groups that were given up did end."""
    warnings = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hpc_es.transport").addHandler(handler)
    yield
    findings.check(f"{backend}: groups end when they are given up", not warnings, "; ".join(warnings))


def one_rank(findings: Findings, backend: Backend) -> None:
    with head() as ours:
        for epoch in (1, 2):
            began = time.monotonic()
            ours.collective.open(epoch, [], backend)
            event = ours.event()
            detail = f"{time.monotonic() - began:.1f} s" if event == EpochUp(epoch) else str(event)
            findings.check(f"{backend}, one rank: epoch {epoch} is up", event == EpochUp(epoch), detail)
            ours.collective.broadcast(epoch, RECORD)
            failure = ours.event(1.0)
            findings.check(f"{backend}, one rank: a broadcast in epoch {epoch}", failure is None, str(failure or ""))
        call = ours.collective.open(3, ["nobody"], backend)["nobody"]  # for the address of the store
        group = Group(backend, open_store(HOST, call.store_port, "alone", TIMEOUT_S), Place(0, 1, HOST), TIMEOUT_S)
        bucket = bytearray(BUCKET_BYTES[backend])
        group.share(bucket)
        began = time.monotonic()
        group.share(bucket)
        rate = len(bucket) / (time.monotonic() - began) / 1e9
        findings.measured(f"{backend}, one rank: a bucket of theta to the device", rate, "GB/s")
        group.abandon()


def two_ranks(findings: Findings, other: "Worker", backend: Backend) -> None:
    """A broadcast, another in the next epoch, and one after the worker's end."""
    what = f"{backend}, two ranks"
    with head() as ours:
        for epoch in (1, 2):
            other.ask("join", ours.collective.open(epoch, ["worker"], backend)["worker"])
            event, joined = ours.event(), other.answer()
            findings.check(f"{what}: epoch {epoch} is up", event == EpochUp(epoch) and not joined, f"{event} {joined}")
            other.ask("receive", epoch)
            ours.collective.broadcast(epoch, RECORD)
            findings.check(f"{what}: the record arrives in epoch {epoch}", other.answer() == sha256(RECORD).hex())
        other.process.kill()
        other.process.wait()
        began = time.monotonic()
        ours.collective.broadcast(2, RECORD * 10_000)  # too much for any buffer on the way
        event = ours.event()
        lost, took = isinstance(event, EpochFailed), time.monotonic() - began
        findings.check(f"{what}: a lost worker ends the epoch", lost, f"{took:.1f} s: {event!s:.100}")
        ours.collective.open(3, [], backend)
        event = ours.event()
        findings.check(f"{what}: the head goes on without it", event == EpochUp(3), str(event))


# --- the worker, a process of its own ---------------------------------------------------------------------------------


class Worker:
    """Answers one JSON line to each."""

    def __init__(self, options: Namespace, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--peer", "--device", options.device, "--findings", os.devnull]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.offer = Offer(*self.answer())

    def ask(self, what: str, argument: OpenEpoch | int) -> None:
        call = list(msgspec.structs.astuple(argument)) if isinstance(argument, OpenEpoch) else argument
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, call]) + "\n")
        self.process.stdin.flush()

    def answer(self):  # type: ignore[no-untyped-def]
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def worker(options: Namespace, environment: "os._Environ[str] | dict[str, str]") -> Iterator[Worker]:
    made = Worker(options, dict(environment))
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def peer() -> None:
    offer, collective = own_offer(), WorkerCollective(TIMEOUT_S)
    print(json.dumps([offer.backend, offer.gpu]), flush=True)
    for line in sys.stdin:
        what, argument = json.loads(line)
        try:
            if what == "join":
                answer = collective.join(OpenEpoch(*argument))
            else:
                answer = sha256(collective.receive(argument, len(RECORD))).hex()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


def second_gpu() -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible[-1]}


if __name__ == "__main__":
    main()
