"""The control plane over loopback: who is heard, and what is resent."""

import random
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from builders import Counted, built_assignment, built_commit
from control_peers import (
    BEAT_S,
    EVAL_ID,
    HELLO,
    HOST,
    PATIENCE_S,
    forwarding,
    hear,
    hear_nothing,
    hear_only_heartbeats,
    pump,
    raw_dealer,
    serving,
    stranger,
    wait_until,
    working,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_es.errors import TransportError
from hpc_es.params.arena import update_of
from hpc_es.paths import RunPaths
from hpc_es.records import Episode, EvalId, Member, OptimiserStep, Result
from hpc_es.transport import messages as m
from hpc_es.transport.control import HeadServer
from hpc_es.transport.observer import ask
from hpc_es.transport.rendezvous import read_rendezvous
from hpc_es.transport.secrets import create_secrets, load_secrets

EPISODE = Episode(7, 0.5, False, 3, 1, 90, 12, 0.8, 0.1, "truncated")
RESULT = Result(EVAL_ID, 0.5, (EPISODE,), 2**64 - 1, 0.1, 0.2, 0.3)
COMMIT = built_commit(4, 5e-4, (Counted(EVAL_ID, 2**64 - 1, -1, 1e-3, 0, 0.5, 1.0, 1e-7),))
# A status request with one more field, an array in an array in an array ...
BOTTOMLESS = b"\x92\x00\x82\xa4type\xadStatusRequest\xa4more" + b"\x91" * 100_000
TO_HEAD = [
    HELLO,
    m.Heartbeat("w"),
    m.Report("w", RESULT, 9.0, 1.0),
    m.HandBack("w", EVAL_ID, "walltime"),
    m.Draining("w", "its job is nearly over"),
    m.Fetch("w", 1, 4),
    m.EpochReady("w", 2, False, "late"),
    m.Arrived("w", 1, False, "late"),
    m.Goodbye("w", "done"),
    m.StatusRequest(),
    m.StopRequest("enough"),
    m.DrainRequest("seat"),
]
TO_WORKER = [
    m.Welcome(4, "abc"),
    m.Refused("another noise table"),
    m.Unknown(),
    m.Work(built_assignment(EVAL_ID, 4, "train", Member(2**64 - 1, -1, 1e-3), (1, 2), 5)),
    m.Ack(EVAL_ID),
    m.Announce(4, 1, 900, b"\x00" * 32, None),
    m.Records((COMMIT,)),
    m.OpenEpoch(1, 1, 3, "gloo", HOST, 4000),
    m.OpenTransfer(1, 0, "gloo", HOST, 4000, 4, 2**64 - 1, 2**40, 2**25),
    m.Rebuild(4),
    m.Leave("the end", True),
    m.Status("r", 1, "running", 4, 9, None, None, None, 1, 8, 2.0, None, None, (), ("x",)),
]


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path / "run")
    create_secrets(paths)
    yield paths
    assert [thread for thread in threading.enumerate() if thread.name == "head-client"] == []


# --- messages -------------------------------------------------------------------------------------------------


def test_the_examples_cover_every_message() -> None:
    assert {type(message) for message in TO_HEAD + TO_WORKER} == set(get_args(m.AnyMessage))


def test_every_message_to_the_head_arrives_unchanged(paths: RunPaths) -> None:
    with serving(paths) as server, working(paths) as worker:
        assert hear(server, m.Hello) == msgspec.structs.replace(HELLO, worker="w", pid=1)
        for message in TO_HEAD:
            if isinstance(message, m.Report | m.Heartbeat):
                continue  # resent, and sent by itself: tests of their own
            worker.client.send(message)
            assert hear(server, type(message)) == message


def test_every_message_to_a_worker_arrives_unchanged_and_in_order(paths: RunPaths) -> None:
    with serving(paths) as server, working(paths) as worker:
        hear(server, m.Hello)
        for message in TO_WORKER:
            server.send(b"w", message)
        server.send_all({"nobody": TO_WORKER, "w": TO_WORKER})
        wait_until(lambda: len(worker.told) == 2 * len(TO_WORKER))
        assert worker.told == TO_WORKER + TO_WORKER


def test_an_announced_commit_changes_an_arena_like_the_journalled_one() -> None:
    members = tuple(Counted(EvalId(3, i), 2**63 + i, -1, 1e-3, i % 2, 0.1 * i, 0.3, 0.5 - i, 7) for i in range(4))
    commit = built_commit(4, 5e-4, members, num_subspaces=2, partition_seed=9)
    assert update_of(m.decode_commit(m.encode_commit(commit))) == update_of(commit)
    for damaged in (b"neither packed nor a commit", zlib.compress(b"packed")):
        with pytest.raises(TransportError, match="cannot be read"):
            m.decode_commit(damaged)


