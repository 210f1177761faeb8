"""run.h5: the tables of a run, derived from its journal and from nothing else.

Invariant: whatever happens to run.h5 costs no information. A writer builds it anew under a temporary name, renames it,
and from then on appends and updates it in place, open only during a `flush`. Every page has a checksum (pages.py), and
a flush ends with them, so that damage and a writer that was killed are recognised; a file that is missing, damaged or
not the one this writer left is built again from the journal. A write that fails is reported and tried again later; it
loses nothing and never has to stop a run.
"""

import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpc_es.errors import StoreError, Superseded
from hpc_es.paths import RunPaths
from hpc_es.store.hdf5_tables import HAS_CHECKSUMS
from hpc_es.store.journal import Warn, fold_journal, journal_end, read_journal, warn_python
from hpc_es.store.pages import BufferedPages, DamagedPage, NoChecksums, Pages
from hpc_es.store.projection import Projection, merge_later
from hpc_es.store.records import AnyRecord, Started
from hpc_es.store.rows import Changes, as_array, storable
from hpc_es.store.schema import SCHEMA_VERSION, TABLES, Column

RETRY_SECONDS = 30.0
"""Seconds between two attempts to rebuild the file after a failure: each one reads the whole journal."""

_SPILL_CELLS = 500_000
"""Number of changed cells at which they are written out while a file is being built; bounds memory."""
_CHUNK_ROWS = 1024
_GAP_ROWS = 256
"""Changed rows that are closer than this are written in one piece."""

Array = np.ndarray[Any, Any]

_FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises for full disks and damaged files, depending on where it notices."""


class Hdf5Writer:
    """Keeps run.h5 up to date. `add` every record once it is durable, from the first of the journal on."""

    def __init__(self, paths: RunPaths, *, locking: bool = False, warn: Warn = warn_python) -> None:
        self._paths = paths
        self._locking = locking
        self._warn = warn
        self._token = uuid.uuid4().hex
        self._num_records = 0
        self._projection: Projection | None = Projection()
        """None after a failure: what it had to say is lost, and comes again from the journal."""
        self._rows_written = dict.fromkeys(TABLES, 0)
        self._building = True
        self._generation = 0
        self._journal_bytes = 0
        self._retry_at = 0.0

    def add(self, record: AnyRecord) -> None:
        """Fold a record in; `flush` makes it visible. Errors: StoreError when the journal contradicts itself."""
        self._num_records += 1
        if self._projection is None:
            return
        self._projection.add(record)
        if self._building and self._projection.num_cells > _SPILL_CELLS:
            try:
                self._spill(self._projection)
            except _FAILURES as error:
                self._fail(error)
                self._retry_at = 0.0  # the next flush tries again, and reports

    def flush(self, journal_bytes: int, *, last: bool = False) -> None:
        """Write what has changed since the last flush. `journal_bytes`: durable bytes of the newest segment.

        Errors: StoreError when it cannot be written; nothing is lost, later flushes try again (`last`: at once).
        """
        if self._projection is None:
            if time.monotonic() < self._retry_at and not last:
                return
            self._refold()
        elif not self._building and not self._update(self._projection, journal_bytes):
            self._refold()
        if self._building:
            assert self._projection is not None
            self._build(self._projection, journal_bytes)

    # --- building a new file -----------------------------------------------------------------------------------

    @property
    def _temporary(self) -> Path:
        return self._paths.root / f".{self._paths.hdf5.name}.{self._token}"

    def _refold(self) -> None:
        """Begin again with the records that this writer has been given so far. Errors: StoreError."""
        self._temporary.unlink(missing_ok=True)
        self._building, self._rows_written = True, dict.fromkeys(TABLES, 0)
        projection = Projection()
        try:
            for record in itertools.islice(read_journal(self._paths.root, warn=self._warn), self._num_records):
                projection.add(record)
                if projection.num_cells > _SPILL_CELLS:
                    self._spill(projection)
        except (*_FAILURES, StoreError) as error:
            raise self._fail(error) from error
        self._projection = projection

    def _spill(self, projection: Projection) -> None:
        create = not self._temporary.exists()
        with self._open(self._temporary, create=create) as (file, commit):
            if create:
                _create_tables(file)
            self._apply(file, projection.take())
            commit()

    def _build(self, projection: Projection, journal_bytes: int) -> None:
        started = projection.started
        if started is None:
            raise StoreError(
                f"cannot write {self._paths.hdf5}: no record has been added, and the first must be Started"
            )
        later = self._paths.later_evals()
        merged = dict(merge_later(projection, later, self._warn, started.base_digest, started.config_json))
        try:
            self._spill(projection)
            with self._open(self._temporary) as (file, commit):
                _describe(file, started, self._token, merged)
                _mark(file, projection, journal_bytes)
                commit()
            os.replace(self._temporary, self._paths.hdf5)
        except _FAILURES as error:
            raise self._fail(error) from error
        for leftover in self._paths.root.glob(f".{self._paths.hdf5.name}.*"):  # of writers that were killed
            leftover.unlink(missing_ok=True)
        self._building, self._generation, self._journal_bytes = False, started.generation, journal_bytes

    # --- the file that exists ----------------------------------------------------------------------------------

    def _update(self, projection: Projection, journal_bytes: int) -> bool:
        """False when the file is not the one that this writer left."""
        if not projection.num_cells and journal_bytes == self._journal_bytes:
            return True
        begun = False
        try:
            with self._open(self._paths.hdf5) as (file, commit):
                if not self._is_ours(file):
                    return False
                begun = True
                self._apply(file, projection.take())
                _mark(file, projection, journal_bytes)
                commit()
            self._journal_bytes = journal_bytes
        except BlockingIOError as error:  # somebody holds the lock
            raise self._fail(error) from error
        except (DamagedPage, NoChecksums) as error:
            self._warn(f"{error}: {self._paths.hdf5.name} is rebuilt from the journal")
            return False
        except _FAILURES as error:
            if not begun:
                return False
            self._paths.hdf5.unlink(missing_ok=True)  # of no use any more; on a full disk the journal needs the room
            raise self._fail(error) from error
        return True

    def _is_ours(self, file: h5py.File) -> bool:
        """Whether this writer left the file as it is. Errors: Superseded when a newer head has built it."""
        generation = file.attrs.get("generation", 0)
        if generation > self._generation:
            raise Superseded(f"{self._paths.hdf5} is kept by a newer head, generation {generation}")
        return bool(file.attrs.get("writer") == self._token)

    @contextmanager
    def _open(self, path: Path, *, create: bool = False) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
        """The file, and what has to be called to get onto the disk what was written so far."""
        # No file lock by default: NFS and Lustre often lack them, and then the file could not be opened at all. There
        # is one writer, and readers see by the checksums whether they came in the middle of a flush.
        with (
            BufferedPages(path, create=create, lock=self._locking) as pages,
            h5py.File(pages, "w" if create else "r+") as file,
        ):

            def commit() -> None:
                file.flush()
                pages.commit()

            yield file, commit

    def _apply(self, file: h5py.File, changes: Changes) -> None:
        for table, columns in TABLES.items():
            num_rows, num_before = changes.num_rows[table], self._rows_written[table]
            rows, cells = changes.columns(table)
            group = file[table]
            for column, values in zip(columns, cells, strict=False):  # no cells: no row has changed
                dataset = h5py.h5d.open(group.id, column.name.encode())
                if num_rows > num_before:
                    dataset.set_extent((num_rows,))
                where = rows
                if column.dtype == "str":  # see rows.py; a new row holds the empty text already
                    touched = changes.texts[table, column.name]
                    chosen = [i for i, row in enumerate(rows) if row in touched or (row >= num_before and values[i])]
                    where, values = [rows[i] for i in chosen], [values[i] for i in chosen]
                if where:
                    _write_cells(dataset, column, where, values)
            self._rows_written[table] = num_rows

    def _fail(self, error: Exception) -> StoreError:
        """Forget the present state; the next attempt starts from the journal."""
        self._projection = None
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._temporary.unlink(missing_ok=True)
        return StoreError(f"cannot write {self._paths.hdf5} ({error}); nothing is lost, the journal has it all")


def rebuild(root: Path, *, locking: bool = False, warn: Warn = warn_python) -> Path:
    """Build run.h5 from the journal and the journals of later evaluations. Returns its path. Errors: StoreError."""
    paths = RunPaths(root)
    end = journal_end(root)
    if end is None:
        raise StoreError(f"{root} has no journal: it is not the folder of a run that has begun")
    writer = Hdf5Writer(paths, locking=locking, warn=warn)
    fold_journal(root, writer.add, warn=warn)
    writer.flush(end.num_bytes)
    return paths.hdf5


def rebuild_if_damaged(root: Path, *, locking: bool = False, warn: Warn = warn_python) -> None:
    """Bring back the run.h5 of a run that no head writes to. A failure is a warning: the journal has it all."""
    try:
        with Pages(RunPaths(root).hdf5) as pages:
            while pages.read(2**20):
                pass
    except OSError as damage:
        warn(f"run.h5 is rebuilt from the journal: {damage}")
        try:
            rebuild(root, locking=locking, warn=warn)
        except StoreError as error:
            warn(str(error))


# --- HDF5 -------------------------------------------------------------------------------------------------------


def _create_tables(file: h5py.File) -> None:
    for table, columns in TABLES.items():
        group = file.create_group(table)
        for column in columns:
            dataset = group.create_dataset(
                column.name,
                (0,),
                _stored_dtype(column),
                maxshape=(None,),
                chunks=(_CHUNK_ROWS,),
                fillvalue=_fill(column),
                fletcher32=column.dtype != "str",  # checksums, so that damage is an error; not possible for strings
            )
            dataset.attrs["unit"] = column.unit
            dataset.attrs["meaning"] = column.meaning
            if column.null is not None:
                dataset.attrs["null"] = _STORED[column.dtype].type(column.null)


def _describe(file: h5py.File, started: Started, token: str, merged: dict[str, int]) -> None:
    file.attrs["schema_version"] = SCHEMA_VERSION
    file.attrs["run_id"] = started.run_id
    file.attrs["config"] = started.config_json
    file.attrs["base_digest"] = np.uint64(started.base_digest)
    file.attrs["versions"] = json.dumps(started.versions, sort_keys=True)
    file.attrs["generation"] = started.generation
    file.attrs["later_evals"] = json.dumps(merged)
    file.attrs["writer"] = token
    file.attrs[HAS_CHECKSUMS] = True
    file.attrs["complete"] = 1  # what readers of the first release look for


def _mark(file: h5py.File, projection: Projection, journal_bytes: int) -> None:
    file.attrs["journal_bytes"] = journal_bytes
    file.attrs["finished"] = projection.finished


_STORED: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("int32"),
    "int64": np.dtype("int64"),
    "uint64": np.dtype("uint64"),
    "float64": np.dtype("float64"),
    "bool": np.dtype("bool"),
}


def _stored_dtype(column: Column) -> np.dtype[Any]:
    if column.dtype == "str":
        return h5py.string_dtype()
    if column.dtype == "choice":
        return h5py.enum_dtype({word: number for number, word in enumerate(column.choices)}, basetype="i1")
    return _STORED[column.dtype]


def _fill(column: Column) -> Any:
    """HDF5's own default (empty string, first choice) where it is what the schema says anyway."""
    return None if column.dtype in ("str", "choice") else column.fill


