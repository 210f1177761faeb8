"""Read the attributes and tables of a run.h5, or raise Unusable.

Invariant: HDF5 sees only bytes whose checksum is correct (pages.py), because on a damaged file it may never return, or
return wrong numbers. Files of the first release have no page checksums; a separate process, with limits on time and
memory, reads those.
"""

import io
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_es.errors import StoreError
from hpc_es.store.pages import NoChecksums, Pages
from hpc_es.store.schema import SCHEMA_VERSION, TABLES, Column

if TYPE_CHECKING:  # imported where they are used, so that importing hpc_es.store costs nothing
    import h5py
    import numpy as np

Columns = dict[str, "np.ndarray[Any, Any]"]
"""The columns of one table, by name."""
Attrs = dict[str, Any]
T = TypeVar("T")

HAS_CHECKSUMS = "page_checksums"
"""Attribute of files that end in page checksums, so that one that lost its end is not taken for an older file."""

_FLUSH_SECONDS = 2.0
"""How long to wait for a running flush, during which the file has no valid end."""
_REPLACED_SECONDS = 0.2
"""How long to try again while pages do not match the checksums and nothing changes: shared file systems may show an
older end of the file for a moment."""
_MOST_SECONDS = 60.0
"""How long to try again in total while flushes follow each other."""
_OLD_FILE_SECONDS = 120.0
_OLD_FILE_MEMORY = 4 * 2**30
"""Memory limit for reading an old file, in addition to 16 times its size."""

_FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError)
"""What h5py and numpy raise for damaged files, depending on where they notice."""


class Unusable(Exception):
    """This run.h5 cannot be used, and why."""


def read_attrs(path: Path) -> Attrs:
    """Attributes of a run.h5. Errors: Unusable; NoChecksums; StoreError for a newer schema."""
    return _look(path, lambda file: _attrs(file, path))


def why_damaged(path: Path) -> str | None:
    """What of a run.h5 is not what a flush left; None also where a flush was cut short, or there are no checksums.

    Errors: StoreError when it is of a newer schema.
    """
    try:
        for table in TABLES:
            read_table(path, table)
    except NoChecksums:
        return None
    except Unusable as reason:
        return str(reason)
    return None


@dataclass(frozen=True)
class Hdf5End:
    """How far a run.h5 got: which head of which run wrote it, and how many bytes of that head's segment it covers."""

    run_id: str
    generation: int
    num_bytes: int
    later_evals: dict[str, int]
    """Number of bytes of the journals of later evaluations, by name."""


def hdf5_end(path: Path) -> Hdf5End | None:
    """How far the run.h5 got; None if it cannot be used. Errors: StoreError for a newer schema."""
    try:
        try:
            attrs = read_attrs(path)
        except NoChecksums:
            _, attrs = read_old(path)
        merged = json.loads(attrs["later_evals"])
        later = merged if isinstance(merged, dict) else {}  # the first versions wrote a list
        return Hdf5End(str(attrs["run_id"]), int(attrs["generation"]), int(attrs["journal_bytes"]), later)
    except (Unusable, KeyError, ValueError, TypeError):
        return None


def read_table(path: Path, table: str) -> Columns:
    """Columns of one table, as a flush left them. Errors: as `read_attrs`."""

    return _look(path, lambda file: _columns(file, table))


def read_old(path: Path) -> tuple[dict[str, Columns], Attrs]:
    """Tables and attributes of a file without page checksums. Errors: Unusable; StoreError for a newer schema."""
    child = "import sys; from hpc_es.store.hdf5_tables import _print_old; _print_old(sys.argv[1])"
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # each reserves memory, which is limited
    environment = os.environ | threads | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", child, str(path)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_OLD_FILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unusable(f"{path} is damaged (reading it did not end within {_OLD_FILE_SECONDS:g} s)") from None
    if done.returncode:
        raise Unusable(f"{path} is damaged (reading it ended with code {done.returncode})")
    found = pickle.loads(done.stdout)
    if isinstance(found, Exception):
        raise found
    tables, attrs = found
    return tables, attrs


