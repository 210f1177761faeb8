"""The journal: an append-only, checksummed file from which a run can be rebuilt.

One segment per head start, RUN/journal.<g>.hpcj: eight bytes of magic and format version, then frames (marker, length,
CRC-32, msgpack list of records). One frame holds what one `sync` made durable, and the next frame is only written after
that, so whatever a crash or a full disk leaves behind is at most one broken frame at the very end: a torn tail, which
is cut with a warning. A broken frame with a valid one after it, or inside sealed bytes, is damage, and refused.

Which bytes count: a new head creates segment g exclusively, *then* measures its predecessor (the newest older segment
that has a first record), makes those bytes durable, and writes both numbers into its own first record. An older head
looks for a newer segment before it writes and again after it has synced. So what it believes to be durable was in place
before the newer segment existed, hence was measured; what it writes later lies behind the seal and does not count. A
segment without a valid first record never began, and nothing refers to it.
"""

import contextlib
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_es.errors import JournalDamaged, StoreError, Superseded
from hpc_es.paths import RunPaths
from hpc_es.store.records import SCHEMA_VERSION, AnyRecord, Started

FORMAT_VERSION = 1

_FILE = struct.Struct("<4sI")
_MAGIC = b"HPCJ"
_FRAME = struct.Struct("<4sII")
_MARKER = b"\xb6\x0fJ\xf1"
"""Starts every frame, so that a frame can be found again behind a damaged length. 0xf1 follows in no UTF-8 text."""

_FIRST_BYTES = 2**20
"""The first frame, which has the configuration and nothing else, ends before."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyRecord])

Warn = Callable[[str], None]


def warn_python(text: str) -> None:
    """The default `warn`: a Python warning."""
    warnings.warn(text, stacklevel=3)


class JournalWriter:
    """The one writer of the newest segment. Not for two threads, except that `append` may run beside `sync`."""

    def __init__(self, paths: RunPaths, generation: int, file: int) -> None:
        self.generation = generation
        self.size = 0
        """Bytes that are durable."""
        self.path = paths.segment(generation)
        self._newer = paths.segment(generation + 1)
        self._file = file
        self._pending: list[AnyRecord] = []
        self._refusal: StoreError | None = None

    @classmethod
    def create(cls, paths: RunPaths, started: Callable[[int, int], Started]) -> "JournalWriter":
        """Take the next generation, seal the previous segment, make `started(generation, predecessor_bytes)` durable.

        Errors: JournalDamaged before anything is created; Superseded when a newer head began meanwhile; StoreError
        when the segment cannot be written (it then counts as nothing).
        """
        _check(paths)
        generation, file = _take_generation(paths)
        writer = cls(paths, generation, file)
        try:
            predecessor, sealed_bytes = _seal(paths, generation)
            writer.append(msgspec.structs.replace(started(generation, sealed_bytes), predecessor=predecessor))
            writer._write(_FILE.pack(_MAGIC, FORMAT_VERSION))
            writer.sync()
            _sync_path(paths.root)
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
        """Make all appended records durable. After an error nothing more is written, whatever is called.

        Errors: Superseded when a newer segment exists; StoreError for a full disk or a failed fsync.
        """
        if self._refusal is not None:
            raise self._refusal
        self._refuse_when_superseded()
        records, self._pending = self._pending, []
        if not records:
            return
        self._write(frame(records))
        try:
            os.fdatasync(self._file)
            self.size = os.fstat(self._file).st_size
        except OSError as error:
            raise self._refuse(os_error("sync", self.path, error)) from error
        self._refuse_when_superseded()

    def superseded(self) -> bool:
        """Whether a newer head has taken over. Segments are never deleted, so looking for the next one is enough."""
        return self._newer.exists()

    def close(self) -> None:
        """Sync what is pending, unless an earlier sync failed, and close the file."""
        if self._file < 0:
            return
        try:
            if self._pending and self._refusal is None:
                self.sync()
        finally:
            os.close(self._file)
            self._file = -1
            self._refuse(StoreError(f"{self.path} is closed"))

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:  # a disk that fills up first writes less than asked, then fails
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

    Errors, while iterating: JournalDamaged with file and offset; StoreError for a newer schema or format.
    """
    for segment in _chain(RunPaths(root)):
        yield from segment.records(warn)