def _write_cells(dataset: h5py.h5d.DatasetID, column: Column, rows: list[int], values: Sequence[Any]) -> None:
    """`rows` are sorted. Through h5py's lower layer, which takes half the time for the few rows of one flush."""
    if column.choices:
        numbers = {word: number for number, word in enumerate(column.choices)}
        values = [numbers[word] for word in values]
    elif column.dtype == "str":
        values = [storable(text) for text in values]
    new = as_array(values, column, _stored_dtype(column))
    where = np.array(rows, dtype=int)
    cuts = np.flatnonzero(np.diff(where) > _GAP_ROWS) + 1
    for span, cells in zip(np.split(where, cuts), np.split(new, cuts), strict=True):
        _write_span(dataset, span, cells)


def _write_span(dataset: h5py.h5d.DatasetID, rows: Array, cells: Array) -> None:
    """In one piece, over what stands in between."""
    start, length = int(rows[0]), int(rows[-1] - rows[0]) + 1
    here, there = h5py.h5s.create_simple((length,)), dataset.get_space()
    there.select_hyperslab((start,), (length,))
    if len(rows) < length:
        piece = np.empty(length, cells.dtype)
        dataset.read(here, there, piece)
        piece[rows - start] = cells
        cells = piece
    dataset.write(here, there, cells)
