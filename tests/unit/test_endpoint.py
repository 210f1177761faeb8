"""A model behind an endpoint: what it is sent, what counts as its answer, and how it plays."""

import asyncio
import base64
import threading
from typing import Any

import pytest
import scripted
from builders import built_assignment
from chat_server import ChatServer, Reply, refuses, says
from endpoint_bench import CHAT, ask, echo, info_of, make_config, play, started

from hpc_es import envs
from hpc_es.config import load
from hpc_es.config.schema import Config, SamplingConfig
from hpc_es.engine import start_engine, start_generator
from hpc_es.engine.base import Chat, Completion, Generator, WeightHost
from hpc_es.envs.base import Message, Observation, StepResult
from hpc_es.errors import ConfigError, ContextFull, EngineError, EnvError
from hpc_es.launch import prepare
from hpc_es.paths import RunPaths
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.records import EvalId, Member
from hpc_es.worker.rollout import Player

pytestmark = pytest.mark.usefixtures("quick_endpoint")


# what it is told


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.kind=endpoint"], "engine.url is missing: engine.kind=endpoint needs"),
        (["engine.url=http://a/v1"], "engine.url=http://a/v1 is for engine.kind=endpoint, not for vllm"),
        (["engine.kind=endpoint", "engine.url=ftp://a/v1"], r"engine.url=ftp://a/v1 \(override\) must be a base URL"),
        (["engine.kind=endpoint", "engine.url=localhost:8000"], "must be a base URL with http"),
        (["engine.kind=endpoint", "engine.url=http://a:99999"], "must be a base URL with http"),
        (["engine.kind=endpoint", "engine.url=http://u:secret@a/v1"], "URL without user"),
        (["engine.kind=endpoint", "engine.url=http://a/v1?key=secret"], "URL without user"),
        (["engine.api_key_env=sk-secret"], "never the key itself"),
    ],
)
def test_a_url_belongs_to_an_endpoint_and_secrets_belong_nowhere(tmp_path, overrides, words):
    file = tmp_path / "config.yaml"
    file.write_text("run: {name: a, num_updates: 1}\nmodel: {path: m}\ntask: {env: sudoku}\n")
    with pytest.raises(ConfigError, match=words) as caught:
        load(file, overrides)
    assert "secret" not in str(caught.value)


def test_the_context_of_an_endpoint_is_its_own_matter():
    config = make_config("https://a.example/v1/", engine={"max_model_len": 16})
    assert (config.engine.url, config.sampling.max_tokens) == ("https://a.example/v1", 64)


# what is sent


def test_every_setting_reaches_the_server_and_its_answer_comes_back_with_its_tokens():
    sampling = SamplingConfig(
        temperature=0.5, top_p=0.9, top_k=20, presence_penalty=1.5, max_tokens=9, stop=("\n", "END")
    )
    with ChatServer(says("Paris", tokens=(21, 2))) as server:
        answer = ask(server, sampling=sampling, seed=2**64 - 1, chat=Chat(CHAT.messages, {"enable_thinking": False}))
    assert answer == Completion("Paris", 21, 2, truncated=False)
    (asked,) = server.asked
    assert asked.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "presence_penalty": 1.5,
        "max_tokens": 9,
        "stop": ["\n", "END"],
        "seed": 2**63 - 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_parameters_unknown_to_openai_are_left_out_unless_set():
    with ChatServer() as server:
        ask(server)
    assert server.asked[0].body.keys() == {
        "model", "messages", "temperature", "top_p", "presence_penalty", "max_tokens", "seed",
    }  # fmt: skip


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_server_is_told_to_apply_no_penalties_instead_of_the_checkpoints(owner):
    with ChatServer() as server:
        server.listing = Reply(body={"data": [{"id": "m", "owned_by": owner}]})
        ask(server)
        ask(server, sampling=SamplingConfig(top_k=7))
    sent = [(asked.body["top_k"], asked.body["min_p"], asked.body["repetition_penalty"]) for asked in server.asked]
    assert sent == [(-1, 0.0, 1.0), (7, 0.0, 1.0)]


def test_engine_extra_overrides_a_request_and_null_removes_a_field():
    extra = {"max_tokens": None, "max_completion_tokens": 4096, "reasoning_effort": "low"}
    with ChatServer() as server:
        ask(server, engine={"extra": extra})
    body = server.asked[0].body
    assert (body.get("max_tokens"), body["max_completion_tokens"], body["reasoning_effort"]) == (None, 4096, "low")


def test_the_key_goes_into_the_header_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret\n")
    with ChatServer(refuses(400, "sk-secret is not allowed to do this")) as server:
        with pytest.raises(EngineError, match=r"\(the key\) is not allowed") as caught:
            ask(server, engine={"api_key_env": "MY_KEY"})
        assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
        assert "secret" not in str(caught.value)
        info = info_of(server, api_key_env="MY_KEY")
    assert "secret" not in repr(info)


def test_without_a_key_no_header_is_sent():
    with ChatServer() as server:
        ask(server)
    assert "authorization" not in server.asked[0].headers


