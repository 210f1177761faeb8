"""A rate limit: how many events one worker, or lines one place in the code, may cause."""


class Allowance:
    """A token bucket: `at_once` at the start, refilled at `per_minute`. Pure: the caller passes the time."""

    def __init__(self, at_once: int, per_minute: float) -> None:
        self._most, self._per_second = float(at_once), per_minute / 60
        self._left, self._at = self._most, 0.0

    def take(self, now: float) -> bool:
        """Take one from the allowance; False when nothing is left."""
        self._left = min(self._most, self._left + max(now - self._at, 0.0) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
