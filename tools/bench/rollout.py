"""Tokens a second of the agent loop against loops in lock-step, side by side on one engine.

    python tools/bench/rollout.py [--engine vllm] [--model models/tiny-llama] [--episodes 16] [--rounds 3]

Every episode has 15 turns, every step of the environment takes 50 ms, and answers are as uneven as those of agents
are: each token ends the answer with the same probability (`--mean-tokens`, at most `--max-tokens`). In lock-step all
episodes wait for the longest answer of the turn and then for the environments, which take their steps at the same time
("lock-step"), or one after the other, as a plain loop over environments has it ("lock-step, serial").

All loops play the same episodes with the same seeds, so they generate about the same tokens; rounds take turns, and
the median of each loop counts. Tokens are those that the engine generated.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_es.config.schema import Config
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.es.records import Assignment, EvalId
from hpc_es.params.models import get_model
from hpc_es.worker.rollout import Player, episode_seeds

TURNS = 15
STEP_S = 0.05
VOCABULARY = 320
"""Of the tiny Llama, whose answers are nearly uniform over it at temperature 1."""
GOAL = 1.5


class Waits(Env):
    """Says where it is, and takes its time."""

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
    """All episodes turn by turn; returns the tokens that were generated."""
    envs = [Waits() for _ in assignment.tasks]
    shown = [env.reset(task) for env, task in zip(envs, assignment.tasks, strict=True)]
    sampling, tokens, loop = player.config.sampling, 0, asyncio.get_running_loop()
    with ThreadPoolExecutor(1 if serial else len(envs)) as threads:
        for turn in range(TURNS):
            prompts = [player.encode(observation.messages) for observation in shown]
            answers = await asyncio.gather(
                *(
                    player.engine.generate(prompt, sampling, seed=episode_seeds(assignment, position)(turn))
                    for position, prompt in enumerate(prompts)
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


async def own_loop(player: Player, assignment: Assignment) -> int:
    return sum(episode.tokens_out for episode in await player.play(assignment))


async def compare(engine: Engine, config: Config, num_episodes: int, rounds: int) -> dict[str, float]:
    """Tokens a second of each loop: the median over rounds."""
    player = Player(config, engine, lambda kind: Waits())
    loops: dict[str, Callable[[Player, Assignment], Awaitable[int]]] = {
        "this loop": own_loop,
        "lock-step": lambda player, assignment: lock_step(player, assignment, serial=False),
        "lock-step, serial": lambda player, assignment: lock_step(player, assignment, serial=True),
    }
    await engine.perturb(None)
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(-1, rounds):  # the first round warms up
        tasks = tuple(range(num_episodes))
        assignment = Assignment(EvalId(0, 0), 1, "train", None, tasks, sampling_seed=number + 1)
        for name, play in loops.items():
            began = time.monotonic()
            tokens = await play(player, assignment)
            seconds = time.monotonic() - began
            print(f"round {number}: {name:18} {tokens:6d} tokens in {seconds:6.2f} s, {tokens / seconds:7.1f} tokens/s")
            if number >= 0:
                rates[name].append(tokens / seconds)
    return {name: statistics.median(measured) for name, measured in rates.items()}


def make_config(arguments: argparse.Namespace, model: Path) -> Config:
    stop = [chr(ord("0") + place) for place in range(round(VOCABULARY / arguments.mean_tokens))]
    return Config.model_validate(
        {
            "run": {"name": "bench", "num_updates": 1},
            "model": {"path": str(model), "dtype": "float32"},
            "task": {"env": f"{__name__}:Waits"},
            "sampling": {"temperature": 1.0, "max_tokens": arguments.max_tokens, "stop": tuple(stop)},
            "engine": {"kind": arguments.engine, "max_concurrent": arguments.episodes, "max_model_len": 1024},
        }
    )


async def run(arguments: argparse.Namespace, model: Path) -> None:
    config = make_config(arguments, model)
    engine = await start_engine(config.model, config.engine, threads=arguments.threads)
    try:
        rates = await compare(engine, config, arguments.episodes, arguments.rounds)
    finally:
        await engine.close()
    ours = rates.pop("this loop")
    print(f"\n{arguments.episodes} episodes, {arguments.engine}: this loop {ours:.1f} tokens/s")
    for name, rate in rates.items():
        verdict = "" if ours >= GOAL * rate else f"   below the goal of {GOAL}"
        print(f"{name:18} {rate:8.1f} tokens/s: {ours / rate:.2f} times as many here{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model", type=Path, help="default: a tiny Llama, written for the occasion")
    parser.add_argument("--episodes", type=int, default=16)
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
