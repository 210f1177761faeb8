"""Tokens per second of the agent loop compared with lock-step loops, side by side on one engine.

    python tools/bench/rollout.py [--engine vllm] [--episodes 48] [--at-once 16] [--rounds 3] [--serial]

Every episode has 15 turns, every step of the environment takes 50 ms, and answers are as uneven as those of real
agents: each token ends the answer with the same probability (`--mean-tokens`, at most `--max-tokens`). All loops play
the same episodes with the same seeds, `--at-once` at a time, and so generate the same tokens. In lock-step, a batch of
episodes waits for the longest answer of the turn and then for its environments, which step in parallel, or with
--serial also one after the other, like a plain loop over environments. The next batch begins when the last one has
ended.

Rounds of the loops take turns; the result is the median over the rounds of the ratio within a round.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hpc_es.config.schema import Config
from hpc_es.engine import start_engine
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.params.models import get_model
from hpc_es.records import Assignment, Candidate, EvalId
from hpc_es.worker.rollout import Player, episode_seeds

TURNS = 15
STEP_S = 0.05
VOCABULARY = 320
"""Size of the tiny Llama's vocabulary. At temperature 1 its answers are nearly uniform over it."""
GOAL = 1.5
OURS = "this loop"


class Waits(Env):
    """An environment whose steps take STEP_S seconds."""

    num_tasks = 10**6

    def reset(self, task: int) -> Observation:
        self.task, self.turn = task, 0
        return self._show()

    def step(self, text: str) -> StepResult:
        time.sleep(STEP_S)
        self.turn += 1
        done = self.turn == TURNS
        return StepResult(None if done else self._show(), 0.0, terminated=done, truncated=False)

    def _show(self) -> Observation:
        return Observation((Message("user", f"You are in room {self.turn} of house {self.task}. What do you do?"),))


async def lock_step(player: Player, assignment: Assignment, *, serial: bool) -> int:
    """Play all episodes, batch by batch and turn by turn. Returns the number of generated tokens."""
    at_once = player.config.engine.max_concurrent
    places = range(len(assignment.tasks))
    return sum([await _batch(player, assignment, places[k : k + at_once], serial) for k in places[::at_once]])


async def _batch(player: Player, assignment: Assignment, places: range, serial: bool) -> int:
    envs = [Waits() for _ in places]
    shown = [env.reset(assignment.tasks[place]) for env, place in zip(envs, places, strict=True)]
    sampling, tokens, loop = player.config.sampling, 0, asyncio.get_running_loop()
    with ThreadPoolExecutor(1 if serial else len(envs)) as threads:
        for turn in range(TURNS):
            answers = await asyncio.gather(
                *(
                    player.engine.generate(
                        _prompt(player, observation), sampling, seed=episode_seeds(assignment, place)(turn)
                    )
                    for place, observation in zip(places, shown, strict=True)
                )
            )
            steps = await asyncio.gather(
                *(
                    loop.run_in_executor(threads, env.step, answer.text)
                    for env, answer in zip(envs, answers, strict=True)
                )
            )
            shown = [step.observation for step in steps if step.observation is not None]
            tokens += sum(answer.tokens_out for answer in answers)
    return tokens


def _prompt(player: Player, observation: Observation) -> list[int]:
    tokens = player.encode(observation.messages)
    assert isinstance(tokens, list)  # text only, and no chat server
    return tokens


async def own_loop(player: Player, assignment: Assignment) -> int:
    return sum(episode.tokens_out for episode in await player.play(assignment))


async def compare(player: Player, num_episodes: int, rounds: int, serial: bool) -> dict[str, list[float]]:
    """Tokens per second of each loop in each round, after one round that warms up."""
    loops: dict[str, Callable[[Player, Assignment], Awaitable[int]]] = {
        OURS: own_loop,
        "lock-step": partial(lock_step, serial=False),
        "lock-step, serial": partial(lock_step, serial=True),
    }
    if not serial:
        del loops["lock-step, serial"]
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        tasks = tuple(range(num_episodes))
        assignment = Assignment(EvalId(0, 0), 1, Candidate(0), tasks, sampling_seed=number)
        for name, play in loops.items():
            began = time.monotonic()
            tokens = await play(player, assignment)
            seconds = time.monotonic() - began
            print(f"round {number}: {name:18} {tokens:6d} tokens in {seconds:6.2f} s, {tokens / seconds:7.1f} tokens/s")
            rates[name].append(tokens / seconds)
    return {name: measured[1:] for name, measured in rates.items()}


def make_config(arguments: argparse.Namespace, model: Path) -> Config:
    stop = [chr(ord("0") + place) for place in range(round(VOCABULARY / arguments.mean_tokens))]
    return Config.model_validate(
        {
            "run": {"name": "bench", "num_updates": 1},
            "model": {"path": str(model), "dtype": "float32"},
            "task": {"env": f"{__name__}:Waits"},
            "sampling": {"temperature": 1.0, "max_tokens": arguments.max_tokens, "stop": tuple(stop)},
            "engine": {"kind": arguments.engine, "max_concurrent": arguments.at_once, "max_model_len": 1024},
        }
    )


async def run(arguments: argparse.Namespace, model: Path) -> None:
    config = make_config(arguments, model)
    engine = await start_engine(config.model, config.engine, threads=arguments.threads)
    try:
        await engine.perturb(None)
        player = Player(config, engine, lambda kind: Waits())
        rates = await compare(player, arguments.episodes, arguments.rounds, arguments.serial)
    finally:
        await engine.close()
    ours = rates.pop(OURS)
    print(f"\n{arguments.engine}, {arguments.episodes} episodes, {arguments.at_once} at once, medians:")
    print(f"{OURS:18} {statistics.median(ours):8.1f} tokens/s")
    for name, theirs in rates.items():
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        verdict = "" if ratio >= GOAL else f", below the goal of {GOAL}"
        print(f"{name:18} {statistics.median(theirs):8.1f} tokens/s: {ratio:.2f} times as many here{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model", type=Path, help="model folder; default: a tiny Llama that is made for this run")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mean-tokens", type=float, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or get_model("tiny-llama", Path(scratch, "tiny-llama"))
        asyncio.run(run(arguments, model))


if __name__ == "__main__":
    main()
