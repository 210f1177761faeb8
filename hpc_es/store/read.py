"""Read a run's tables as pandas DataFrames, from run.h5 or, where that cannot serve, from the journal in memory.

Needs neither torch nor the machine that the run was made on. Never writes. A table is read when it is first asked for;
while the run goes on, two tables may show two moments of it.
"""

import json
import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.errors import ConfigError, JournalDamaged, StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.frames import END_MARK_BYTES
from hpc_es.store.journal import fold_journal, journal_end, newest_start, warn_python
from hpc_es.store.projection import Projection, merge_later
from hpc_es.store.protocol import protocol_of
from hpc_es.store.records import AnyRecord
from hpc_es.store.rows import Changes, storable
from hpc_es.store.schema import SCHEMA_VERSION, TABLES, Column

if TYPE_CHECKING:  # imported where they are used, so that importing hpc_es.store costs nothing
    import numpy as np
    import pandas as pd

Columns = dict[str, "np.ndarray[Any, Any]"]
"""The columns of one table, by name."""

_SPILL_CELLS = 500_000
_FLUSH_SECONDS = 2.0
"""How long to wait for a flush that is under way."""
_ATTEMPTS = 20
"""To read a table with no flush in between."""
_TABLES_OF_LATER_EVALS = ("evaluations", "episodes", "evals")


def read(path: str | Path) -> "Run":
    """The run in a run folder, or in a run.h5 (which may have been copied elsewhere without its journal).

    Errors: ConfigError when there is no run; StoreError when it is of a newer schema; JournalDamaged when nothing else
    is left.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    paths = RunPaths(folder)
    hdf5 = paths.hdf5 if path.is_dir() else path
    in_run_folder = bool(paths.segments()) and hdf5.name == paths.hdf5.name
    if not in_run_folder and not hdf5.is_file():
        raise ConfigError(f"{path} is no run: give a run folder (it has journal.1.hpcj) or a run.h5")
    if not in_run_folder and path.is_dir():
        warnings.warn(f"{hdf5} may lack the end of its run: its journal is not here", stacklevel=2)
    return Run(hdf5, paths if in_run_folder else None)


class Run:
    """One run. `units[table][column]` and `meanings[table][column]` say what the numbers are."""

    def __init__(self, hdf5: Path, paths: RunPaths | None) -> None:
        self.units = {table: {column.name: column.unit for column in columns} for table, columns in TABLES.items()}
        self.meanings = {
            table: {column.name: column.meaning for column in columns} for table, columns in TABLES.items()
        }
        self._hdf5 = hdf5
        self._paths = paths
        self._from_journal: dict[str, Columns] | None = None
        self.attrs: dict[str, Any] = self._open()
        """run_id, generation, base_digest, versions, finished, schema_version, journal_bytes."""

    @property
    def folder(self) -> Path | None:
        """The run folder with the journal; None for a run.h5 that was copied elsewhere."""
        return self._paths.root if self._paths else None

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration of the newest head."""
        return dict(json.loads(self.attrs["config"]))

    @cached_property
    def evaluations(self) -> "pd.DataFrame":
        """One row per evaluation."""
        return self._table("evaluations")

    @cached_property
    def updates(self) -> "pd.DataFrame":
        """One row per update."""
        return self._table("updates")

    @cached_property
    def episodes(self) -> "pd.DataFrame":
        """One row per episode."""
        return self._table("episodes")

    @cached_property
    def evals(self) -> "pd.DataFrame":
        """One row per evaluated version, in the run and later; `other_protocol` tells what does not compare with the
        run's own."""
        return self._table("evals")

    @cached_property
    def workers(self) -> "pd.DataFrame":
        """One row per incarnation of a worker."""
        return self._table("workers")

    @cached_property
    def events(self) -> "pd.DataFrame":
        """What a person may want to know, in order of time."""
        return self._table("events")

    # --- where the tables come from --------------------------------------------------------------------------

    def _open(self) -> dict[str, Any]:
        try:
            attrs = _read_attrs(self._hdf5)
            self._refuse_when_behind(attrs)
        except _Unusable as reason:
            return self._turn_to_journal(str(reason))
        return attrs

    def _refuse_when_behind(self, attrs: dict[str, Any]) -> None:
        """Errors: _Unusable when the journal has what run.h5 does not have, or run.h5 is of another run."""
        if self._paths is None:
            return
        here = int(attrs["generation"]), int(attrs["journal_bytes"])
        segments = self._paths.segments()
        try:
            started = newest_start(self._paths)
            end = None
            if not segments or here != (segments[-1][0], segments[-1][1].stat().st_size):
                end = journal_end(self._paths.root)
        except JournalDamaged as error:
            warnings.warn(f"{error}; the tables are from {self._hdf5.name}", stacklevel=4)
            return
        if started is not None and started.generation == here[0] and started.run_id != attrs["run_id"]:
            raise _Unusable(f"{self._hdf5} is of the run {attrs['run_id']!r}, the journal of {started.run_id!r}")
        if end is not None and here < (end.generation, end.num_bytes):
            raise _Unusable(f"{self._hdf5} is behind the journal")
        if started is None or (end is not None and here > (end.generation, end.num_bytes)):
            warnings.warn(
                f"{self._hdf5} is ahead of the journal, which has lost its end (restore it from a copy); the tables "
                f"are from {self._hdf5.name}",
                stacklevel=4,
            )

    def _turn_to_journal(self, reason: str) -> dict[str, Any]:
        if self._paths is None:
            raise StoreError(f"{reason}; the journal of the run can rebuild it, but it is not in {self._hdf5.parent}")
        warnings.warn(f"{reason}: the tables are built from the journal in memory", stacklevel=5)
        self._from_journal, attrs = _fold_journal(self._paths)
        return attrs

    def _table(self, table: str) -> "pd.DataFrame":
        if self._from_journal is None:
            try:
                return self._with_later_evals(table, _frame(table, _read_table(self._hdf5, table)))
            except _Unusable as reason:
                self.attrs = self._turn_to_journal(str(reason))
        assert self._from_journal is not None
        return _frame(table, self._from_journal[table])

    def _with_later_evals(self, table: str, frame: "pd.DataFrame") -> "pd.DataFrame":
        """With evaluations that were made, or went on, after run.h5 was written."""
        import pandas as pd

        if table not in _TABLES_OF_LATER_EVALS or not self._later_evals:
            return frame
        older = frame[~frame["source"].isin(list(self._newer))]
        return pd.concat([older, _frame(table, self._later_evals[table])], ignore_index=True)

    @cached_property
    def _newer(self) -> dict[str, Path]:
        """Name -> journal of the later evaluations that run.h5 does not have, or not as they are now."""
        if self._paths is None:
            return {}
        merged = json.loads(self.attrs["later_evals"])
        if isinstance(merged, list):  # by an hpc_es that wrote such journals whole
            return {path.stem: path for path in self._paths.later_evals() if path.stem not in merged}
        return {path.stem: path for path in self._paths.later_evals() if self._has_changed(path, merged.get(path.stem))}

    def _has_changed(self, path: Path, merged_bytes: int | None) -> bool:
        """Since run.h5 was written, when the journal of a later evaluation had so many bytes."""
        size = path.stat().st_size
        if merged_bytes is None or size >= merged_bytes - END_MARK_BYTES:  # a writer that resumes takes the mark away
            return size != merged_bytes
        warnings.warn(
            f"{path} had {merged_bytes} bytes when {self._hdf5.name} was written and has lost its end (restore it from "
            f"a copy); its rows are from {self._hdf5.name}",
            stacklevel=4,
        )
        return False

    @cached_property
    def _later_evals(self) -> dict[str, Columns]:
        projection = Projection(protocol_of(self.attrs["config"]))
        if not list(merge_later(projection, self._newer.values(), warn_python, int(self.attrs["base_digest"]))):
            return {}
        tables = _empty_tables()
        _apply(tables, projection.take())
        return tables