def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    with (
        ChatServer() as server,
        pytest.raises(ConfigError, match="OPENAI_API_KEY holds what cannot be a key") as caught,
    ):
        ask(server)
    assert "schl" not in str(caught.value)


def test_images_go_as_data_urls_before_the_text():
    class Shows(scripted.Steps):
        def reset(self, task: int) -> Observation:
            return Observation((Message("user", "what is it?", images=(b"\x89PNG\r\n", b"\xff\xd8jpeg")),))

        def step(self, text: str) -> StepResult:
            return StepResult(None, 1.0, True, False)

    with ChatServer() as server:
        play(server, (0,), Shows())
    *images, text = server.asked[0].body["messages"][0]["content"]
    assert text == {"type": "text", "text": "what is it?"}
    png, jpeg = (image["image_url"]["url"] for image in images)
    assert png == "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n").decode()
    assert jpeg.startswith("data:image/jpeg;base64,")


# what counts as an answer


def test_an_answer_that_was_cut_is_truncated_and_one_without_text_is_empty():
    with ChatServer(says(None, finish="length")) as server:
        assert ask(server) == Completion("", 7, 3, truncated=True)


def test_where_the_server_counts_no_tokens_there_are_none(caplog):
    with ChatServer(says("hi", tokens=None)) as server:
        server.greeting = says("2", tokens=None)
        assert ask(server) == Completion("hi", 0, 0, truncated=False)
    assert "does not count tokens" in caplog.text


def test_an_answer_that_cannot_be_written_loses_what_cannot():
    with ChatServer(Reply(body='{"choices": [{"message": {"content": "a\\ud800b"}}]}')) as server:
        assert ask(server).text == "a?b"


# what it is not


def test_an_endpoint_is_the_centre_of_version_0_and_nothing_else(tmp_path):
    async def try_all(server: ChatServer) -> None:
        engine = await started(server)
        assert isinstance(engine, Generator)
        assert not isinstance(engine, WeightHost)
        with pytest.raises(EngineError, match="takes messages, not token ids"):
            await engine.generate([1], SamplingConfig(), seed=0)
        solo = Solo(Recorded.frozen(RunPaths(tmp_path), make_config(server.url)), engine, None)
        await solo.become(0, None)
        assignment = built_assignment(EvalId(0, 0), 0, "eval", None, (3,), sampling_seed=1)
        assert (await solo.play(assignment)).digest == engine.info.base_digest
        for version, member in ((1, None), (0, Member(seed=1, sign=1, sigma=1e-3))):
            with pytest.raises(EngineError, match=f"the weights behind {server.url} are not accessible"):
                await solo.become(version, member)
        await engine.close()

    with ChatServer(echo) as server:
        asyncio.run(try_all(server))
        config = make_config(server.url)
        with pytest.raises(ConfigError, match=rf"not accessible; `hpc-es eval {server.url} --model m` measures it"):
            asyncio.run(start_engine(config.model, config.engine, threads=1))


def test_an_endpoint_leaves_no_traces():
    with pytest.raises(ValueError, match=r"store\.traces=true needs the tokens that were sampled"):
        Config.model_validate({**make_config("http://a/v1").model_dump(), "store": {"traces": True}})


def test_a_run_that_would_train_an_endpoint_is_refused_before_it_starts():
    with pytest.raises(ConfigError, match=r"a frozen endpoint cannot be trained; `hpc-es eval http://a/v1 --model m`"):
        prepare.check(make_config("http://a/v1"))


def test_an_endpoint_takes_chats_only():
    with (
        ChatServer() as server,
        pytest.raises(ConfigError, match=r"task\.chat=false: engine\.kind=endpoint takes chats"),
    ):
        play(server, chat=False)


# given choices


def test_a_server_that_can_keep_the_model_to_given_choices_does():
    with ChatServer(lambda body: says(body["structured_outputs"]["choice"][1])) as server:
        sampling = SamplingConfig(max_tokens=1, stop=("n",), presence_penalty=1)
        assert ask(server, choices=("go north", "go south"), sampling=sampling).text == "go south"
    (asked,) = server.asked
    assert (asked.body["max_tokens"], asked.body.get("stop"), asked.body["presence_penalty"]) == (9, None, 0)


def older_vllm(body: dict[str, Any]) -> Reply:
    return says(body["guided_choice"][0] if "guided_choice" in body else "I would go north.")


@pytest.mark.parametrize("strict", [True, False])
def test_an_older_server_is_asked_in_its_own_words_and_remembered(strict):
    def answer(body: dict[str, Any]) -> Reply:
        return refuses(400, "unknown field") if strict and "structured_outputs" in body else older_vllm(body)

    async def ask_twice(server: ChatServer) -> list[str]:
        engine = await started(server)
        answers = [await engine.generate(CHAT, SamplingConfig(), seed=n, choices=("a", "b")) for n in range(2)]
        await engine.close()
        return [answer.text for answer in answers]

    with ChatServer(answer) as server:
        assert asyncio.run(ask_twice(server)) == ["a", "a"]
    assert ["structured_outputs" in asked.body for asked in server.asked] == [True, False, False]


