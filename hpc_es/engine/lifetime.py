"""Ensures that no process of an engine outlives the front process that owns it, even if the front is killed.

vLLM's EngineCore can survive a SIGKILL of its parent and hold its memory for good, and while it starts it waits for
the front for ever. Invariant: every process that receives vLLM's configuration watches the front from that moment,
and ends within a second of it.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from hpc_es.engine.queues import sleep_while_waiting

_POLL_S = 0.5
QUEUES, RANKS = "psm_", "vllm_dist_"
"""How the names begin that multiprocessing.shared_memory and vLLM's CPU ranks give."""
_watching = False


class Tie(str):
    """A string to put into vLLM's `additional_config`: whichever process unpickles it lives and dies with the front.

    This is the one way into EngineCore, which imports nothing of ours; so it also brings the way to wait
    (`queues`). Text, because vLLM hashes the config as JSON.
    """

    __slots__ = ()

    @classmethod
    def to_this_process(cls, scratch: Path) -> "Tie":
        """`scratch` is a folder of the engine, removed by whoever outlives the front for a moment."""
        return cls(f"{os.getpid()}:{process_start(os.getpid())}:{scratch}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tied, (str(self),)


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which differs if a pid is reused. None: no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def is_running(pid: int, started: str | None) -> bool:
    """Whether the process that had this pid and start time still runs."""
    return started is not None and process_start(pid) == started


def _tied(text: str) -> Tie:
    global _watching
    pid, started, scratch = text.split(":", 2)
    if int(pid) != os.getpid() and not _watching:
        _watching = True
        sleep_while_waiting()
        watch = threading.Thread(target=_watch, args=(int(pid), started, Path(scratch)), daemon=True)
        watch.start()
    return Tie(text)


def _watch(front: int, started: str, scratch: Path) -> None:
    parent = os.getppid()
    while is_running(front, started) and os.getppid() == parent:
        time.sleep(_POLL_S)
    if not is_running(front, started):
        _remove_leftovers(scratch)
    os.kill(os.getpid(), signal.SIGKILL)


def shared_memory(pid: int) -> set[Path]:
    """Files of vLLM in /dev/shm that a process has mapped: queues, and the shared memory of CPU ranks."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()  # it has ended
    names = (line.partition("/dev/shm/")[2] for line in lines)
    return {Path("/dev/shm", name) for name in names if name.startswith((QUEUES, RANKS)) and "(deleted)" not in name}


def remove(shared: Iterable[Path]) -> None:
    """Remove the shared memory of processes that have ended. Python would keep queues until the front ends."""
    for path in shared:
        if path.exists():
            path.unlink()
            if path.name.startswith(QUEUES):
                resource_tracker.unregister(f"/{path.name}", "shared_memory")  # or it misses the file in the end


def _remove_leftovers(scratch: Path) -> None:
    """Remove the engine's folder, and the shared memory of this process and of vLLM's CPU ranks."""
    shutil.rmtree(scratch, ignore_errors=True)
    for path in shared_memory(os.getpid()):
        path.unlink(missing_ok=True)
    if ident := os.environ.get("VLLM_DIST_IDENT"):
        for path in Path("/dev/shm").glob(f"{ident}*"):
            path.unlink(missing_ok=True)
