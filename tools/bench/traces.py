"""Cost of traces: seconds per token of the agent loop with and without them, side by side on one engine.

    python tools/bench/traces.py [MODEL] [--episodes 12] [--rounds 5] [--kind vllm]

The same episodes of four turns are played with the same seeds, in turns; with traces, their file is written, too.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Row, arguments, show

from hpc_es.config.schema import Config
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.params.models import get_model
from hpc_es.records import Assignment, Candidate, EvalId
from hpc_es.traces import Trace, write_trace
from hpc_es.worker.rollout import Player

TURNS = 4


class Talks(Env):
    """A conversation of TURNS turns."""

    num_tasks = 10**6
    instant = True
    history = None

    def reset(self, task: int) -> Observation:
        self.turn = 0
        return Observation((Message("user", f"Tell me about the number {task}."),))

    def step(self, text: str) -> StepResult:
        self.turn += 1
        if self.turn == TURNS:
            return StepResult(None, 0.0, terminated=True, truncated=False)
        return StepResult(Observation((Message("user", "Go on."),)), 0.0, False, False)


async def play(engine: Engine, config: Config, num_episodes: int, seed: int, folder: Path) -> float:
    """Seconds per generated token."""
    player = Player(config, engine, lambda purpose: Talks())
    assignment = Assignment(EvalId(0, 0), 1, Candidate(0), tuple(range(num_episodes)), sampling_seed=seed)
    began = time.monotonic()
    played = await player.perform(assignment)
    if played.traces[0].turns:
        await asyncio.to_thread(write_trace, folder, Trace(assignment.eval_id, engine.digest, played.traces))
    return (time.monotonic() - began) / sum(episode.tokens_out for episode in played.episodes)


async def measure(config: Config, num_episodes: int, rounds: int, folder: Path) -> dict[bool, list[float]]:
    """Seconds per token in each round, with and without traces, after one round that warms up."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    engine: Any = await start_engine(config.model, config.engine, threads=2, traces=True)
    try:
        await engine.perturb(None)
        for number in range(rounds + 1):
            for traces in sorted(seconds, reverse=number % 2 == 1):
                engine._traces = traces
                seconds[traces].append(await play(engine, config, num_episodes, number, folder))
    finally:
        await engine.close()
    return {traces: measured[1:] for traces, measured in seconds.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="model folder; default: SmolLM2-135M in models/")
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=("vllm", "transformers"), default="vllm")
    options = parser.parse_args()
    model = options.model or get_model("smollm2-135m", Path("models", "smollm2-135m"))
    config = Config.model_validate(
        {
            "run": {"name": "bench", "num_updates": 1},
            "model": {"path": str(model), "dtype": "float32"},
            "task": {"env": f"{__name__}:Talks"},
            "sampling": {"temperature": 1.0, "max_tokens": 32},
            "engine": {"kind": options.kind, "max_concurrent": 16, "max_model_len": 512},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(measure(config, options.episodes, options.rounds, Path(folder)))
    usual, ours = (1e3 * statistics.median(seconds[traces]) for traces in (False, True))
    row = Row("a token with its trace", "ms", ours=ours, usual=usual, note="usual: without traces")
    show("traces", [row], as_json=options.json)


if __name__ == "__main__":
    main()