def test_all_but_the_scores_of_a_commit_arrives() -> None:
    step = OptimiserStep("adam", -1e-3, 0.9, 0.1, 0.999, 0.001, 1e-8)
    rng = random.Random(0)
    members = tuple(
        Counted(
            EvalId(rng.randrange(300), rng.randrange(2**31), rng.randrange(3)),
            rng.getrandbits(64),
            rng.choice((1, -1)),
            rng.random(),
            rng.randrange(4),
            0.0,
            0.0,
            rng.randrange(-(2**24), 2**24) * 2.0**-40,
            rng.getrandbits(64),
        )
        for _ in range(50)
    )
    for commit in (built_commit(2**31, 5e-4, members, False, 4, 2**64 - 1, step), built_commit(1, 0.1, (), null=True)):
        assert m.decode_commit(m.encode_commit(commit)) == commit


def test_an_observer_gets_its_answer(paths: RunPaths) -> None:
    answers: list[Any] = []
    with serving(paths) as server:
        asking = threading.Thread(target=lambda: answers.append(ask(paths, m.StatusRequest(), PATIENCE_S)))
        asking.start()
        ((peer, envelope),) = server.receive(PATIENCE_S)
        assert envelope.message == m.StatusRequest()
        server.send(peer, TO_WORKER[-1])
        asking.join(PATIENCE_S)
    assert answers == [TO_WORKER[-1]]


def test_an_observer_whose_connection_breaks_asks_again(paths: RunPaths) -> None:
    answers: list[Any] = []
    with serving(paths) as server, forwarding(server) as forwarder:
        here = msgspec.structs.replace(read_rendezvous(paths.rendezvous), port=forwarder.port)
        paths.rendezvous.write_bytes(msgspec.json.encode(here))
        asking = threading.Thread(target=lambda: answers.append(ask(paths, m.StatusRequest(), PATIENCE_S)))
        asking.start()
        hear(server, m.StatusRequest)
        forwarder.cut()
        wait_until(lambda: forwarder.num_turned_away)
        forwarder.mend()
        ((peer, envelope),) = server.receive(PATIENCE_S)
        assert envelope.message == m.StatusRequest()
        server.send(peer, TO_WORKER[-1])
        asking.join(PATIENCE_S)
    assert answers == [TO_WORKER[-1]]


# --- who is heard ---------------------------------------------------------------------------------------------


def test_a_worker_with_another_key_is_refused_and_informed_at_once(paths: RunPaths, tmp_path: Path) -> None:
    with serving(paths) as server, working(stranger(tmp_path, paths, knows_head=True)) as worker:
        while not worker.lost:
            assert server.receive(0.02) == []
        assert "refused the workers' key" in str(worker.lost[0])


def test_an_observer_with_another_key_is_refused(paths: RunPaths, tmp_path: Path) -> None:
    with serving(paths) as server:
        admitting = threading.Thread(target=lambda: hear_nothing(server, 1.0))
        admitting.start()
        began = time.monotonic()
        with pytest.raises(TransportError, match="refused the workers' key"):
            ask(stranger(tmp_path, paths, knows_head=True), m.StatusRequest(), 30)
        assert time.monotonic() - began < 5
        admitting.join()


def test_a_peer_without_the_heads_key_is_ignored(paths: RunPaths, tmp_path: Path) -> None:
    with serving(paths) as server:
        listening = threading.Thread(target=lambda: hear_nothing(server, 0.6))
        listening.start()
        with pytest.raises(TransportError, match="handshake failed"):
            ask(stranger(tmp_path, paths, knows_head=False), m.StatusRequest(), 0.5)
        listening.join()


def test_an_unencrypted_peer_is_ignored(paths: RunPaths) -> None:
    with serving(paths) as server, raw_dealer(server, keys=None) as dealer:
        dealer.send(m.encode(0, m.StopRequest("please")))
        hear_nothing(server)


def test_a_head_accepts_only_messages_for_its_generation(paths: RunPaths) -> None:
    with serving(paths, generation=5) as server, raw_dealer(server, load_secrets(paths)) as dealer:
        for generation in (4, 6, 5, 0):
            dealer.send(m.encode(generation, m.Fetch("w", generation, 9)))
        dealer.send(m.encode(4, HELLO))
        heard = pump(server, lambda heard: HELLO in heard)
        assert heard == [m.Fetch("w", 5, 9), m.Fetch("w", 0, 9), HELLO]


@pytest.fixture
def shared(paths: RunPaths) -> "Iterator[tuple[HeadServer, zmq.Socket[bytes]]]":
    with serving(paths) as server, raw_dealer(server, load_secrets(paths)) as dealer:
        yield server, dealer


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.lists(st.one_of(st.binary(max_size=64), st.just(BOTTOMLESS)), min_size=1, max_size=4))
def test_garbage_from_an_authenticated_peer_is_counted_and_dropped(
    garbage: list[bytes], shared: tuple[HeadServer, "zmq.Socket[bytes]"]
) -> None:
    server, dealer = shared
    before = server.num_undecodable
    for data in garbage:
        dealer.send(data)
    dealer.send_multipart(garbage)
    dealer.send(m.encode(1, m.Goodbye("w", "after the garbage")))
    assert pump(server, bool) == [m.Goodbye("w", "after the garbage")]
    assert server.num_undecodable == before + len(garbage) + 1


