"""Rows of tables that are being written: which there are, and which have changed.

Invariant: a row always holds all of its cells, as the schema orders them, with the fill value in those that are not
known yet. So what has changed is written in whole rows, and whoever may still change a row keeps it. Texts that stand
in the file already are left out, because HDF5 takes long to overwrite them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_es.store.schema import TABLES, Column

if TYPE_CHECKING:
    import numpy as np

_TEXTS = {table: {column.name for column in columns if column.dtype == "str"} for table, columns in TABLES.items()}
_FILLS = {table: {column.name: column.fill for column in columns} for table, columns in TABLES.items()}


def storable(text: str) -> str:
    """A text as HDF5 can hold it: NUL and lone surrogates, which it cannot, are written as escapes."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def as_array(values: Sequence[Any], column: Column, dtype: Any) -> "np.ndarray[Any, Any]":
    """Cells of a column. A journal of the first release may have integers beyond its type, as a broken worker sent
    them: they are unknown where the column has a value for that, else the nearest number that it can hold."""
    import numpy as np

    try:
        return np.array(values, dtype)
    except OverflowError:
        bounds = np.iinfo(dtype)
        low, high, null = int(bounds.min), int(bounds.max), column.null
        fitting = [v if low <= v <= high else min(max(v, low), high) if null is None else null for v in values]
        return np.array(fitting, dtype)


@dataclass(slots=True)
class Row:
    """One row that is filled in as things become known; `cells` by column."""

    table: str
    number: int
    cells: dict[str, Any]


@dataclass
class Changes:
    """Changed rows by table and number, and how many rows each table has by now. Good until the next change."""

    num_rows: dict[str, int]
    rows: dict[str, dict[int, Iterable[Any]]] = field(default_factory=lambda: {table: {} for table in TABLES})
    texts: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    """Rows in which a text has been replaced, by table and column."""
    num_cells: int = 0

    def columns(self, table: str) -> tuple[list[int], list[Sequence[Any]]]:
        """The changed rows in order, and their cells in every column; ([], []) when there are none."""
        rows = self.rows[table]
        numbers = sorted(rows)
        return numbers, list(zip(*(rows[number] for number in numbers), strict=True))


class Rows:
    """Hands out rows and collects changes; it keeps none."""

    def __init__(self) -> None:
        self._num_rows = dict.fromkeys(TABLES, 0)
        self._changes = Changes({})

    @property
    def num_cells(self) -> int:
        """Changed since the last `take`."""
        return self._changes.num_cells

    def take(self) -> Changes:
        """What changed since the last call."""
        changes, self._changes = self._changes, Changes({})
        changes.num_rows = dict(self._num_rows)
        return changes

    def new(self, table: str, **values: Any) -> Row:
        row = Row(table, self._num_rows[table], _FILLS[table] | values)
        self._num_rows[table] += 1
        self._changed(row, len(values))
        return row

    def set(self, row: Row, **values: Any) -> None:
        for name in values.keys() & _TEXTS[row.table]:
            if values[name] != row.cells[name]:
                self._changes.texts[row.table, name].add(row.number)
        row.cells.update(values)
        self._changed(row, len(values))

    def add(self, table: str, *values: Any) -> None:
        """A row that never changes, as the schema orders its columns."""
        self._changes.rows[table][self._num_rows[table]] = values
        self._changes.num_cells += len(values)
        self._num_rows[table] += 1

    def _changed(self, row: Row, num_cells: int) -> None:
        self._changes.rows[row.table][row.number] = row.cells.values()
        self._changes.num_cells += num_cells

    def event(self, time: float, level: str, what: str, detail: str = "") -> None:
        self.add("events", time, level, what, detail)
