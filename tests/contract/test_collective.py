"""The collective plane with real Gloo groups: the head here, each worker in a process of its own."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty

import pytest
from collective_peers import HOST, TIMEOUT_S, Head, Worker

from hpc_es.errors import TransportError
from hpc_es.transport.backends import Backend, Choice, Offer, choose_backend, own_offer
from hpc_es.transport.collective import EpochFailed, EpochUp, WorkerCollective, sha256
from hpc_es.transport.messages import OpenEpoch

RECORD = os.urandom(10_000)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    made = [Worker() for _ in range(3)]
    for worker in made:
        assert worker.answer() == "up"
    yield made
    for worker in made:
        worker.end()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.collective.close()
    assert not made.collective._thread.is_alive()


@contextmanager
def pulse() -> Iterator[list[float]]:
    """The longest pause of a thread that only wants to run, as the head's loop does."""
    longest, done = [0.0], threading.Event()

    def beat() -> None:
        before = time.monotonic()
        while not done.wait(0.01):
            now = time.monotonic()
            longest[0], before = max(longest[0], now - before), now

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield longest
    finally:
        done.set()
        thread.join()


def test_two_epochs_in_sequence_broadcast_equal_bytes(head: Head, workers: list[Worker]) -> None:
    for epoch, members in ((1, workers[:2]), (2, workers)):
        head.bring_up(epoch, members)
        for length in (1, 10_000):
            data = RECORD[:length]
            received = head.broadcast(epoch, data, members)
            assert [sha256(bytes_) for bytes_ in received] == [sha256(data)] * len(members)
    with pytest.raises(Empty):
        head.next_event(timeout_s=0.1)


def test_groups_meet_and_broadcast_on_ipv6(workers: list[Worker], ipv6_loopback: str) -> None:
    head, members = Head(ipv6_loopback), workers[:2]
    try:
        head.bring_up(1, members)
        assert head.broadcast(1, RECORD, members) == [RECORD, RECORD]
    finally:
        head.collective.close()


def test_a_worker_that_never_joins_ends_the_epoch_in_time_and_nothing_waits(head: Head, workers: list[Worker]) -> None:
    with pulse() as longest_pause:
        began = time.monotonic()
        calls = head.collective.open(1, ["present", "absent"], "gloo")
        head.collective.broadcast(1, RECORD)
        assert time.monotonic() - began < TIMEOUT_S / 2
        workers[0].start("join", calls["present"])
        event = head.next_event()
    assert isinstance(event, EpochFailed)
    assert "absent" in event.detail
    assert "present" not in event.detail
    assert time.monotonic() - began < TIMEOUT_S + 2
    assert longest_pause[0] < 1
    assert isinstance(workers[0].answer(), TransportError)


def test_a_newer_epoch_does_not_wait_for_one_that_is_stuck(head: Head, workers: list[Worker]) -> None:
    head.collective.open(1, ["absent"], "gloo")
    began = time.monotonic()
    head.open(2, workers[:1])
    assert isinstance(head.next_event(), EpochFailed)
    assert head.next_event() == EpochUp(2)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert workers[0].answer() is None


def test_a_broadcast_in_a_past_epoch_is_not_sent(head: Head, workers: list[Worker]) -> None:
    head.bring_up(1, workers[:1])
    head.bring_up(2, workers[:1])
    head.collective.broadcast(1, b"old")
    assert head.broadcast(2, b"new", workers[:1]) == [b"new"]


def test_a_worker_refuses_a_broadcast_of_an_epoch_that_it_is_not_in(head: Head, workers: list[Worker]) -> None:
    head.bring_up(1, workers[:1])
    workers[0].start("receive", 2, 5)
    answer = workers[0].answer()
    assert isinstance(answer, TransportError)
    assert "epoch 2" in str(answer)


def test_a_broadcast_that_never_comes_ends_in_time(head: Head, workers: list[Worker]) -> None:
    head.bring_up(1, workers[:1])
    began = time.monotonic()
    workers[0].start("receive", 1, 5)
    assert isinstance(workers[0].answer(), TransportError)
    assert time.monotonic() - began < TIMEOUT_S + 2


def test_a_worker_killed_between_join_and_broadcast_ends_the_epoch_and_a_new_one_works(
    head: Head, workers: list[Worker]
) -> None:
    victim, members = workers[2], workers[:2]
    head.bring_up(1, [victim, *members])
    victim.kill()
    began = time.monotonic()
    with pulse() as longest_pause:
        head.collective.broadcast(1, RECORD)
        event = head.next_event()
    assert isinstance(event, EpochFailed)
    assert time.monotonic() - began < TIMEOUT_S + 2  # Gloo tries to connect to the victim until the time limit
    assert longest_pause[0] < 1
    head.bring_up(2, members)
    assert head.broadcast(2, RECORD, members) == [RECORD, RECORD]


def test_joining_a_head_that_is_gone_ends_in_time() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(TransportError, match="epoch 3 cannot be joined as rank 1"):
        WorkerCollective(1.0).join(OpenEpoch(3, 1, 2, "gloo", HOST, port))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_a_head_alone_forms_an_epoch_and_broadcasts(head: Head, backend: Backend) -> None:
    if backend == "nccl" and own_offer().backend != "nccl":
        pytest.skip("needs CUDA, and torch with NCCL")
    head.collective.open(1, [], backend)
    assert head.next_event(timeout_s=60) == EpochUp(1)  # the first communicator of a process takes seconds
    head.collective.broadcast(1, RECORD)
    with pytest.raises(Empty):
        head.next_event(timeout_s=1)


def test_an_unknown_backend_ends_the_epoch(head: Head) -> None:
    head.collective.open(1, [], "none")
    event = head.next_event()
    assert isinstance(event, EpochFailed)
    assert "'none'" in event.detail


def test_the_store_listens_on_the_given_address_only(head: Head) -> None:
    call = head.collective.open(1, ["w"], "gloo")["w"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", call.store_port), timeout=1).close()


@pytest.mark.parametrize(
    ("wanted", "backends", "chosen"),
    [
        ("auto", ["nccl", "nccl"], "nccl"),
        ("auto", ["nccl", "gloo"], "gloo"),
        ("auto", ["gloo", "none"], "none"),
        ("gloo", ["nccl", "nccl"], "gloo"),
        ("none", ["nccl", "nccl"], "none"),
        ("nccl", ["nccl", "nccl"], "nccl"),
        ("auto", [], "none"),
    ],
)
def test_the_backend_is_one_that_everybody_has(wanted: str, backends: list[Backend], chosen: Backend) -> None:
    offers = [Offer(backend, f"GPU-{number}") for number, backend in enumerate(backends)]
    assert choose_backend(wanted, offers) == Choice(chosen)


@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_processes_that_share_a_gpu_use_gloo_and_log_why(wanted: str) -> None:
    offers = [Offer("nccl", "GPU-a"), Offer("nccl", "GPU-b"), Offer("nccl", "GPU-a")]
    assert choose_backend(wanted, offers[:2]) == Choice("nccl")
    choice = choose_backend(wanted, offers)
    assert choice.backend == "gloo"
    assert "2 processes share GPU-a" in choice.why


def test_nccl_is_refused_where_somebody_lacks_it() -> None:
    with pytest.raises(TransportError, match=r"transport\.backend=nccl.*gloo"):
        choose_backend("nccl", [Offer("nccl"), Offer("gloo")])


def test_this_machine_can_join_something() -> None:
    assert own_offer().backend in ("gloo", "nccl")