class _Unusable(Exception):
    """This run.h5 cannot be used, and why."""


@dataclass(frozen=True)
class Hdf5End:
    """How far a run.h5 is: which head of which run wrote it, and how many bytes of that head's segment it has."""

    run_id: str
    generation: int
    num_bytes: int
    later_evals: dict[str, int]
    """Bytes of the journals of later evaluations, by name."""


def hdf5_end(path: Path) -> Hdf5End | None:
    """None when the file cannot be used. Errors: StoreError when it is of a newer schema."""
    try:
        attrs = _read_attrs(path, wait=False)
        merged = json.loads(attrs["later_evals"])
        later = merged if isinstance(merged, dict) else {}  # a list by the first hpc_es that had such journals
        return Hdf5End(str(attrs["run_id"]), int(attrs["generation"]), int(attrs["journal_bytes"]), later)
    except (_Unusable, KeyError, ValueError, TypeError):
        return None


# --- from run.h5 ------------------------------------------------------------------------------------------------


def _read_attrs(path: Path, *, wait: bool = True) -> dict[str, Any]:
    """Attributes of a complete file. `wait`: for a flush that is under way. Errors: _Unusable, StoreError."""
    import h5py

    deadline = time.monotonic() + _FLUSH_SECONDS
    while True:
        try:
            with h5py.File(path, "r", locking=False) as file:
                attrs = dict(file.attrs)
        except FileNotFoundError:
            raise _Unusable(f"{path} is missing") from None
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            reason = f"{path} is damaged ({error})"
        else:
            if attrs.get("schema_version", 0) > SCHEMA_VERSION:
                raise StoreError(
                    f"{path} has schema version {attrs['schema_version']}; this hpc_es reads up to {SCHEMA_VERSION}"
                )
            if attrs.get("complete"):
                return {name: value.item() if hasattr(value, "item") else value for name, value in attrs.items()}
            reason = f"{path} was left in the middle of a write"
        if not wait or time.monotonic() > deadline or not _is_fresh(path):
            raise _Unusable(reason)
        time.sleep(0.02)


