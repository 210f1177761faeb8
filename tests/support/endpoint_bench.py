"""Engines and players in front of a server of the tests' own (chat_server.py)."""

import asyncio
from typing import Any

import pytest
from builders import built_assignment
from chat_server import ChatServer, Reply, says

from hpc_es import envs
from hpc_es.config.schema import Config, EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine import start_generator
from hpc_es.engine.base import Chat, Completion, EngineInfo
from hpc_es.engine.endpoint import Endpoint
from hpc_es.envs.base import Env
from hpc_es.errors import EngineError
from hpc_es.records import Episode, EvalId
from hpc_es.worker.rollout import Player

CHAT = Chat(({"role": "user", "content": "What is the capital of France?"},), {})


def settings(server: ChatServer, **others: Any) -> EngineConfig:
    return EngineConfig.model_validate({"kind": "endpoint", "url": server.url, **others})


async def started(server: ChatServer, model: str = "m", **others: Any) -> Endpoint:
    engine = await start_generator(ModelConfig(path=model), settings(server, **others), threads=1)
    assert isinstance(engine, Endpoint)
    return engine


def ask(
    server: ChatServer, *, sampling: SamplingConfig | None = None, seed: int = 5, chat: Chat = CHAT, **others: Any
) -> Completion:
    """The answer of a fresh engine."""

    async def asked() -> Completion:
        engine = await started(server, **others.pop("engine", {}))
        try:
            return await engine.generate(chat, sampling or SamplingConfig(), seed=seed, **others)
        finally:
            await engine.close()

    return asyncio.run(asked())


def info_of(server: ChatServer, **others: Any) -> EngineInfo:
    """Facts of an engine that was started and closed."""

    async def started_and_closed() -> EngineInfo:
        engine = await started(server, **others)
        await engine.close()
        return engine.info

    return asyncio.run(started_and_closed())


def start_error(server: ChatServer, **others: Any) -> str:
    with pytest.raises(EngineError) as caught:
        info_of(server, **others)
    return str(caught.value)


def make_config(url: str, env: str = "scripted:Steps", engine: dict[str, Any] | None = None, **task: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "frozen", "num_updates": 1},
            "model": {"path": "m"},
            "task": {"env": env, **task},
            "engine": {"kind": "endpoint", "url": url, **(engine or {})},
        }
    )


def play(server: ChatServer, tasks: range | tuple[int, ...] = (5, 3, 8), env: Env | None = None, **others: Any):
    """(episodes, the engine that played them)."""

    async def played() -> tuple[tuple[Episode, ...], Endpoint]:
        config = make_config(server.url, **others)
        engine = await start_generator(config.model, config.engine, threads=1)
        try:
            player = Player(config, engine, lambda kind: env or envs.make_for(config, kind))
            assignment = built_assignment(EvalId(0, 0), 0, "eval", None, tuple(tasks), sampling_seed=11)
            return await player.play(assignment), engine
        finally:
            await engine.close()

    return asyncio.run(played())


def echo(body: dict[str, Any]) -> Reply:
    return says(body["messages"][-1]["content"])
