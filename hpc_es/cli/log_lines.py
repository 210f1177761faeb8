"""Log lines of head and workers, bounded in length and number.

Many lines quote text from outside, and other processes can cause some of them. So a record, including its traceback,
has a maximum length and no control characters, and each line of code may log a limited number of records per minute.
"""

import logging
from collections import Counter
from typing import TextIO

from hpc_es.allowance import Allowance
from hpc_es.quoting import MAX_RECORD, quote

LINES_AT_ONCE, LINES_PER_MINUTE = 200, 60
"""Limits for one line of code."""


def log_to(stream: TextIO) -> None:
    """Write all log records of this process to `stream`, and nowhere else."""
    handler = BoundedHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class BoundedHandler(logging.StreamHandler[TextIO]):
    """A handler that limits length and number of records; the next record says how many were left out."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._allowances: dict[tuple[str, int], Allowance] = {}
        self._left_out = Counter[tuple[str, int]]()

    def emit(self, record: logging.LogRecord) -> None:
        place = (record.pathname, record.lineno)
        if place not in self._allowances:
            self._allowances[place] = Allowance(LINES_AT_ONCE, LINES_PER_MINUTE)
        if self._allowances[place].take(record.created):
            super().emit(record)
        else:
            self._left_out[place] += 1

    def format(self, record: logging.LogRecord) -> str:
        left_out = self._left_out.pop((record.pathname, record.lineno), 0)
        text = quote(super().format(record), MAX_RECORD)
        return f"{text} [{left_out:,} lines like this one were left out]" if left_out else text