@pytest.mark.parametrize("reply", [says("I would go north."), refuses(400, "Unrecognized request argument")])
def test_a_server_that_cannot_choose_is_a_mistake_in_the_configuration(reply):
    with ChatServer(reply) as server, pytest.raises(ConfigError, match=r"does not keep m to given choices.*free"):
        ask(server, choices=("a", "b"))


@pytest.mark.parametrize("choices", [(), ("a", ""), ("a", "b", "a")])
def test_choices_that_are_none_are_a_fault_of_the_environment(choices):
    with ChatServer() as server, pytest.raises(EnvError, match="choices"):
        ask(server, choices=choices)


# how it plays


def test_episodes_are_played_as_with_any_engine():
    with ChatServer(echo) as server:
        episodes, _ = play(server, chat_options={"enable_thinking": False})
    assert [(e.task, e.reward, e.turns, e.success, e.ended) for e in episodes] == [
        (task, float(task), 3, True, "terminated") for task in (5, 3, 8)
    ]
    assert (episodes[0].tokens_in, episodes[0].tokens_out) == (21, 9)
    assert all(asked.body["chat_template_kwargs"] == {"enable_thinking": False} for asked in server.asked)
    assert len({asked.body["seed"] for asked in server.asked}) == 9


class Remembers(scripted.Steps):
    history = 2
    limit = 5
    max_prompt_tokens = 1

    def step(self, text: str) -> StepResult:
        return super().step(f"task {self.task} turn {self.turn}")


def test_history_is_limited_by_turns_since_tokens_cannot_be_counted():
    with ChatServer() as server:
        play(server, (4,), Remembers(), engine={"max_model_len": 16})
    roles = [[message["role"][0] for message in asked.body["messages"]] for asked in server.asked]
    assert ["".join(turn) for turn in roles] == ["u", "uau", "uauau", "uauau", "uauau"]
    assert server.asked[-1].body["messages"][1] == {"role": "assistant", "content": "hello"}


TOO_LONG = {
    "vllm": "This model's maximum context length is 512 tokens. However, your prompt contains at least 513 tokens",
    "llama.cpp": "the request exceeds the available context size, try increasing it",
    "openai": "Please reduce the length of the messages.",
}


@pytest.mark.parametrize("server_kind", TOO_LONG)
def test_a_conversation_that_outgrows_the_context_ends_its_episode_with_the_reward_so_far(server_kind):
    def answer(body: dict[str, Any]) -> Reply:
        is_long = len(body["messages"][-1]["content"]) > 5000
        return refuses(400, TOO_LONG[server_kind]) if is_long else says("hm")

    with ChatServer(answer) as server:
        (episode,), _ = play(server, (1,), scripted.TooLong())
    assert (episode.ended, episode.reward, episode.turns) == ("context", 0.25, 1)


def test_an_answer_for_which_there_is_not_enough_room_gets_what_there_is():
    def answer(body: dict[str, Any]) -> Reply:
        refusal = refuses(400, "you requested 600 tokens", code="context_length_exceeded")
        return refusal if "max_tokens" in body else says("as much as fits", finish="length")

    with ChatServer(answer) as server:
        assert ask(server).text == "as much as fits"


def test_answers_that_could_never_fit_are_a_mistake_and_no_outcome():
    message = "max_tokens=600 cannot be greater than max_model_len=512. Please request fewer output tokens."
    with ChatServer(refuses(400, message)) as server, pytest.raises(EngineError, match="max_tokens=600") as caught:
        ask(server)
    assert not isinstance(caught.value, ContextFull)


def test_a_message_that_cannot_be_sent_is_a_fault_of_the_environment():
    with ChatServer() as server, pytest.raises(EnvError, match="cannot be sent"):
        ask(server, chat=Chat(({"role": "user", "content": "\ud800"},), {}))


@pytest.mark.parametrize("at_once", [64, 4])
def test_a_slow_server_gets_at_most_the_allowed_number_of_requests_at_once(at_once):
    """It answers nobody until so many have asked: whoever held up the event loop would keep the others from asking."""
    all_asked = threading.Barrier(at_once)
    waits = iter(range(at_once))

    def slowly(body: dict[str, Any]) -> Reply:
        if next(waits, None) is not None:
            all_asked.wait(60)
        return Reply(body=echo(body).body, after_s=0.05)

    async def played(server: ChatServer) -> None:
        config = make_config(server.url, env="scripted:Instant", engine={"max_concurrent": at_once})
        engine = await start_generator(config.model, config.engine, threads=1)
        player = Player(config, engine, lambda kind: envs.make_for(config, kind))
        tasks = tuple(range(at_once))
        await player.play(built_assignment(EvalId(0, 0), 0, "eval", None, tasks, sampling_seed=1))
        # the engine keeps to the limit by itself, too
        await asyncio.gather(*(engine.generate(CHAT, SamplingConfig(), seed=n) for n in range(2 * at_once)))
        await engine.close()

    with ChatServer(slowly) as server:
        asyncio.run(played(server))
    assert server.most == at_once
    assert len(server.asked) == 5 * at_once
