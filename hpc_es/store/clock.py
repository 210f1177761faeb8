"""The clock by which whoever writes a journal stamps its records.

Invariant: it never jumps and never runs backwards, whatever is done to the machine's clock meanwhile. Two writers of
one run may still disagree, on two machines or after one was set: Projection puts them one after the other.
"""

import time


class Clock:
    """Seconds since the epoch: the wall clock once, the monotonic clock from then on."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