def began_as(root: Path) -> Started | None:
    """The first record of the oldest segment, which is all that is read; None where it is not there, or damaged."""
    for _, path in RunPaths(root).segments()[:1]:
        with contextlib.suppress(OSError, StoreError), path.open("rb") as file:
            data = file.read(_FIRST_BYTES)
            payload = _payload_at(data, _FILE.size) if _has_header(path, data) else None
            records = _decode(path, _FILE.size, payload) if payload else []
            return next((record for record in records if isinstance(record, Started)), None)
    return None


@dataclass(frozen=True)
class JournalEnd:
    """Where a journal ends: the newest generation that began, and how many bytes of its segment are valid."""

    generation: int
    num_bytes: int


def journal_end(root: Path) -> JournalEnd | None:
    """None when there is no journal. Reads the newest segment once. Errors: as `read_journal`."""
    chain = _chain(RunPaths(root))
    return JournalEnd(chain[-1].started.generation, chain[-1].valid_bytes()) if chain else None


def read_file(path: Path, *, warn: Warn = warn_python) -> Iterator[AnyRecord]:
    """All records of a journal that stands alone (an evaluation made later, a model). Errors as `read_journal`."""
    segment = _Segment.open(path)
    if segment is None:
        raise StoreError(f"{path} is not a journal: it has no valid first record")
    yield from segment.records(warn)


def valid_bytes(path: Path) -> int:
    """How many bytes of a journal that stands alone are valid: all but a torn tail. Errors: as `read_file`."""
    segment = _Segment.open(path)
    if segment is None:
        raise StoreError(f"{path} is not a journal: it has no valid first record")
    return segment.valid_bytes()


def write_file(path: Path, records: Iterable[AnyRecord]) -> None:
    """A journal that stands alone, complete or absent. The first record must be Started. Errors: StoreError."""
    frames = list(records)
    if not frames or not isinstance(frames[0], Started):
        raise StoreError(f"{path}: the first record of a journal is Started")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            file.write(_FILE.pack(_MAGIC, FORMAT_VERSION) + frame(frames[:1]) + frame(frames[1:]))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # what refused the writing may refuse this too
            temporary.unlink(missing_ok=True)
        raise os_error("write", path, error) from error


# --- reading one segment ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Segment:
    """A segment that began. `sealed` is how many of its bytes count; None for the newest one."""

    path: Path
    started: Started
    sealed: int | None = None

    @classmethod
    def open(cls, path: Path, sealed: int | None = None) -> "_Segment | None":
        """None when the file has no valid first record. Errors: as `read_journal`."""
        data = _read(path, sealed)
        if not _has_header(path, data):
            return None
        first = next(_frames(path, data), None)
        if first is None:
            return None
        offset, payload = first
        _check_schema(path, payload)
        records = _decode(path, offset, payload)
        if not records or not isinstance(records[0], Started):
            raise _damaged(path, offset, "the first record is not Started")
        return cls(path, records[0], sealed)

    def records(self, warn: Warn) -> Iterator[AnyRecord]:
        data = _read(self.path, self.sealed)
        end = _FILE.size
        for offset, payload in _frames(self.path, data):
            yield from _decode(self.path, offset, payload)
            end = offset + _FRAME.size + len(payload)
        if end < len(data):
            self._refuse_sealed(end)
            warn(f"{self.path}: a torn tail of {len(data) - end} bytes at offset {end} was cut (never acknowledged)")

    def valid_bytes(self) -> int:
        end = _FILE.size
        for offset, payload in _frames(self.path, _read(self.path, self.sealed)):
            end = offset + _FRAME.size + len(payload)
        if self.sealed not in (None, end):
            self._refuse_sealed(end)
        return end

    def _refuse_sealed(self, end: int) -> None:
        if self.sealed is not None:
            raise _damaged(self.path, end, f"no valid frame, but {self.sealed} bytes are sealed as valid")


def _frames(path: Path, data: bytes) -> Iterator[tuple[int, memoryview]]:
    """(offset, payload) of the valid frames up to the torn tail, if any. Errors: JournalDamaged."""
    offset = _FILE.size
    while (payload := _payload_at(data, offset)) is not None:
        yield offset, payload
        offset += _FRAME.size + len(payload)
    _refuse_later_frames(path, data, offset)


