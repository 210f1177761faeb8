"""Evaluations made after the run: evals/NAME.hpcj, a journal of its own that grows as results come in.

Invariants: nothing in the run is ever touched; the file never exists without its first record, every append is one
frame and is on disk when it returns, and what a crash or a full disk leaves behind is at most a torn tail, which
readers leave out and the next writer cuts. A name has one writer at a time. The end mark (frames.py) stands at the end
of a file that nobody writes and whose last writer was not killed.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_es.errors import StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.frames import FORMAT_VERSION, Chain, frame
from hpc_es.store.journal import (
    Warn,
    file_frames,
    lock,
    os_error,
    read_file,
    tell_end,
    warn_python,
    write_file,
    write_frames,
)
from hpc_es.store.records import AnyRecord, Planned, Reported, Started

_KINDS = (Started, Planned, Reported)
"""What the journal of an evaluation holds."""


class EvalJournal:
    """The writer of one evaluation; see `open`."""

    def __init__(self, path: Path, file: int, earlier: Sequence[AnyRecord], size: int, chain: Chain) -> None:
        """`chain`: over the frames in the first `size` bytes."""
        self.path = path
        self.earlier = tuple(earlier)
        """What was there when it was opened, the Started record first."""
        self._file, self._size, self._chain = file, size, chain

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
            frames = file_frames(path)
            earlier = [record for _, records in frames for record in records]
            tell_end(frames, warn)
            size, chain = frames.content
            os.ftruncate(file, size)
            return cls(path, file, earlier, size, chain)
        except OSError as error:
            os.close(file)
            raise os_error("write", path, error) from error
        except BaseException:
            os.close(file)
            raise

    def append(self, *records: AnyRecord) -> None:
        """Durable when this returns. Errors: StoreError; what was there before is as it was."""
        data, chain = frame(records, self._chain)
        try:
            view = memoryview(data)
            while view:  # a disk that fills up first writes less than asked, then fails
                view = view[os.write(self._file, view) :]
            os.fdatasync(self._file)
            self._size, self._chain = self._size + len(data), chain
        except OSError as error:
            with contextlib.suppress(OSError):  # what refused the writing may refuse this too; the tail is torn then
                os.ftruncate(self._file, self._size)
            raise os_error("write", self.path, error) from error

    def close(self) -> None:
        """Write the end mark, which the next writer takes away again, and close the file. Errors: StoreError."""
        try:
            self.append()
        finally:
            os.close(self._file)


def read_later(path: Path, *, warn: Warn = warn_python) -> Iterator[AnyRecord]:
    """All records of a later evaluation, the Started record first. Errors: StoreError, also for another journal."""
    for record in read_file(path, warn=warn):
        if not isinstance(record, _KINDS):
            raise StoreError(
                f"{path} is the journal of a run or of a model, not of an evaluation (it has a {type(record).__name__} "
                "record); move it elsewhere"
            )
        yield record


def _open(path: Path, started: Started) -> int:
    """Locked, in today's format, and with a first record. Errors: StoreError, OSError."""
    with _locked_folder(path.parent):
        if not path.exists():
            write_file(path, [started])
        file = _open_locked(path)
        try:
            if file_frames(path).version < FORMAT_VERSION:
                write_frames(path, [records for _, records in file_frames(path)])  # under its name is another file now
                os.close(file)
                file = _open_locked(path)
        except BaseException:
            os.close(file)
            raise
    return file


def _open_locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
