"""Rows of tables that are being written: which there are, and what in them has changed."""

from dataclasses import dataclass, field
from typing import Any

from hpc_es.store.schema import TABLES


@dataclass
class Changes:
    """New cell values by table, column and row, and how many rows each table has by now."""

    num_rows: dict[str, int]
    cells: dict[str, dict[str, dict[int, Any]]] = field(default_factory=lambda: {table: {} for table in TABLES})
    num_cells: int = 0


class Rows:
    """Hands out row numbers and collects changes; it keeps no rows."""

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

    def new(self, table: str, **values: Any) -> int:
        row = self._num_rows[table]
        self._num_rows[table] += 1
        self.set(table, row, **values)
        return row

    def set(self, table: str, row: int, **values: Any) -> None:
        columns = self._changes.cells[table]
        for name, value in values.items():
            columns.setdefault(name, {})[row] = value
        self._changes.num_cells += len(values)

    def event(self, time: float, level: str, what: str, detail: str = "") -> None:
        self.new("events", time=time, level=level, what=what, detail=detail)
