"""Plays one evaluation of `rogue:ENV` as a worker does, in front of a witness: `play_rogue.py ENV STEP_TIMEOUT`.

Prints what the two episodes scored, or ends as the witness of a command ends.
"""

import asyncio
import os
import signal
import sys

import scripted
from builders import built_assignment

from hpc_es import envs
from hpc_es.calls import CALLS
from hpc_es.config import Config
from hpc_es.envs.guard import process_guard
from hpc_es.errors import EnvError
from hpc_es.launch.witness import died_as_command, stand_witness
from hpc_es.records import EvalId
from hpc_es.worker.rollout import Player


class Guesser(scripted.Echo):
    """Answers with the first choice, or 1."""

    async def generate(self, prompt, sampling, *, seed, choices=None):
        completion = await super().generate(prompt, sampling, seed=seed)
        return type(completion)(choices[0] if choices else "1", 1, 1, truncated=False)


def main(env: str, step_timeout: float) -> int:
    options = {"size": 4, "blanks": 2, "action": "digit", "prompt": "short"}
    config = Config.model_validate(
        {
            "run": {"name": "rogue", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": f"rogue:{env}", "options": options, "chat": False, "step_timeout": step_timeout},
            "engine": {"kind": "transformers", "max_concurrent": 1, "max_model_len": 4096},
        }
    )
    before = signal.getsignal(signal.SIGTERM)
    player = Player(config, Guesser(), lambda kind: envs.make_for(config, kind))
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, (0, 1), sampling_seed=1)
    try:
        episodes = asyncio.run(player.play(assignment))
    except EnvError as error:
        print(f"void: {error}", flush=True)
        return 0
    except Exception:
        process_guard().end_if_damaged()  # as a command does (cli/failures.py)
        raise
    is_whole = signal.getsignal(signal.SIGTERM) is before
    print(f"played {len(episodes)}, handlers {'kept' if is_whole else 'lost'}", flush=True)
    return 0


if __name__ == "__main__":
    stand_witness(died_as_command)
    code = main(sys.argv[1], float(sys.argv[2]))
    CALLS.decide_to_end(code)
    os._exit(code)
