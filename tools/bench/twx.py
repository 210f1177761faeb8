"""Cost of TextWorldExpress: its start, its memory, and a step, with many episodes at once in one Java process.

python tools/bench/twx.py [game] [episodes at once] [rounds]
"""

import random
import sys
import threading
import time
from pathlib import Path

from hpc_es import envs
from hpc_es.envs import twx_jvm
from hpc_es.envs.base import Observation

GAME = sys.argv[1] if len(sys.argv) > 1 else "coin"
AT_ONCE = int(sys.argv[2]) if len(sys.argv) > 2 else 64
ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 16


def resident_mib() -> float:
    assert twx_jvm._shared is not None
    pages = int(Path(f"/proc/{twx_jvm._shared.process.pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


def play(task: int, seconds: list[float]) -> None:
    """Play one episode of random actions."""
    env = envs.make("twx", game=GAME)
    rng = random.Random(task)
    shown: Observation | None = env.reset(task)
    while shown is not None:
        assert shown.choices is not None
        began = time.monotonic()
        shown = env.step(rng.choice(shown.choices)).observation
        seconds.append(time.monotonic() - began)
    env.close()


def main() -> None:
    began = time.monotonic()
    first = envs.make("twx", game=GAME)
    first.reset(0)
    print(f"{GAME}: from start to the first prompt {time.monotonic() - began:.2f} s, {resident_mib():.0f} MiB")
    for number in range(ROUNDS):
        began, seconds = time.monotonic(), list[float]()
        tasks = [(number * AT_ONCE + place) % first.num_tasks for place in range(AT_ONCE)]
        threads = [threading.Thread(target=play, args=(task, seconds)) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(
            f"{(number + 1) * AT_ONCE} episodes: {len(seconds) / (time.monotonic() - began):.0f} steps/s, "
            f"{1000 * sum(seconds) / len(seconds):.1f} ms each, {resident_mib():.0f} MiB"
        )


if __name__ == "__main__":
    main()
