"""An endpoint that fails: what is tried again, what is told at the start, and what every fault leads to."""

import time

import pytest
from chat_server import HANGS, HANGS_UP, ChatServer, Reply, busy, completion, refuses, says
from endpoint_bench import ask, info_of, play, start_error

from hpc_es.engine import endpoint
from hpc_es.errors import ConfigError, EngineError

pytestmark = pytest.mark.usefixtures("quick_endpoint")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(body='{"choices": [{"mess'), "sent invalid JSON"),
        (Reply(body="<html>", headers={"content-type": "text/html"}), "sent no chat completion .*: <html>"),
        (Reply(body={}), "missing required field `choices`"),
        (Reply(body={"choices": []}), "length >= 1"),
        (Reply(body={"choices": "a"}), "Expected `array`"),
        (Reply(body={"choices": [{"message": "hi"}]}), "Expected `object`"),
        (Reply(body={"choices": [{"message": {"content": 5}}]}), "Expected `str"),
        (Reply(body=[1]), "Expected `object`, got `array`"),
        (Reply(body={"error": {"message": "no provider"}}), "no provider"),
        (says("a", tokens=(-1, 1)), "Expected `int` >= 0"),
        (says("a", tokens=(1, 10**30)), "Expected `int` <= 2147483647"),
        (says("half of it", finish="abort"), "broke an answer off"),
        (refuses(400, "presence_penalty is not for this model"), "HTTP 400: presence_penalty .*engine.extra"),
        (refuses(404, "The model `m` does not exist"), "has no model m that chats .*it has m"),
        (refuses(401, "who are you?"), "refuses access to m .*who are you.*OPENAI_API_KEY is not set"),
    ],
)
def test_a_failed_request_is_an_error_and_never_an_empty_answer(reply, words):
    with ChatServer(reply) as server, pytest.raises(EngineError, match=words):
        ask(server)


# what is tried again


@pytest.mark.parametrize("fault", [busy(429), busy(500), busy(503), HANGS_UP])
def test_a_server_that_is_busy_or_gone_for_a_while_is_asked_again(fault):
    with ChatServer(says("at last"), fault, fault, fault, fault) as server:
        assert ask(server).text == "at last"
    assert len(server.asked) == 5
    assert all(asked == server.asked[0] or asked.body == server.asked[0].body for asked in server.asked)


def test_an_answer_that_takes_too_long_is_asked_for_again():
    with ChatServer(says("at last"), HANGS) as server:
        assert ask(server, engine={"request_timeout": 0.3}).text == "at last"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (busy(429), "3 times in a row, at last with HTTP 429: too much to do"),
        (busy(502), "3 times in a row, at last with HTTP 502"),
        (HANGS_UP, "did not answer, 3 times in a row"),
        (HANGS, r"did not answer, 3 times in a row \(ReadTimeout; engine.request_timeout=0.2 s\)"),
    ],
)
def test_a_server_that_keeps_failing_is_a_fault_that_names_its_last_response(monkeypatch, fault, words):
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 2)
    with ChatServer(fault) as server, pytest.raises(EngineError, match=words):
        play(server, engine={"request_timeout": 0.2})


def test_an_episode_does_not_wait_for_ever():
    with ChatServer(HANGS) as server, pytest.raises(EngineError, match=r"no answer within task\.episode_timeout=0.3 s"):
        play(server, episode_timeout=0.3)


# how it starts


def test_a_model_that_the_server_does_not_have_is_named_with_those_that_it_has():
    with ChatServer() as server:
        server.greeting = refuses(404, "The model `n` does not exist")
        found = start_error(server, model="n")
    assert found == f"{server.url} has no model n that chats (HTTP 404: The model `n` does not exist); it has m"


def test_a_server_that_answers_for_a_model_that_it_does_not_list_is_worth_a_warning(caplog):
    with ChatServer() as server:
        info_of(server, model="alias")
    assert "answers for alias, but lists only m" in caplog.text


@pytest.mark.parametrize("listing", [Reply(404, "Not Found"), Reply(body="<html>"), Reply(body={"data": 5}), busy(500)])
def test_a_server_without_a_list_of_models_is_used_all_the_same(listing):
    with ChatServer() as server:
        server.listing = listing
        assert ask(server).text == "hello"


def test_a_wrong_base_url_is_guessed_at():
    with ChatServer() as server:
        server.url = server.url.removesuffix("/v1") + "/nothing/here"
        server.listing = Reply(404)
        server.reply_to = lambda asked: Reply(404, {"detail": "Not Found"})
        assert "is that its base URL, as in http://host:8000/v1?" in start_error(server)


def test_a_refused_key_is_reported_at_the_start():
    with ChatServer() as server:
        server.listing = refuses(401, "bad key")
        assert (
            "refuses access to m (HTTP 401: bad key); the environment variable OPENAI_API_KEY is not set"
            in start_error(server)
        )


def test_a_missing_server_is_reported_within_seconds():
    with ChatServer() as server:
        pass
    began = time.monotonic()
    assert "was not reached or did not answer, 3 times in a row (ConnectError" in start_error(server)
    assert time.monotonic() - began < 10


def test_a_server_that_never_answers_is_reported_within_seconds(monkeypatch):
    monkeypatch.setattr(endpoint, "LIST_TIMEOUT_S", 0.3)
    with ChatServer() as server:
        server.listing = HANGS
        assert "asked for its models, did not answer within 0.3 s" in start_error(server)
        server.listing, server.greeting = Reply(404), HANGS
        assert "m at http" in start_error(server, request_timeout=0.3)


def test_facts_describe_the_server():
    with ChatServer() as server:
        server.listing = Reply(
            body={"data": [{"id": "m", "owned_by": "vllm", "root": "org/model", "max_model_len": 512}]}
        )
        server.greeting = Reply(body={**completion("2"), "system_fingerprint": "vllm-0.32.0"})
        info = info_of(server)
        other = info_of(server, model="another")
    facts = {name: fact for name, fact in info.facts.items() if name != "openai"}
    assert facts == {
        "engine": "endpoint",
        "url": server.url,
        "model": "m",
        "listed": "m",
        "card": "owned_by=vllm, root=org/model, max_model_len=512",
        "fingerprint": "vllm-0.32.0",
        "choices": "constrained generation, not ranked by log-probability",
    }
    assert 0 < info.base_digest < 2**64
    assert info.base_digest != other.base_digest


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("hpc_es.engine.find_spec", lambda name: None)
    with ChatServer() as server, pytest.raises(ConfigError, match=r"pip install 'hpc_es\[endpoint\]'"):
        info_of(server)
