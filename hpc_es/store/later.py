"""Evaluations made after the run: evals/NAME.hpcj, a journal of its own that grows as results come in.

Invariants: nothing in the run is ever touched; the file never exists without its first record, every append is one
frame and is on disk when it returns, and what a crash or a full disk leaves behind is at most a torn tail, which
readers leave out and the next writer cuts. A name has one writer at a time.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_es.errors import StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.journal import Warn, frame, os_error, read_file, valid_bytes, warn_python, write_file
from hpc_es.store.records import AnyRecord, Started

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class EvalJournal:
    """The writer of one evaluation; see `open`."""

    def __init__(self, path: Path, file: int, earlier: Sequence[AnyRecord]) -> None:
        self.path = path
        self.earlier = tuple(earlier)
        """What was there when it was opened, the Started record first."""
        self._file = file
        self._size = os.fstat(file).st_size

    @classmethod
    def open(cls, paths: RunPaths, name: str, started: Started, *, warn: Warn = warn_python) -> "EvalJournal":
        """Begin an evaluation with `started`, or go on with the one of this name, which has a first record already.

        Errors: StoreError when it is being written by another process, damaged, or cannot be written.
        """
        path = paths.later_eval(name)
        try:
            paths.evals.mkdir(exist_ok=True)
            file = _open(path, started)
        except OSError as error:
            raise os_error("write", path, error) from error
        try:
            earlier = list(read_file(path, warn=warn))
            os.ftruncate(file, valid_bytes(path))
            return cls(path, file, earlier)
        except OSError as error:
            os.close(file)
            raise os_error("write", path, error) from error
        except BaseException:
            os.close(file)
            raise

    def append(self, *records: AnyRecord) -> None:
        """Durable when this returns. Errors: StoreError; what was there before is as it was."""
        try:
            view = memoryview(frame(records))
            while view:  # a disk that fills up first writes less than asked, then fails
                view = view[os.write(self._file, view) :]
            os.fdatasync(self._file)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            with contextlib.suppress(OSError):  # what refused the writing may refuse this too; the tail is torn then
                os.ftruncate(self._file, self._size)
            raise os_error("write", self.path, error) from error

    def close(self) -> None:
        os.close(self._file)


def _open(path: Path, started: Started) -> int:
    """Locked, and with a first record. Errors: StoreError, OSError."""
    with _locked_folder(path.parent):
        if not path.exists():
            write_file(path, [started])
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise StoreError(f"{path} is being written by another process: choose another name") from None
        except BaseException:
            os.close(file)
            raise
    return file


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """So that two writers cannot both find a name free."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(file: int, how: int) -> None:
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # some cluster file systems have none
            raise
