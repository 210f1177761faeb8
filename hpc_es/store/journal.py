"""The journal: an append-only, checksummed file from which a run can be rebuilt.

One segment per head start, RUN/journal.<g>.hpcj, made of frames (frames.py). One frame holds what one `sync` made
durable, and the next frame is written only after that, so a crash or a full disk leaves behind at most one broken frame
at the very end: a torn tail, which is cut with a warning. A broken frame that a complete one follows, a frame in the
wrong place, and a broken frame inside sealed bytes are damage, and refused.

Which bytes count: a new head creates segment g exclusively, *then* measures its predecessor (the newest older segment
that has a first record), makes those bytes durable, and writes their number and their seal, which covers every one of
them, into its own first record. An older head looks for a newer segment before it writes and again after it has synced.
So everything that it believes to be durable was written before the newer segment existed, and was therefore measured;
what it writes later is after the sealed bytes and does not count. A segment without a valid first record never began,
and nothing refers to it.

If whole frames at the end of the newest segment are lost, only the missing end mark shows it: a head that exits writes
the mark, one that is killed cannot. So other files that know how far the run got are checked too (witnesses.py).
"""

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_es.errors import JournalDamaged, StoreError, Superseded
from hpc_es.files import open_regular, read_bytes
from hpc_es.paths import MAX_GENERATION, RunPaths
from hpc_es.store.frames import FILE_HEADER, FORMAT_VERSION, Chain, Frames, damaged, frame, last_records
from hpc_es.store.records import AnyRecord, Started
from hpc_es.store.witnesses import Witnesses

