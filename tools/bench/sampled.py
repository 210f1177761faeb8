"""Counts CPU seconds: of processes as Linux counts them, and within this process by sampling one thread's stack.

Invariant: every CPU second of the watched thread is in exactly one account, that of the innermost frame of a known
package. What the standard library does therefore counts for its caller.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import _current_frames as frames_of_threads
from types import FrameType

TICKS = os.sysconf("SC_CLK_TCK")
INTERVAL_S = 0.005
PACKAGES = {
    "hpc_es/worker/": "our loop over episodes",
    "hpc_es/engine/": "our engine: requests, gate, RPCs",
    "hpc_es/envs/": "environment",
    "vllm/": "vLLM's front",
    "transformers/": "tokenizer",
    "tokenizers/": "tokenizer",
    "zmq/": "vLLM's front",
}
"""Account by part of a file's path; the first match counts."""
OTHER = "event loop and the rest"


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, including ended ones; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def descendants(pid: int) -> Iterator[int]:
    """Process ids of all descendants of `pid`."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(folder.name))
    waiting = [pid]
    while waiting:
        below = parents.get(waiting.pop(), [])
        yield from below
        waiting += below


def command(pid: int) -> str:
    """Command line of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def account_of(frame: FrameType | None) -> str:
    """Account of the innermost frame that belongs to a known package."""
    while frame is not None:
        path = frame.f_code.co_filename
        for part, account in PACKAGES.items():
            if part in path:
                return account
        frame = frame.f_back
    return OTHER


@contextmanager
def watched(accounts: dict[str, float]) -> Iterator[None]:
    """Add the CPU seconds of the calling thread inside the `with` block to `accounts`."""
    thread, ended = threading.get_ident(), threading.Event()
    clock = time.pthread_getcpuclockid(thread)

    def watch() -> None:
        before = time.clock_gettime(clock)
        while not ended.wait(INTERVAL_S):
            account = account_of(frames_of_threads().get(thread))
            now = time.clock_gettime(clock)
            accounts[account] = accounts.get(account, 0.0) + now - before
            before = now

    watcher = threading.Thread(target=watch, daemon=True, name="watch")
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
