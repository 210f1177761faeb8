"""How a worker finds its head, whom it obeys, when it gives up; and that nobody waits for the dead."""

import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from control_peers import (
    BEAT_S,
    HOST,
    PATIENCE_S,
    hear,
    hear_nothing,
    pump,
    raw_dealer,
    serving,
    wait_until,
    working,
)

from hpc_es.errors import Superseded, TransportError
from hpc_es.paths import RunPaths
from hpc_es.transport import messages as m
from hpc_es.transport.control import HeadServer
from hpc_es.transport.observer import ask
from hpc_es.transport.rendezvous import Rendezvous, publish, read_rendezvous
from hpc_es.transport.secrets import create_secrets, load_secrets


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    create_secrets(paths)
    return paths


# --- rendezvous -----------------------------------------------------------------------------------------------


def test_a_reader_of_the_rendezvous_never_sees_half_of_it(paths: RunPaths) -> None:
    here = Rendezvous("run", 1, HOST, 1, 1, "node1")
    publish(paths.rendezvous, here)
    ended, seen = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            seen.append(read_rendezvous(paths.rendezvous))

    reader = threading.Thread(target=read)
    reader.start()
    for generation in range(2, 40):
        publish(paths.rendezvous, msgspec.structs.replace(here, generation=generation, run_id="run" * generation))
    ended.set()
    reader.join()
    assert len(seen) > 40
    assert None not in seen
    assert sorted(entry.name for entry in paths.root.iterdir()) == ["rendezvous.json", "secrets"]


def test_an_older_head_cannot_publish_over_a_newer_one(paths: RunPaths) -> None:
    with serving(paths, generation=3):
        published = paths.rendezvous.read_bytes()
        with pytest.raises(Superseded, match="generation 3"):
            HeadServer(paths, 2, "run", HOST)
        assert paths.rendezvous.read_bytes() == published


def test_an_address_that_is_not_ours_is_refused_with_the_remedy(paths: RunPaths) -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 198\.51\.100\.7 .*transport\.host"):
        HeadServer(paths, 1, "run", "198.51.100.7")
    assert not paths.rendezvous.exists()


# --- whom a worker obeys --------------------------------------------------------------------------------------


def test_a_worker_waits_for_a_head_and_follows_a_newer_one_while_the_older_lives(paths: RunPaths) -> None:
    with working(paths) as worker:
        time.sleep(2 * BEAT_S)
        with serving(paths, generation=1) as older:
            hear(older, m.Hello)
            with serving(paths, generation=2) as newer:
                assert hear(newer, m.Hello).pid == 2
                older.send(b"w", m.Leave("from the past", False))
                newer.send(b"w", m.Rebuild(1))
                wait_until(lambda: worker.told)
                time.sleep(BEAT_S)
                assert worker.told == [m.Rebuild(1)]
                while older.receive(0):
                    pass  # what was said before the newer head came
                hear_nothing(older, 4 * BEAT_S)


def test_messages_of_an_older_generation_are_ignored(paths: RunPaths) -> None:
    with working(paths) as worker, serving(paths, generation=2) as server:
        hear(server, m.Hello)
        server.generation = 1
        server.send(b"w", m.Leave("from the past", False))
        server.generation = 2
        server.send(b"w", m.Rebuild(1))
        wait_until(lambda: worker.told)
        assert worker.told == [m.Rebuild(1)]


def test_a_rendezvous_of_an_older_generation_is_not_followed(paths: RunPaths) -> None:
    with working(paths) as worker, serving(paths, generation=2) as server:
        hear(server, m.Hello)
        old = Rendezvous("run", 1, HOST, 9, 1, "node1")
        paths.rendezvous.write_bytes(msgspec.json.encode(old))
        time.sleep(3 * BEAT_S)
        server.send(b"w", m.Rebuild(1))
        wait_until(lambda: worker.told)


# --- who is alive ---------------------------------------------------------------------------------------------


def test_heartbeats_continue_while_the_worker_computes(paths: RunPaths) -> None:
    with serving(paths) as server, working(paths):
        hear(server, m.Hello)
        while server.receive(0):
            pass
        num_beats, deadline = 0, time.monotonic() + PATIENCE_S
        while num_beats < 8:
            assert time.monotonic() < deadline
            pause = time.monotonic() + 4 * BEAT_S
            while time.monotonic() < pause:
                sum(range(1000))  # holds the interpreter as a busy worker does
            num_beats += sum(isinstance(envelope.message, m.Heartbeat) for _, envelope in server.receive(0))


def test_a_head_whose_loop_is_alive_is_not_lost_even_when_it_has_nothing_to_say(paths: RunPaths) -> None:
    with serving(paths) as server, working(paths, head_timeout_s=1.0) as worker:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            server.receive(BEAT_S)
        assert worker.lost == []
        assert worker.told == []


def test_a_head_whose_loop_hangs_is_lost_once_and_in_time(paths: RunPaths) -> None:
    with serving(paths) as server, working(paths, head_timeout_s=8 * BEAT_S) as worker:
        hear(server, m.Hello)
        began = time.monotonic()
        wait_until(lambda: worker.lost)
        assert 5 * BEAT_S < time.monotonic() - began < 8 * BEAT_S + 5
        time.sleep(10 * BEAT_S)
        assert len(worker.lost) == 1
        assert "transport.head_timeout" in str(worker.lost[0])


