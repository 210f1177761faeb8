"""vLLM's own server as a frozen baseline: started once, SmolLM2 in float32 on the CPU."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import scripted
from builders import built_assignment
from repository import REAL_MODEL

from hpc_es import envs
from hpc_es.config.schema import Config, EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine import start_generator
from hpc_es.engine.base import Chat, Completion, Engine
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import EngineError
from hpc_es.params.models import get_model
from hpc_es.records import Episode, EvalId
from hpc_es.worker.rollout import Player

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1200)]

NAME, CONTEXT = "smollm2", 512
START_S = 400.0
NEAR_TIE = 1e-3
"""Two kernels may disagree on which of two tokens is likelier when their log-probabilities are as close as this."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = get_model("smollm2-135m", REAL_MODEL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"model": model, "served-model-name": NAME, "dtype": "float32", "max-model-len": CONTEXT, "port": port}
    options = [f"--{name}={value}" for name, value in given.items()]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--host=127.0.0.1",
                "--enforce-eager",
                *options,
            ],
            env={**os.environ, **quiet, **small},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    base = f"http://127.0.0.1:{port}/v1"
    try:
        _wait_for(base, server, log)
        yield base
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(base: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{base}/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def make_config(url: str, env: str, max_tokens: int = 12, **options: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "frozen", "num_updates": 1},
            "model": {"path": NAME},
            "task": {"env": env, "options": options},
            "sampling": {"max_tokens": max_tokens},
            "engine": {"kind": "endpoint", "url": url},
        }
    )


Heard = list[tuple[Chat, SamplingConfig, Completion]]


def play(config: Config, tasks: range, env: Env | None = None) -> tuple[tuple[Episode, ...], Heard]:
    """The episodes, and every question with its answer."""

    async def played() -> tuple[tuple[Episode, ...], Heard]:
        engine, heard = await start_generator(config.model, config.engine, threads=1), Heard()
        ask = engine.generate

        async def listening(chat: Chat, sampling: SamplingConfig, **others: Any) -> Completion:
            said = await ask(chat, sampling, **others)
            heard.append((chat, sampling, said))
            return said

        engine.generate = listening  # type: ignore[method-assign]
        player = Player(config, engine, lambda kind: env or envs.make_for(config, kind))
        assignment = built_assignment(EvalId(0, 0), 0, "eval", None, tuple(tasks), sampling_seed=3)
        try:
            return await player.play(assignment), heard
        finally:
            await engine.close()

    return asyncio.run(played())


def test_a_model_behind_the_server_answers_as_it_does_in_an_engine_of_ours(url):
    """Greedy, float32: the same tokens for the same messages, but where two are as likely as each other."""
    sudoku = make_config(url, "sudoku", size=4, blanks=2, prompt="short", examples=1)
    countdown = make_config(url, "countdown")
    heard: Heard = []
    for config in (sudoku, countdown):
        episodes, of_task = play(config, range(2))
        assert [episode.ended for episode in episodes].count("context") == 0
        assert sum(episode.tokens_out for episode in episodes) == sum(said.tokens_out for *_, said in of_task)
        heard += of_task
    assert len({said.text for *_, said in heard}) > 2

    async def compare() -> None:
        model = ModelConfig(path=str(REAL_MODEL), dtype="float32")
        engine = EngineConfig(kind="transformers", max_model_len=CONTEXT)
        ours = await start_generator(model, engine, threads=1)
        try:
            for chat, sampling, said in heard:
                await _check_same(ours, chat, sampling, said)
        finally:
            await ours.close()

    asyncio.run(compare())


async def _check_same(ours: Engine, chat: Chat, sampling: SamplingConfig, theirs: Completion) -> None:
    assert ours.tokenizer is not None
    encoded = ours.tokenizer.apply_chat_template(list(chat.messages), add_generation_prompt=True, return_dict=True)
    prompt = list(encoded["input_ids"])
    own = await ours.generate(prompt, sampling, seed=0)
    assert len(prompt) == theirs.tokens_in
    if own.text == theirs.text:
        assert (own.tokens_out, own.truncated) == (theirs.tokens_out, theirs.truncated)
        return
    said, expected = (ours.tokenizer.encode(text, add_special_tokens=False) for text in (theirs.text, own.text))
    shared = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(said, expected, strict=False))]
    best, second = sorted(await ours.logits([*prompt, *shared]))[:-3:-1]
    assert best - second < NEAR_TIE, f"{theirs.text!r} is not {own.text!r}, and it was no near tie"


def test_given_choices_are_answered_with_one_of_them(url):
    config = make_config(url, "sudoku", size=4, blanks=3, action="digit", prompt="short")
    episodes, heard = play(config, range(4))
    assert [(episode.turns, episode.ended) for episode in episodes] == [(3, "terminated")] * 4
    assert {said.text for *_, said in heard} <= set("1234")


class Grows(scripted.Steps):
    history = None
    limit = 30

    def _ask(self) -> Observation:
        return Observation((Message("user", "word " * 60),))

    def step(self, text: str) -> StepResult:
        return super().step(f"task {self.task} turn {self.turn}")


def test_a_conversation_that_outgrows_the_servers_context_ends_its_episode(url):
    (episode,), _ = play(make_config(url, "scripted:Grows", max_tokens=4), range(1), Grows())
    assert episode.ended == "context"
    assert 2 <= episode.turns < 30


def test_settings_that_the_server_refuses_are_reported_before_the_first_episode(url):
    async def facts_of(name: str) -> dict[str, str]:
        engine = await start_generator(ModelConfig(path=name), EngineConfig(kind="endpoint", url=url), threads=1)
        await engine.close()
        return engine.info.facts

    with pytest.raises(EngineError, match=rf"{url} has no model gpt-9 that chats .*it has {NAME}"):
        asyncio.run(facts_of("gpt-9"))
    facts = asyncio.run(facts_of(NAME))
    assert facts["card"].startswith("owned_by=vllm, root=")
    assert facts["card"].endswith(f"max_model_len={CONTEXT}")
    assert facts["fingerprint"].startswith("vllm-")