Warn = Callable[[str], None]

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of file systems without locks, which some clusters have."""


def warn_python(text: str) -> None:
    """The default `warn`: a Python warning, shown once per process and text."""
    warnings.warn_explicit(text, UserWarning, "hpc_es", 0, registry=_said)


_said: dict[str | tuple[str, type[Warning], int], int] = {}


TAIL_BYTES = 2**16
"""How much `last_record` reads. The last record of a run that has ended is short."""


class JournalWriter:
    """The only writer of the newest segment. Not thread-safe, except that `append` may run during `sync`."""

    def __init__(self, paths: RunPaths, generation: int, file: int) -> None:
        self.generation = generation
        self.size = 0
        """Number of durable bytes."""
        self.path = paths.segment(generation)
        self._newer = paths.segment(generation + 1)
        self._file = file
        self._chain = Chain()
        self._pending: list[AnyRecord] = []
        self._refusal: StoreError | None = None

    @classmethod
    def create(
        cls, paths: RunPaths, started: Callable[[int, int], Started], *, warn: Warn = warn_python
    ) -> "JournalWriter":
        """Take the next generation, seal the previous segment, make `started(generation, predecessor_bytes)` durable.

        Errors: JournalDamaged before anything is created; Superseded when a newer head began meanwhile; StoreError
        when the segment cannot be written (it then does not count).
        """
        newest = _check(paths)
        generation, file = _take_generation(paths, newest)
        writer = cls(paths, generation, file)
        try:
            lock(file, fcntl.LOCK_EX)  # tells readers that this segment is still being written
            seal = _seal(paths, generation, warn)
            first = started(generation, seal.num_bytes)
            sealing = {"predecessor": seal.generation, "predecessor_seal": seal.digest}
            writer.append(msgspec.structs.replace(first, **sealing))
            writer._write(FILE_HEADER)
            writer.sync()
            _sync_path(paths.root)
        except OSError as error:
            os.close(file)
            raise os_error("lock", writer.path, error) from error
        except BaseException:
            os.close(file)
            raise
        return writer

    def append(self, record: AnyRecord) -> None:
        """Add a record to the next `sync`; nothing is written yet. Errors: StoreError after a failed sync."""
        if self._refusal is not None:
            raise self._refusal
        self._pending.append(record)

    def sync(self) -> None:
        """Make all appended records durable. After an error nothing more is ever written.

        Errors: Superseded when a newer segment exists; StoreError for a full disk or a failed fsync.
        """
        if self._refusal is not None:
            raise self._refusal
        self._refuse_when_superseded()
        records, self._pending = self._pending, []
        if not records:
            return
        self._write_frame(records)
        self._refuse_when_superseded()

    def superseded(self) -> bool:
        """Whether a newer head has taken over. Numbers are taken without gaps, so looking for the next is enough."""
        return self._newer.exists()

    def close(self) -> None:
        """Sync pending records, write the end mark and close the file; after a failed sync, only close it."""
        if self._file < 0:
            return
        try:
            if self._pending and self._refusal is None:
                self.sync()
            if self._refusal is None and not self.superseded():
                self._write_frame([])
        finally:
            os.close(self._file)
            self._file = -1
            self._refuse(StoreError(f"{self.path} is closed"))

    def _write_frame(self, records: list[AnyRecord]) -> None:
        data, self._chain = frame(records, self._chain)
        self._write(data)
        try:
            os.fdatasync(self._file)
            self.size = os.fstat(self._file).st_size
        except OSError as error:
            raise self._refuse(os_error("sync", self.path, error)) from error

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:  # a disk that fills up writes a part first, then fails
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise self._refuse(os_error("write", self.path, error)) from error

    def _refuse_when_superseded(self) -> None:
        if self.superseded():
            text = f"{self._newer.name} exists: a newer head owns this run, generation {self.generation} stops"
            raise self._refuse(Superseded(text))

    def _refuse(self, error: StoreError) -> StoreError:
        self._refusal = self._refusal or error
        return error


def read_journal(root: Path, *, warn: Warn = warn_python) -> Iterator[AnyRecord]:
    """All records that count, in order, over all segments; nothing when there is no journal. Never writes.

    Errors, while iterating: JournalDamaged with file and offset, also when something else in the run folder knows that
    records are missing at the end; StoreError for a newer schema or format.
    """
    for _, _, records in _read_frames(RunPaths(root), warn):
        yield from records


def fold_journal(root: Path, apply: Callable[[AnyRecord], None], *, warn: Warn = warn_python) -> None:
    """Call `apply` with every record of `read_journal`; a StoreError that it raises is reported with file and offset.

    Errors: as `read_journal`.
    """
    for path, offset, records in _read_frames(RunPaths(root), warn):
        try:
            for record in records:
                apply(record)
        except JournalDamaged:
            raise
        except StoreError as error:
            raise damaged(path, offset, str(error)) from error


@dataclass(frozen=True)
class JournalEnd:
    """Where a journal ends: the newest generation that began, and how many bytes of its segment are valid."""

    generation: int
    num_bytes: int


def journal_end(root: Path) -> JournalEnd | None:
    """Find the end of a journal; None if there is none. Reads the newest segment once. Errors: as `read_journal`."""
    chain, _ = _chain(RunPaths(root))
    return JournalEnd(chain[-1].started.generation, chain[-1].measure().end) if chain else None


def last_record(paths: RunPaths) -> AnyRecord | None:
    """The last record, from the end of the newest segment alone; None where there is none, or it cannot be told.

    A run of days has a long journal, and a thousand workers that start at once would all read it.
    """
    segments = paths.segments()
    if not segments:
        return None
    try:
        with open(open_regular(segments[-1][1]), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            records = last_records(file.read(), FORMAT_VERSION)
    except OSError:
        return None
    return records[-1] if records else None


def newest_start(paths: RunPaths) -> Started | None:
    """First record of the newest segment that began. Errors: as `read_journal`."""
    newest, _ = _newest(dict(paths.segments()))
    return newest.started if newest else None


# --- journals of a single file ----------------------------------------------------------------------------------


def read_file(path: Path, *, warn: Warn = warn_python, whole: bool = False) -> Iterator[AnyRecord]:
    """All records of a journal of a single file (a later evaluation, a model).

    `whole`: it was written in one piece, so it must have an end mark. Errors as `read_journal`.
    """
    live = is_being_written(path)
    frames = file_frames(path)
    for _, records in frames:
        yield from records
    if whole and frames.version > 1 and not frames.closed:
        raise damaged(path, frames.end, "its end mark is missing, so its end is lost")
    if not live:
        tell_end(frames, warn)


def file_frames(path: Path) -> Frames:
    """Frames of a journal of a single file, not yet iterated. Errors: as `read_file`."""
    segment = _Segment.open(path)
    if segment is None:
        raise StoreError(f"{path} is not a journal: it has no valid first record")
    return segment.frames()


def write_file(path: Path, records: Iterable[AnyRecord]) -> None:
    """Write a journal of a single file, whole or not at all. The first record must be Started. Errors: StoreError."""
    every = list(records)
    write_frames(path, [every[:1], every[1:]])


def write_frames(path: Path, frames: Iterable[list[AnyRecord]]) -> None:
    """As `write_file`, with the records of each frame given separately."""
    first, *others = frames
    if not first or not isinstance(first[0], Started):
        raise StoreError(f"{path}: the first record of a journal is Started")
    data, chain = b"", Chain()
    for records in [first, *filter(None, others), []]:
        more, chain = frame(records, chain)
        data += more
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            file.write(FILE_HEADER + data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # may fail for the same reason
            temporary.unlink(missing_ok=True)
        raise os_error("write", path, error) from error


# --- reading one segment ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seal:
    """What the first record of a segment says about its predecessor."""

    by: str
    """Name of the segment with this record."""
    generation: int
    """0: there is no predecessor."""
    num_bytes: int
    digest: bytes
    """Empty in records of the first release."""


@dataclass(frozen=True)
class _Segment:
    """A segment that began. `sealed` says how much of it counts; None for the newest one."""

    path: Path
    started: Started
    sealed: _Seal | None = None

    @classmethod
    def open(cls, path: Path, sealed: _Seal | None = None) -> "_Segment | None":
        """Open a segment; None if the file has no valid first record. Errors: as `read_journal`."""
        data = _read(path, sealed)
        first = next(iter(Frames(path, data)), None)
        if first is None:
            return None
        offset, records = first
        if not records or not isinstance(records[0], Started):
            raise damaged(path, offset, "the first record is not Started")
        return cls(path, records[0], sealed)

    @property
    def seals(self) -> _Seal:
        started = self.started
        return _Seal(self.path.name, started.predecessor, started.predecessor_bytes, started.predecessor_seal)

    def frames(self) -> Frames:
        """Frames of the segment, not yet iterated. Errors: as `read_journal`."""
        return Frames(self.path, _read(self.path, self.sealed))

    def measure(self) -> Frames:
        """Frames of the segment, read to the end. Errors: as `read_journal`."""
        frames = self.frames()
        for _ in frames.payloads():
            pass
        self.check_seal(frames)
        return frames

    def check_seal(self, frames: Frames) -> None:
        """Compare with the seal in the next segment. Errors: JournalDamaged when they differ."""
        sealed = self.sealed
        if sealed is None:
            return
        if frames.end != sealed.num_bytes:
            raise damaged(self.path, frames.end, f"no valid frame, but {sealed.num_bytes} bytes are sealed as valid")
        if sealed.digest and sealed.digest != frames.seal:
            raise damaged(
                self.path,
                0,
                f"this is not the segment that {sealed.by} continues: it was altered, or is from another run",
            )


def tell_end(frames: Frames, warn: Warn) -> None:
    """Warn if a journal that nobody is writing has lost, or may have lost, its end."""
    where = f"{frames.path}: "
    if frames.torn_bytes:
        warn(f"{where}a torn tail of {frames.torn_bytes} bytes at offset {frames.end} was cut (never acknowledged)")
    elif frames.version > 1 and not frames.closed:
        warn(
            f"{where}no end mark at offset {frames.end}: its writer was killed (then nothing is missing), or the file "
            "has lost its end"
        )


# --- the chain of segments --------------------------------------------------------------------------------------


def _read_frames(paths: RunPaths, warn: Warn) -> Iterator[tuple[Path, int, list[AnyRecord]]]:
    """(segment, offset, records) of every frame that counts. Errors: as `read_journal`."""
    witnesses = Witnesses.gather(paths)  # before the journal: a head writes the journal first
    chain, unborn = _chain(paths)
    witnesses.check_start(chain[-1].started if chain else None)
    for segment in chain:
        live = is_being_written(segment.path)  # asked first: a writer that ends meanwhile leaves its end mark
        frames = segment.frames()
        for offset, records in frames:
            witnesses.listen(records)
            yield segment.path, offset, records
        segment.check_seal(frames)
        is_newest = segment is chain[-1]
        witnesses.check_segment(segment.started, frames, is_newest=is_newest)
        if is_newest and not live:
            tell_end(frames, warn)
    for path in unborn:
        if not is_being_written(path):
            warn(f"{path} has no first record: its head was killed before it began, or the file has lost its content")


def _chain(paths: RunPaths, below: int | None = None) -> tuple[list[_Segment], list[Path]]:
    """(Segments that count, oldest first; newer files without a first record), optionally only below a generation.

    Errors: JournalDamaged.
    """
    files = {generation: path for generation, path in paths.segments() if below is None or generation < below}
    newest, unborn = _newest(files)
    chain: list[_Segment] = []
    while newest is not None:
        chain.insert(0, newest)
        seal = newest.seals
        if seal.generation == 0:
            break
        if not 0 < seal.generation < newest.started.generation:
            raise damaged(newest.path, 0, f"it continues segment {seal.generation}, which is not an older one")
        if seal.generation not in files:
            missing = paths.segment(seal.generation)
            raise JournalDamaged(
                f"{missing} is missing, but {newest.path.name} (offset 0) continues it; restore the file from a copy"
            )
        path = files[seal.generation]
        newest = _Segment.open(path, seal)
        if newest is None:
            raise damaged(path, 0, f"no valid first record, but {seal.num_bytes} bytes are sealed as valid")
        _refuse_other_name(seal.generation, newest)
    return chain, unborn


def _newest(files: dict[int, Path]) -> tuple[_Segment | None, list[Path]]:
    """The newest segment that began, and the newer files without a first record. Errors: JournalDamaged."""
    unborn: list[Path] = []
    for generation in sorted(files, reverse=True):
        if (segment := _Segment.open(files[generation])) is not None:
            _refuse_other_name(generation, segment)
            return segment, unborn
        unborn.append(files[generation])
    return None, unborn


def _refuse_other_name(generation: int, segment: _Segment) -> None:
    if segment.started.generation != generation:
        raise damaged(
            segment.path,
            0,
            f"its first record is of generation {segment.started.generation}: it was renamed, or is from another run",
        )


def _check(paths: RunPaths) -> int:
    """Read the whole journal; return the newest generation that began, or 0. Errors: JournalDamaged, StoreError."""
    for _ in _read_frames(paths, lambda text: None):
        pass
    end = journal_end(paths.root)
    return end.generation if end else 0


def _take_generation(paths: RunPaths, newest: int) -> tuple[int, int]:
    """Create the file of the first free generation. Numbers have no gaps, so a head can find its successor."""
    for generation in range(newest + 1, MAX_GENERATION + 1):
        path = paths.segment(generation)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            continue  # another head was faster; it will notice that this one is newer
        except OSError as error:
            raise os_error("create", path, error) from error
        if not paths.segment(generation + 1).exists():
            return generation, file
        os.close(file)  # a file has the next number, so this head would believe that it was replaced
    raise StoreError(f"{paths.root} has no free journal segment: {MAX_GENERATION} is the last one")


def _seal(paths: RunPaths, generation: int, warn: Warn) -> _Seal:
    """Make the predecessor durable, and return its seal."""
    chain, _ = _chain(paths, below=generation)
    if not chain:
        return _Seal("", 0, 0, b"")
    predecessor = chain[-1]
    _sync_path(predecessor.path)
    live = is_being_written(predecessor.path)  # by a suspended head, which will notice that this one is newer
    frames = predecessor.measure()
    if not live:
        tell_end(frames, warn)
    return _Seal("", predecessor.started.generation, frames.end, frames.seal)


# --- files ------------------------------------------------------------------------------------------------------


def is_being_written(path: Path) -> bool:
    """Whether a process holds the lock of a journal's writer; False if the file system has no locks."""
    try:
        file = open_regular(path)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def lock(file: int, how: int) -> None:
    """Lock a file, if the file system has locks. Errors: BlockingIOError, OSError."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _read(path: Path, sealed: _Seal | None = None) -> bytes:
    try:
        data = read_bytes(path)
    except OSError as error:
        raise os_error("read", path, error) from error
    if sealed is None:
        return data
    if len(data) < sealed.num_bytes:
        raise damaged(path, len(data), f"the file ends here, but {sealed.num_bytes} bytes are sealed as valid")
    return data[: sealed.num_bytes]


def _sync_path(path: Path) -> None:
    """Make a file, or the entries of a directory, durable."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise os_error("sync", path, error) from error


def os_error(action: str, path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot {action} {path}: {error.strerror or error}")