def test_a_head_that_never_comes_is_lost_in_time(paths: RunPaths) -> None:
    with working(paths, head_timeout_s=4 * BEAT_S) as worker:
        wait_until(lambda: worker.lost)
        assert "rendezvous.json does not exist" in str(worker.lost[0])


def test_a_callback_that_fails_is_reported_and_not_swallowed(paths: RunPaths) -> None:
    with serving(paths) as server, working(paths) as worker:
        hear(server, m.Hello)
        worker.client._on_message = worker.fail
        server.send(b"w", m.Rebuild(1))
        wait_until(lambda: worker.lost)
        assert "a fault in the callback" in str(worker.lost[0])


# --- nothing hangs --------------------------------------------------------------------------------------------


def test_asking_where_no_head_ever_was_says_how_to_start_one(paths: RunPaths) -> None:
    with pytest.raises(TransportError, match=r"rendezvous\.json does not exist.*hpc-es run"):
        ask(paths, m.StatusRequest(), 30)


def test_asking_where_the_rendezvous_cannot_be_read_is_an_error_of_ours(paths: RunPaths) -> None:
    paths.rendezvous.mkdir()
    with pytest.raises(TransportError, match=r"rendezvous\.json cannot be read"):
        ask(paths, m.StatusRequest(), 30)


def test_asking_a_dead_head_ends_in_time(paths: RunPaths) -> None:
    with serving(paths):
        pass
    began = time.monotonic()
    with pytest.raises(TransportError, match="nothing listens at 127"):
        ask(paths, m.StatusRequest(), 0.3)
    assert time.monotonic() - began < 5


def test_asking_a_head_that_is_stopped_ends_in_time(paths: RunPaths) -> None:
    with socket.create_server((HOST, 0)) as stopped:  # its system accepts connections, it does not speak
        publish(paths.rendezvous, Rendezvous("run", 1, HOST, stopped.getsockname()[1], 1, "node1"))
        began = time.monotonic()
        with pytest.raises(TransportError, match="no handshake follows"):
            ask(paths, m.StatusRequest(), 0.3)
        assert time.monotonic() - began < 5


def test_sending_to_a_peer_that_is_gone_or_does_not_read_never_blocks(paths: RunPaths) -> None:
    big = m.Refused("x" * 10_000)
    with serving(paths) as server, raw_dealer(server, load_secrets(paths), b"deaf") as deaf:
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.send(m.encode(0, m.Goodbye("deaf", "introduces itself")))
        hear(server, m.Goodbye)
        began = time.monotonic()
        for _ in range(3000):
            server.send(b"deaf", big)
            server.send(b"nobody", big)
        assert time.monotonic() - began < 5


def test_a_wake_from_another_thread_ends_the_wait(paths: RunPaths) -> None:
    with serving(paths) as server:
        server.wake()
        began = time.monotonic()
        assert server.receive(30) == []
        timer = threading.Timer(0.1, server.wake)
        timer.start()
        assert server.receive(30) == []
        assert 0.09 < time.monotonic() - began < 5
        timer.join()
        assert server.receive(0.05) == []
    server.wake()  # after the end: nobody sleeps, nothing happens


def test_more_messages_than_one_batch_come_in_several(paths: RunPaths) -> None:
    with serving(paths) as server, raw_dealer(server, load_secrets(paths)) as dealer:
        for first in range(600):
            dealer.send(m.encode(0, m.Fetch("w", first, first)))
        firsts: list[int] = []
        while len(firsts) < 600:
            received = server.receive(PATIENCE_S)
            assert 0 < len(received) <= 256
            firsts += [envelope.message.first for _, envelope in received]
        assert firsts == list(range(600))


def test_messages_sent_before_closing_arrive(paths: RunPaths) -> None:
    farewells = [m.Goodbye("w", "x" * 20_000) for _ in range(200)] + [m.Goodbye("w", "done")]
    with serving(paths) as server:
        with working(paths) as worker:
            hear(server, m.Hello)
            for farewell in farewells:
                worker.client.send(farewell)
        assert pump(server, lambda heard: len(heard) == len(farewells)) == farewells


def test_the_heads_messages_sent_before_closing_arrive(paths: RunPaths) -> None:
    farewells = [m.Leave("x" * 2_000_000, False) for _ in range(5)] + [m.Leave("the end", True)]
    with working(paths) as worker:
        with serving(paths) as server:
            hear(server, m.Hello)
            for farewell in farewells:
                server.send(b"w", farewell)
        wait_until(lambda: len(worker.told) == len(farewells))
        assert worker.told == farewells


def test_closing_takes_no_longer_than_the_farewell_timeout(paths: RunPaths) -> None:
    with working(paths) as worker:
        with serving(paths) as server:
            hear(server, m.Hello)
        worker.client.send(m.Goodbye("w", "nobody is there"))
        began = time.monotonic()
        worker.client.close()
        worker.client.close()
        assert time.monotonic() - began < 3
