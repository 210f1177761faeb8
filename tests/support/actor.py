"""Plays the head or a worker for tests of the launcher: `actor.py head|worker RUN [--seat SEAT] --parent PID`.

RUN/script.json maps a role (head, local-0, ...) to a list of Python snippets, one per start; the last one repeats.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_es.launch.process import follow_parent


def wait_for_sigterm(code: int = 3) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
    time.sleep(600)


def start_sleeper(*, own_session: bool) -> None:
    """Start a grandchild process and write its id to a file."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=own_session)
    with open(root / "sleepers", "a") as file:
        file.write(f"{process.pid}\n")


def wait_for_file(name: str) -> None:
    while not (root / name).exists():
        time.sleep(0.02)


if __name__ == "__main__":
    follow_parent(int(sys.argv[sys.argv.index("--parent") + 1]))
    root = Path(sys.argv[2])
    role = sys.argv[sys.argv.index("--seat") + 1] if "--seat" in sys.argv else sys.argv[1]
    snippets = json.loads((root / "script.json").read_text())[role]
    starts = root / f"starts-{role}"
    with open(starts, "a") as file:
        file.write(f"{os.getpid()}\n")
    number = len(starts.read_text().splitlines()) - 1
    print(f"start {number} of {role}", flush=True)
    exec(snippets[min(number, len(snippets) - 1)])
