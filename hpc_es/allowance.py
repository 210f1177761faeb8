"""How much someone may cause: events of a worker, lines of a log."""


class Allowance:
    """So many at once, and so many a minute from then on. Pure: whoever takes says what time it is."""

    def __init__(self, at_once: int, per_minute: float) -> None:
        self._most, self._per_second = float(at_once), per_minute / 60
        self._left, self._at = self._most, 0.0

    def take(self, now: float) -> bool:
        """One of them. False when nothing is left."""
        self._left = min(self._most, self._left + max(now - self._at, 0.0) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
