"""Log lines of head and workers: bounded, printable, and not without end.

Many quote words from outside, and some are written whenever a peer does something. So a record, its traceback included,
has a largest length and no control characters, and one place in the code writes so many a minute.
"""

import logging
from collections import Counter
from typing import TextIO

from hpc_es.allowance import Allowance
from hpc_es.quoting import MAX_RECORD, quote

LINES_AT_ONCE, LINES_PER_MINUTE = 200, 60
"""Records of one place in the code."""


def log_to(stream: TextIO) -> None:
    """All logging of this process goes there, and nowhere else."""
    handler = BoundedHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Its first line after some were left out says how many."""

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
