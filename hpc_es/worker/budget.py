"""How much of a job's time is left, and whether one more evaluation fits into it.

Invariant: the time left is counted from the end that the scheduler set, not from the moment when this process was
ready. A wall clock that is changed later has no effect.
"""

import time
from collections import deque

MARGIN_S = 10.0
"""Time to report, to hand an evaluation back, and to say goodbye."""
CAUTION = 1.25
"""Factor by which an evaluation may take longer than the longest recent one."""
NEAR_S = 900.0
"""A signal that comes earlier than this before the end is no reminder of the end: it is preemption."""


class Budget:
    def __init__(self, ends_at: float | None = None) -> None:
        """`ends_at`: when the job ends, in seconds since the epoch; None: never."""
        self._deadline = None if ends_at is None else time.monotonic() + ends_at - time.time()
        self._durations: deque[float] = deque(maxlen=8)

    def note(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self._durations.append(seconds)

    @property
    def remaining_s(self) -> float:
        return float("inf") if self._deadline is None else self._deadline - time.monotonic() - MARGIN_S

    @property
    def end_is_near(self) -> bool:
        return self.remaining_s < NEAR_S

    def fits(self, elapsed_s: float = 0.0) -> bool:
        """Whether an evaluation that has run for `elapsed_s` is likely to end in time."""
        expected = CAUTION * max(self._durations, default=0.0)
        return max(expected - elapsed_s, 0.0) < self.remaining_s
