"""An evaluation means something: all members of a version are asked the same, and one member answers alike twice.

The real SmolLM2 in vLLM, started once. What repeats are worth where they differ is `hpc-es probe noise`
(test_probe_run.py).
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from repository import REAL_MODEL

from hpc_es import envs, methods
from hpc_es.config.schema import Config, SamplingConfig
from hpc_es.engine import start_engine
from hpc_es.engine.base import Completion, Engine
from hpc_es.methods.base import Tasks
from hpc_es.params.models import get_model
from hpc_es.records import Assignment, Episode
from hpc_es.worker.rollout import Player, episode_seeds

CONFIG: dict[str, Any] = {
    "run": {"name": "same", "num_updates": 1, "seed": 3},
    "model": {"path": str(REAL_MODEL), "dtype": "float32"},
    "task": {
        "env": "sudoku",
        "chat": False,
        "options": {
            "size": 4,
            "blanks": 3,
            "action": "digit",
            "prompt": "short",
            "examples": 2,
            "partial_credit": True,
        },
    },
    "es": {"population": 4, "sigma": 0.02, "tasks_per_member": 6},
    "sampling": {"max_tokens": 1},
    "eval": {"num_tasks": 0},
    "engine": {"kind": "vllm", "max_concurrent": 6, "max_model_len": 160, "kv_cache_mib": 64, "block_size": 32},
}

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.vllm]

Turn = tuple[tuple[int, ...], int, str]
"""Prompt, sampling seed, answer."""


@dataclass
class Listener:
    """The engine as a player sees it, which remembers every turn. `instead` answers in the model's place."""

    engine: Engine
    instead: Callable[[Sequence[int], Sequence[str]], str] | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        if self.instead is None:
            completion = await self.engine.generate(prompt, sampling, seed=seed, choices=choices)
        else:
            completion = Completion(self.instead(prompt, choices or ()), len(prompt), 1, False)
        self.turns.append((tuple(prompt), seed, completion.text))
        return completion


@dataclass
class Bench:
    engine: Engine
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    def play(
        self, slot: int, max_concurrent: int, instead: Callable[[Sequence[int], Sequence[str]], str] | None = None
    ) -> tuple[tuple[Episode, ...], list[Turn]]:
        """Episodes and turns (in order of prompt and seed) of the member in a slot of version 0."""
        listener = Listener(self.engine, instead)
        assignment = assigned(slot)
        player = Player(config(max_concurrent), listener, lambda kind: envs.make_for(config(), kind))  # type: ignore[arg-type]
        self.run(self.engine.perturb(assignment.member))
        episodes = self.run(player.play(assignment))
        return episodes, sorted(listener.turns)


def config(max_concurrent: int = 6) -> Config:
    return Config.model_validate({**CONFIG, "engine": {**CONFIG["engine"], "max_concurrent": max_concurrent}})


def assigned(slot: int) -> Assignment:
    return methods.make(config(), Tasks(train=256, eval=0)).assign(0, slot, 1)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    get_model("smollm2-135m", REAL_MODEL)
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(config().model, config().engine, threads=1))
        yield Bench(engine, runner.run)
        runner.run(engine.close())


def outcome(episodes: Sequence[Episode]) -> list[tuple[Any, ...]]:
    """The result of an evaluation without its durations."""
    return [(e.task, e.reward, e.success, e.turns, e.tokens_in, e.tokens_out, e.ended) for e in episodes]


def by_prompt(prompt: Sequence[int], choices: Sequence[str]) -> str:
    """An answer that depends on nothing but what was asked."""
    return choices[hashlib.blake2b(repr(prompt).encode()).digest()[0] % len(choices)]


def test_all_members_of_a_version_are_asked_the_same_token_for_token(bench: Bench) -> None:
    assert len({assigned(slot).member for slot in range(4)}) == 4
    opening = [episode_seeds(assigned(0), position)(0) for position in range(6)]
    first = [{seed: prompt for prompt, seed, _ in bench.play(slot, 6)[1] if seed in opening} for slot in range(4)]
    assert first == [first[0]] * 4
    assert len(set(first[0].values())) == 6
    scripted = [bench.play(slot, 6, by_prompt) for slot in range(4)]
    assert [turns for _, turns in scripted] == [scripted[0][1]] * 4
    assert len(scripted[0][1]) == 18, "six tasks of three turns"
    assert [outcome(episodes) for episodes, _ in scripted] == [outcome(scripted[0][0])] * 4


def test_a_member_evaluated_again_gives_the_same_answers_and_the_same_fitness(bench: Bench) -> None:
    """Greedy, in float32. One sequence at a time by construction; many at once because what a batch changes of the
    logits is smaller than what parts two answers. Another member plays in between, and answers otherwise."""
    once, other, again = (bench.play(slot, 1) for slot in (1, 2, 1))
    assert outcome(again[0]) == outcome(once[0])
    assert again[1] == once[1]
    assert other[1] != once[1]
    for _ in range(2):
        many = bench.play(1, 6)
        assert outcome(many[0]) == outcome(once[0])
        assert many[1] == once[1]