def _print_old(path: str) -> None:
    """Child process of `read_old`: writes its answer, or the exception to raise, to stdout as a pickle."""
    import resource

    import h5py

    most, allowed = _OLD_FILE_MEMORY + 16 * Path(path).stat().st_size, resource.getrlimit(resource.RLIMIT_AS)[1]
    if allowed == resource.RLIM_INFINITY or most < allowed:
        resource.setrlimit(resource.RLIMIT_AS, (most, allowed))
    answer: Any
    try:
        with h5py.File(path, "r", locking=False) as file:
            answer = {table: _columns(file, table) for table in TABLES}, _attrs(file, Path(path))
        if HAS_CHECKSUMS in answer[1]:
            reason = "its checksums are missing: a write was cut short, or another program wrote to it"
            answer = Unusable(f"{path} is damaged ({reason})")
        elif not answer[1].get("complete"):
            answer = Unusable(f"{path} was left in the middle of a write")
    except StoreError as error:
        answer = error
    except (*_FAILURES, MemoryError) as error:
        answer = Unusable(f"{path} is damaged ({error})")
    sys.stdout.buffer.write(pickle.dumps(answer))


# --- content with checksums ---------------------------------------------------------------------------------------


def _look(path: Path, at: Callable[["h5py.File"], T]) -> T:
    """Call `at` on one consistent state of the file, as a flush left it. Waits for a running flush."""
    import h5py

    began = since = time.monotonic()
    last: int | None = None
    reason: Exception
    while True:
        state = None
        try:
            with Pages(path) as pages:
                state = pages.state
                # if a flush interfered once, read all at once from then on, which takes a tenth of the time
                source = pages if last is None else io.BytesIO(b"".join(iter(lambda: pages.read(2**24), b"")))
                with h5py.File(source, "r") as file:
                    return at(file)
        except FileNotFoundError:
            raise Unusable(f"{path} is missing") from None
        except NoChecksums as error:
            reason, patience = error, _FLUSH_SECONDS
        except _FAILURES as error:
            reason, patience = Unusable(f"{path} is damaged ({error})"), _REPLACED_SECONDS
        now = time.monotonic()
        if now - began > _MOST_SECONDS:
            raise reason
        if state != last:  # a flush came in between
            since, last = now, state
        elif now - since > patience or not _is_fresh(path):
            raise reason
        time.sleep(0.02)


def _is_fresh(path: Path) -> bool:
    """Whether the file was written so recently that a flush may be running."""
    try:
        return time.time() - path.stat().st_mtime < _FLUSH_SECONDS
    except OSError:
        return True


def _attrs(file: "h5py.File", path: Path) -> Attrs:
    attrs = {name: value.item() if hasattr(value, "item") else value for name, value in file.attrs.items()}
    if attrs.get("schema_version", 0) > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {attrs['schema_version']}; this hpc_es reads up to {SCHEMA_VERSION}"
        )
    return attrs


def _columns(file: "h5py.File", table: str) -> Columns:
    import numpy as np

    if table not in file and all(column.is_new for column in TABLES[table]):
        return {column.name: np.empty(0, memory_dtype(column)) for column in TABLES[table]}
    return {column.name: _column(file[table], column) for column in TABLES[table]}


def _column(group: Any, column: Column) -> "np.ndarray[Any, Any]":
    import numpy as np

    if column.is_new and column.name not in group:
        num_rows = len(group[next(iter(group))])  # all columns of a table have the same length
        return np.full(num_rows, column.fill, memory_dtype(column))
    dataset = group[column.name]
    if column.dtype == "str":
        texts = list(map(_Texts().__getitem__, dataset[:].tolist()))
        return np.array(texts, dtype=object)
    if column.dtype == "choice":
        return np.array(column.choices, dtype=object)[dataset[:]]
    return np.asarray(dataset[:])


class _Texts(dict[bytes, str]):
    """Cache of decoded texts: most occur many times, and a lookup is faster than decoding."""

    def __missing__(self, text: bytes) -> str:
        return self.setdefault(text, text.decode())


def memory_dtype(column: Column) -> str:
    """dtype of a column once it has been read."""
    return "object" if column.dtype in ("str", "choice") else column.dtype
