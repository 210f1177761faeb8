"""Which process is which: a pid together with its start time, since pids are used again."""

from pathlib import Path

FRONT_VARIABLE = "HPC_ES_ENGINE_FRONT"
"""Environment of an engine's processes: pid:start of the front that owns them."""


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def is_running(pid: int, started: str | None) -> bool:
    """Whether the process that had this pid and start time still runs."""
    return started is not None and process_start(pid) == started
