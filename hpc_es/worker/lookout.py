"""What a worker does while its head is silent: ask the scheduler now and then what has become of it, and decide.

    head silent for SILENCE_S ── ask, with longer and longer pauses ──► gone: the worker fails
                              └─ silent for transport.head_timeout ──► queued: the worker queues again, behind the head
                                                                    ├► just started, or ending: the worker waits again
                                                                    └► running, or nobody knows: the worker fails

Invariant: a head that waits in the queue, however long, costs no worker. The decision is pure.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

SILENCE_S = 15.0
"""The silence of the head that makes a worker ask what has become of it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Between two questions: each pause is twice the one before."""
JITTER = 0.5
"""Share by which a pause is longer or shorter, so that an array of workers does not ask all at once."""


@dataclass(frozen=True)
class Outlook:
    """What the scheduler says about the newest head of the run."""

    state: Literal["gone", "queued", "running", "ending", "unknown"]
    """ending: Slurm is clearing up after it, and will call it queued or gone soon."""
    detail: str = ""
    """For a person: job 12 is CANCELLED."""
    job: str = ""
    seconds_running: float | None = None


UNKNOWN = Outlook("unknown")

AskAboutHead = Callable[[float], Outlook]
"""Its argument: how many seconds old the answer may be. One from before the silence says nothing about it."""


def no_scheduler(max_age_s: float) -> Outlook:
    """The outlook of a worker that is not a job of a scheduler."""
    return UNKNOWN


def pauses() -> Iterator[float]:
    """Seconds to wait before each question."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause * random.uniform(1 - JITTER, 1 + JITTER)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def verdict(outlook: Outlook, head_timeout_s: float) -> Literal["leave", "requeue", "wait", "fail"]:
    """What to do when no head was heard for transport.head_timeout. Pure."""
    match outlook.state:
        case "gone":
            return "leave"
        case "queued":
            return "requeue"
        case "ending":
            return "wait"
        case "running" if outlook.seconds_running is not None and outlook.seconds_running < head_timeout_s:
            return "wait"  # it was in the queue for most of the silence, and loads a model now
        case _:
            return "fail"
