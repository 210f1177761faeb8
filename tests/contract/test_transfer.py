"""theta by broadcast: real Gloo groups, each joiner in a process of its own; and what an arena makes of the buckets."""

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from collective_peers import HOST, TIMEOUT_S, Head, Worker

from hpc_es.errors import DigestMismatch, TransportError
from hpc_es.params.arena import Arena
from hpc_es.params.lab_model import write_lab_model
from hpc_es.params.rebuild import receive
from hpc_es.transport import transfer
from hpc_es.transport.collective import sha256
from hpc_es.transport.messages import OpenTransfer
from hpc_es.transport.transfer import Receiving, Sent

THETA = bytearray(np.random.default_rng(0).bytes(1_000_000))
NUMBERS = iter(range(1, 100))


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.collective.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker() for _ in range(3)]
    for worker in made:
        assert worker.answer() == "up"
    yield made
    for worker in made:
        worker.end()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transfer.BUCKET_BYTES, "gloo", 2**16)


class Transfer:
    """A transfer to workers 0, 1, ...; sets `sent` or `error` when it has ended."""

    def __init__(self, head: Head, num_workers: int) -> None:
        names = list(map(str, range(num_workers)))
        sending = head.collective.sending(next(NUMBERS), names, "gloo")
        self.calls = list(sending.calls(7, 0, len(THETA)).values())
        self.sent: Sent | None = None
        self.error = ""
        self._sending = sending
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.sent = self._sending.send(memoryview(THETA))
        except TransportError as error:
            self.error = str(error)

    def wait(self) -> None:
        self._thread.join(10 * TIMEOUT_S)
        assert not self._thread.is_alive()


def test_workers_that_join_together_share_one_transfer(head: Head, workers: list[Worker]) -> None:
    sending = Transfer(head, 3)
    for worker, call in zip(workers, sending.calls, strict=True):
        worker.start("take", call)
    assert [worker.answer() for worker in workers] == [sha256(THETA)] * 3
    sending.wait()
    assert sending.sent is not None
    assert (sending.sent.workers, sending.sent.num_bytes) == (("0", "1", "2"), len(THETA))


def test_a_joiner_that_is_late_costs_the_others_a_wait_and_learns_it(head: Head, workers: list[Worker]) -> None:
    began = time.monotonic()
    sending = Transfer(head, 2)
    workers[0].start("take", sending.calls[0])
    assert workers[0].answer() == sha256(THETA)
    assert time.monotonic() - began < 3 * TIMEOUT_S
    workers[1].start("take", sending.calls[1])
    assert "too late" in str(workers[1].answer())
    sending.wait()
    assert sending.sent is not None
    assert sending.sent.workers == ("0",)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_joiner_that_is_lost_on_the_way_costs_the_others_a_second_round(
    head: Head, workers: list[Worker], fault: str
) -> None:
    sending = Transfer(head, 3)
    for worker, call in zip(workers, sending.calls, strict=True):
        worker.start("take", call, 0.05)  # 16 buckets
    time.sleep(0.4)
    getattr(workers[1], fault)()
    assert [workers[place].answer() for place in (0, 2)] == [sha256(THETA)] * 2
    sending.wait()
    assert sending.sent is not None
    assert sending.sent.workers == ("0", "2")
    if fault == "stop":
        workers[1].go_on()
        assert isinstance(workers[1].answer(), TransportError)


def test_a_transfer_without_joiners_ends_in_time(head: Head) -> None:
    began = time.monotonic()
    sending = Transfer(head, 2)
    sending.wait()
    assert "no worker came" in sending.error
    assert time.monotonic() - began < 3 * TIMEOUT_S


def test_a_head_that_stops_does_not_end_the_transfer_first(workers: list[Worker]) -> None:
    head = Head()
    sending = Transfer(head, 1)
    workers[0].start("take", sending.calls[0], 1.0)  # 16 buckets
    time.sleep(1)
    began = time.monotonic()
    head.collective.end_transfers()
    sending.wait()
    head.collective.close()
    assert sending.error == "the head stops or exits"
    assert time.monotonic() - began < 3 * TIMEOUT_S


def test_a_joiner_gives_up_if_its_head_never_begins_and_stops_at_once_on_request(head: Head) -> None:
    call = head.collective.sending(next(NUMBERS), ["0"], "gloo").calls(7, 0, 10)["0"]
    stop = Event()
    stop.set()
    gone = OpenTransfer(1, 0, "gloo", HOST, 1, 7, 0, 10, 10)
    for receiving, limit_s in (
        (Receiving(call, timeout_s=0.2), 5.0),
        (Receiving(call, timeout_s=60, stop=stop), 10.0),
        (Receiving(gone, timeout_s=60, stop=stop), 10.0),
    ):
        began = time.monotonic()
        with pytest.raises(TransportError):
            list(receiving)
        assert time.monotonic() - began < limit_s


def test_a_joiner_whose_head_is_gone_gives_up() -> None:
    call = OpenTransfer(1, 0, "gloo", HOST, 1, 7, 0, 10, 10)
    with pytest.raises(TransportError, match="0 of 1 buckets"):
        list(Receiving(call, timeout_s=0.2))


# --- the arena -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab_model(tmp_path_factory.mktemp("lab"), 8)


def buckets(arena: Arena, size: int = 10_000) -> list[memoryview]:
    memory = arena.memory.tobytes()
    return [memoryview(memory[start : start + size]) for start in range(0, len(memory), size)]


def test_an_arena_takes_theta_and_the_state_of_its_optimiser(model: Path) -> None:
    theirs = Arena.from_pretrained(model, optimiser="adam")
    theirs.memory[...] = np.random.default_rng(1).standard_normal(theirs.memory.size)
    ours = Arena.from_pretrained(model, optimiser="adam")
    receive(ours, 5, theirs.digest(), buckets(theirs))
    assert (ours.version, ours.digest()) == (5, theirs.digest())


def damaged(arena: Arena) -> list[memoryview]:
    first, *others = buckets(arena)
    return [memoryview(bytes([first[0] ^ 1]) + bytes(first[1:])), *others]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (damaged, DigestMismatch),
        (lambda arena: buckets(arena)[:-1], TransportError),
        (lambda arena: [*buckets(arena), memoryview(b"more")], TransportError),
    ],
)
def test_an_arena_that_received_something_else_is_back_at_theta_0(model, spoil, error) -> None:
    theirs, ours = Arena.from_pretrained(model), Arena.from_pretrained(model)
    theirs.update([(3, 1e-3)])
    with pytest.raises(error):
        receive(ours, 1, theirs.digest(), spoil(theirs))
    assert (ours.version, ours.digest()) == (0, ours.base_digest)