def _is_fresh(path: Path) -> bool:
    """Whether somebody wrote to the file so recently that a flush may be under way."""
    try:
        return time.time() - path.stat().st_mtime < _FLUSH_SECONDS
    except OSError:
        return True


def _read_table(path: Path, table: str) -> Columns:
    """One table, as a flush left it. Errors: _Unusable."""
    import h5py

    reason: Exception | None = None
    for _ in range(_ATTEMPTS):
        before = _read_attrs(path)["journal_bytes"]
        reason = None
        try:
            with h5py.File(path, "r", locking=False) as file:
                columns = {column.name: _read_column(file[table], column) for column in TABLES[table]}
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            reason = error
        if _read_attrs(path)["journal_bytes"] == before:
            if reason is None:
                return columns
            break
    raise _Unusable(f"{path} is damaged ({reason})" if reason else f"{path} changes faster than it can be read")


def _read_column(group: Any, column: Column) -> "np.ndarray[Any, Any]":
    import numpy as np

    if column.is_new and column.name not in group:
        return np.full(len(group["source"]), column.fill, _memory_dtype(column))
    dataset = group[column.name]
    if column.dtype == "str":
        return np.asarray(dataset.asstr()[:], dtype=object)
    if column.dtype == "choice":
        return np.array(column.choices, dtype=object)[dataset[:]]
    return np.asarray(dataset[:])


# --- from the journal -------------------------------------------------------------------------------------------


def _fold_journal(paths: RunPaths) -> tuple[dict[str, Columns], dict[str, Any]]:
    projection, tables = Projection(), _empty_tables()

    def add(record: AnyRecord) -> None:
        projection.add(record)
        if projection.num_cells > _SPILL_CELLS:
            _apply(tables, projection.take())

    fold_journal(paths.root, add)
    started, end = projection.started, journal_end(paths.root)
    if started is None or end is None:
        raise StoreError(f"{paths.root} has a journal without any record: the run has not begun")
    merged = dict(merge_later(projection, paths.later_evals(), warn_python))
    _apply(tables, projection.take())
    attrs = {
        "schema_version": SCHEMA_VERSION,
        "run_id": started.run_id,
        "config": started.config_json,
        "base_digest": started.base_digest,
        "versions": json.dumps(started.versions, sort_keys=True),
        "generation": started.generation,
        "finished": projection.finished,
        "journal_bytes": end.num_bytes,
        "later_evals": json.dumps(merged),
    }
    return tables, attrs


def _empty_tables() -> dict[str, Columns]:
    import numpy as np

    return {
        table: {column.name: np.empty(0, _memory_dtype(column)) for column in columns}
        for table, columns in TABLES.items()
    }


def _memory_dtype(column: Column) -> str:
    return "object" if column.dtype in ("str", "choice") else column.dtype


def _apply(tables: dict[str, Columns], changes: Changes) -> None:
    import numpy as np

    for table, columns in tables.items():
        for column in TABLES[table]:
            old = columns[column.name]
            new = np.full(changes.num_rows[table] - len(old), column.fill, old.dtype)
            columns[column.name] = np.concatenate([old, new])
        rows, cells = changes.columns(table)
        for column, values in zip(TABLES[table], cells, strict=False):  # no cells: no row has changed
            known = columns[column.name]
            if column.dtype == "str":
                values = [storable(text) for text in values]
            known[rows] = np.array(values, known.dtype)


# --- to pandas --------------------------------------------------------------------------------------------------


def _frame(table: str, columns: Columns) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame({column.name: _series(columns[column.name], column) for column in TABLES[table]})


def _series(values: "np.ndarray[Any, Any]", column: Column) -> Any:
    """Integers that may be unknown become pandas' nullable ones."""
    import pandas as pd

    if column.dtype in ("str", "choice"):
        return pd.Series(values, dtype="str")
    if column.null is None:
        return values
    return pd.arrays.IntegerArray(values, mask=values == column.null)
