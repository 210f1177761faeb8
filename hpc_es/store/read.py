"""Read a run's tables as pandas DataFrames, from run.h5 or, if that cannot be used, from the journal in memory.

Needs neither torch nor the machine that the run was made on. Never writes. A table is read when it is first asked for;
while the run goes on, two tables may show two moments of it.
"""

import contextlib
import json
import warnings
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.errors import ConfigError, JournalDamaged, StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.frames import END_MARK_BYTES
from hpc_es.store.hdf5_tables import Columns, Unusable, memory_dtype, read_attrs, read_old, read_table
from hpc_es.store.journal import fold_journal, journal_end, newest_start, warn_python
from hpc_es.store.pages import NoChecksums
from hpc_es.store.projection import Projection, merge_later
from hpc_es.store.protocol import protocol_of
from hpc_es.store.records import AnyRecord
from hpc_es.store.rows import Changes, as_array, storable
from hpc_es.store.schema import SCHEMA_VERSION, TABLES, Column

if TYPE_CHECKING:  # imported where they are used, so that importing hpc_es.store costs nothing
    import numpy as np
    import pandas as pd

_SPILL_CELLS = 500_000
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
        raise ConfigError(f"{path} is not a run: give a run folder (it has journal.1.hpcj) or a run.h5")
    if not in_run_folder and path.is_dir():
        warnings.warn(f"{hdf5} may lack the end of its run: its journal is not here", stacklevel=2)
    return Run(hdf5, paths if in_run_folder else None)


class Run:
    """Tables of one run. `units[table][column]` and `meanings[table][column]` explain the numbers."""

    def __init__(self, hdf5: Path, paths: RunPaths | None) -> None:
        self.units = {table: {column.name: column.unit for column in columns} for table, columns in TABLES.items()}
        self.meanings = {
            table: {column.name: column.meaning for column in columns} for table, columns in TABLES.items()
        }
        self._hdf5 = hdf5
        self._paths = paths
        self._in_memory: dict[str, Columns] | None = None
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
        """One row per event, in order of time."""
        return self._table("events")

    @cached_property
    def contexts(self) -> "pd.DataFrame":
        """One row per context that an evaluation proposed, in order of time."""
        return self._table("contexts")

    # --- where the tables come from --------------------------------------------------------------------------

    def _open(self) -> dict[str, Any]:
        old = None
        try:
            try:
                attrs = read_attrs(self._hdf5)
            except NoChecksums:
                old, attrs = read_old(self._hdf5)
            self._refuse_when_behind(attrs)
        except Unusable as reason:
            return self._turn_to_journal(str(reason))
        return attrs if old is None else self._turn_to_old_file(old, attrs)

    def _refuse_when_behind(self, attrs: dict[str, Any]) -> None:
        """Compare run.h5 with the journal. Errors: Unusable when run.h5 is behind it or of another run."""
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
        if started is not None and (started.run_id, started.base_digest) != (attrs["run_id"], attrs["base_digest"]):
            raise Unusable(f"{self._hdf5} is of another run, {attrs['run_id']}")
        if end is not None and here < (end.generation, end.num_bytes):
            raise Unusable(f"{self._hdf5} is behind the journal")
        if started is None or (end is not None and here > (end.generation, end.num_bytes)):
            warnings.warn(
                f"{self._hdf5} is ahead of the journal, which has lost its end (restore it from a copy); the tables "
                f"are from {self._hdf5.name}",
                stacklevel=4,
            )

    def _turn_to_journal(self, reason: str) -> dict[str, Any]:
        if self._paths is None:
            raise StoreError(
                f"{reason}; it could be rebuilt from the journal, which is not in {self._hdf5.parent}: copy the file "
                "again, or read the run folder"
            )
        warnings.warn(f"{reason}: the tables are built from the journal in memory", stacklevel=5)
        self._in_memory, attrs = _fold_journal(self._paths)
        return attrs

    def _turn_to_old_file(self, tables: dict[str, Columns], attrs: dict[str, Any]) -> dict[str, Any]:
        """Prefer the journal to a file of the first release, in which damaged text is not noticed."""
        self._in_memory = tables
        if self._paths is not None:
            with contextlib.suppress(JournalDamaged):  # already reported
                self._in_memory, attrs = _fold_journal(self._paths)
        return attrs

    def _table(self, table: str) -> "pd.DataFrame":
        if self._in_memory is None:
            try:
                return self._with_later_evals(table, _frame(table, read_table(self._hdf5, table)))
            except (Unusable, NoChecksums) as reason:
                self.attrs = self._turn_to_journal(str(reason))
        assert self._in_memory is not None
        return self._with_later_evals(table, _frame(table, self._in_memory[table]))

    def _with_later_evals(self, table: str, frame: "pd.DataFrame") -> "pd.DataFrame":
        """Add evaluations that were made or resumed after run.h5 was written."""
        import pandas as pd

        if table not in _TABLES_OF_LATER_EVALS or not self._later_evals:
            return frame
        older = frame[~frame["source"].isin(list(self._newer))]
        return pd.concat([older, _frame(table, self._later_evals[table])], ignore_index=True)

    @cached_property
    def _newer(self) -> dict[str, Path]:
        """Name -> journal of the later evaluations that run.h5 lacks or has in an older state."""
        if self._paths is None:
            return {}
        merged = json.loads(self.attrs["later_evals"])
        if isinstance(merged, list):  # written by the first versions
            return {path.stem: path for path in self._paths.later_evals() if path.stem not in merged}
        return {path.stem: path for path in self._paths.later_evals() if self._has_changed(path, merged.get(path.stem))}

    def _has_changed(self, path: Path, merged_bytes: int | None) -> bool:
        """Whether the journal of a later evaluation has changed since run.h5 was written."""
        size = path.stat().st_size
        if merged_bytes is None or size >= merged_bytes - END_MARK_BYTES:  # a writer that resumes removes the end mark
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
        base_digest, config_json = int(self.attrs["base_digest"]), str(self.attrs["config"])
        if not list(merge_later(projection, self._newer.values(), warn_python, base_digest, config_json)):
            return {}
        tables = _empty_tables()
        _apply(tables, projection.take())
        return tables


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
    merged = dict(merge_later(projection, paths.later_evals(), warn_python, started.base_digest, started.config_json))
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
        table: {column.name: np.empty(0, memory_dtype(column)) for column in columns}
        for table, columns in TABLES.items()
    }


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
            known[rows] = as_array(values, column, known.dtype)


# --- to pandas --------------------------------------------------------------------------------------------------


def _frame(table: str, columns: Columns) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame({column.name: _series(columns[column.name], column) for column in TABLES[table]})


def _series(values: "np.ndarray[Any, Any]", column: Column) -> Any:
    """Column for pandas; integers that may be unknown become nullable ones."""
    import pandas as pd

    if column.dtype in ("str", "choice"):
        return pd.Series(values, dtype="str")
    if column.null is None:
        return values
    return pd.arrays.IntegerArray(values, mask=values == column.null)