def _payload_at(data: bytes, offset: int) -> memoryview | None:
    start = offset + _FRAME.size
    if start > len(data):
        return None
    marker, length, checksum = _FRAME.unpack_from(data, offset)
    payload = memoryview(data)[start : start + length]
    if marker != _MARKER or len(payload) != length or zlib.crc32(payload) != checksum:
        return None
    return payload


def _refuse_later_frames(path: Path, data: bytes, offset: int) -> None:
    """Tell a torn tail from damage: a tail is the last thing in its file, damage has a valid frame after it."""
    later = data.find(_MARKER, offset + 1)
    while later >= 0:
        if _payload_at(data, later) is not None:
            raise _damaged(path, offset, f"no valid frame, yet there is one further on, at {later}")
        later = data.find(_MARKER, later + 1)


def _has_header(path: Path, data: bytes) -> bool:
    if len(data) < _FILE.size:
        return False
    magic, version = _FILE.unpack_from(data)
    if magic != _MAGIC:
        _refuse_later_frames(path, data, 0)
        return False
    if version != FORMAT_VERSION:
        raise StoreError(f"{path} has journal format {version}; this hpc_es reads format {FORMAT_VERSION}")
    return True


def _check_schema(path: Path, payload: memoryview) -> None:
    """Look at the schema version before the types, which a newer schema may have changed."""
    first = msgspec.msgpack.decode(payload)[0]
    version = first.get("schema_version", 0) if isinstance(first, dict) else 0
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has records of schema version {version}; this hpc_es reads up to {SCHEMA_VERSION}: use a newer one"
        )


def _decode(path: Path, offset: int, payload: memoryview) -> list[AnyRecord]:
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise _damaged(path, offset, f"the checksum is right, but these are no records: {error}") from error


# --- the chain of segments --------------------------------------------------------------------------------------


def _chain(paths: RunPaths, below: int | None = None) -> list[_Segment]:
    """The segments that count, oldest first, of all generations or of those below one."""
    files = {generation: path for generation, path in paths.segments() if below is None or generation < below}
    newest = next((segment for g in sorted(files, reverse=True) if (segment := _Segment.open(files[g]))), None)
    chain: list[_Segment] = []
    while newest is not None:
        chain.insert(0, newest)
        wanted, sealed = newest.started.predecessor, newest.started.predecessor_bytes
        if wanted == 0:
            break
        if wanted not in files:
            raise JournalDamaged(f"{paths.segment(wanted)} is missing, but {newest.path.name} (offset 0) continues it")
        newest = _Segment.open(files[wanted], sealed)
        if newest is None:
            raise _damaged(files[wanted], 0, f"no valid first record, but {sealed} bytes are sealed as valid")
    return chain


def _check(paths: RunPaths) -> None:
    """Errors: JournalDamaged, StoreError."""
    for segment in _chain(paths):
        segment.valid_bytes()


def _take_generation(paths: RunPaths) -> tuple[int, int]:
    while True:
        generation = max((taken for taken, _ in paths.segments()), default=0) + 1
        path = paths.segment(generation)
        try:
            return generation, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            continue  # another head was faster; it will find that this one is newer
        except OSError as error:
            raise os_error("create", path, error) from error


def _seal(paths: RunPaths, generation: int) -> tuple[int, int]:
    """(generation, valid bytes) of the predecessor, which are durable from now on; (0, 0) when there is none."""
    chain = _chain(paths, below=generation)
    if not chain:
        return 0, 0
    predecessor = chain[-1]
    _sync_path(predecessor.path)
    return predecessor.started.generation, predecessor.valid_bytes()


# --- files ------------------------------------------------------------------------------------------------------


def frame(records: Sequence[AnyRecord]) -> bytes:
    """What one `sync` writes."""
    payload = _encoder.encode(records)
    return _FRAME.pack(_MARKER, len(payload), zlib.crc32(payload)) + payload


def _read(path: Path, sealed: int | None = None) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise os_error("read", path, error) from error
    if sealed is None:
        return data
    if len(data) < sealed:
        raise _damaged(path, len(data), f"the file ends here, but {sealed} bytes are sealed as valid")
    return data[:sealed]


def _sync_path(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
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


def _damaged(path: Path, offset: int, what: str) -> JournalDamaged:
    return JournalDamaged(f"{path} is damaged at offset {offset}: {what}; restore the file from a copy")
