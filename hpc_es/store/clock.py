"""The clock that stamps the records of a journal.

Invariant: it never jumps and never runs backwards, even if the machine's clock is set. Two writers of one run may still
disagree, on two machines or after a clock was set; Projection then puts their times in order.
"""

import time


class Clock:
    """Seconds since the epoch: reads the wall clock once, then counts with the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