def test_a_worker_that_sends_unreadable_messages_is_refused_and_exits(
    shared: tuple[HeadServer, "zmq.Socket[bytes]"],
) -> None:
    server, dealer = shared
    dealer.send(b"\xc1")
    dealer.send(m.encode(1, m.Goodbye("w", "after the garbage")))
    pump(server, bool)
    answer = m.decode(dealer.recv()).message
    assert isinstance(answer, m.Refused)
    assert "cannot be read" in answer.reason
    assert "install the same hpc_es everywhere" in answer.reason


def test_a_worker_that_comes_back_takes_its_identity_with_it(paths: RunPaths) -> None:
    keys = load_secrets(paths)
    with serving(paths) as server, raw_dealer(server, keys, b"same") as older:
        older.send(m.encode(0, m.Fetch("w", 1, 1)))
        hear(server, m.Fetch)
        with raw_dealer(server, keys, b"same") as newer:
            newer.send(m.encode(0, m.Fetch("w", 2, 2)))
            hear(server, m.Fetch)
            server.send(b"same", m.Rebuild(7))
            assert newer.poll(PATIENCE_S * 1000)
            assert m.decode(newer.recv()).message == m.Rebuild(7)
            assert not older.poll(50)


# --- what is resent -------------------------------------------------------------------------------------------


def test_a_report_is_resent_to_one_head_after_the_other_until_it_is_acknowledged(paths: RunPaths) -> None:
    report = m.Report("w", RESULT, 9.0, 1.0)
    with working(paths) as worker:
        with serving(paths, generation=1) as first:
            began = time.monotonic()
            worker.client.send(report)
            reports = [
                message for message in pump(first, lambda heard: len(heard) >= 4) if isinstance(message, m.Report)
            ]
            assert len(reports) >= 3  # no acknowledgement comes: it keeps sending
            assert not worker.client.flush(0)
        with serving(paths, generation=2) as second:
            heard = pump(second, lambda heard: len(heard) >= 2)
            assert isinstance(heard[0], m.Hello), "a worker introduces itself before it reports"
            assert heard[0].pid == 2, "and knows which head it talks to"
            assert heard[1].result == RESULT
            elapsed = time.monotonic() - began
            for age, sent in ((heard[1].started_age, 9.0), (heard[1].finished_age, 1.0)):
                assert sent + elapsed - 0.5 < age < sent + elapsed + 0.01
            second.send(b"w", m.Ack(EVAL_ID))
            assert worker.client.flush(PATIENCE_S)
            hear_only_heartbeats(second)
    assert worker.told == [m.Ack(EVAL_ID)]
    assert worker.lost == []


def test_a_hello_lists_unacknowledged_results(paths: RunPaths) -> None:
    """Otherwise a new head, which gets the Hello before the report, would assign the evaluation again."""
    with working(paths, holding=None) as worker:
        worker.client.send(m.Report("w", RESULT, 9.0, 1.0))
        with serving(paths, generation=1) as first:
            (hello, *_) = pump(first, lambda heard: len(heard) >= 2)
            assert hello.holding == EVAL_ID
            first.send(b"w", m.Ack(EVAL_ID))
            assert worker.client.flush(PATIENCE_S)
        with serving(paths, generation=2) as second:
            assert hear(second, m.Hello).holding is None


def test_a_report_made_without_a_head_is_sent_when_a_head_is_back(paths: RunPaths) -> None:
    with working(paths) as worker:
        worker.client.send(m.Report("w", RESULT, 9.0, 1.0))
        worker.client.send(m.HandBack("w", EVAL_ID, "nobody to hear it"))
        time.sleep(3 * BEAT_S)
        with serving(paths) as server:
            heard = pump(server, lambda heard: len(heard) >= 2)
            assert [type(message) for message in heard[:2]] == [m.Hello, m.Report]
            assert heard[1].started_age > 9 + 2 * BEAT_S


def test_a_connection_that_breaks_is_a_new_introduction_and_the_first_word(paths: RunPaths) -> None:
    """Messages in transit are lost, perhaps an assignment; only a new Hello informs the head."""
    with serving(paths) as server, forwarding(server) as forwarder:
        here = msgspec.structs.replace(read_rendezvous(paths.rendezvous), port=forwarder.port)
        paths.rendezvous.write_bytes(msgspec.json.encode(here))
        with working(paths) as worker:
            hear(server, m.Hello)
            forwarder.cut()
            wait_until(lambda: forwarder.num_turned_away)
            worker.client.send(m.Fetch("w", 1, 1))
            time.sleep(4 * BEAT_S)
            while server.receive(0):
                pass  # heartbeats from before
            forwarder.mend()
            ((_, envelope),) = server.receive(PATIENCE_S)
            assert isinstance(envelope.message, m.Hello)
            hear_only_heartbeats(server)
