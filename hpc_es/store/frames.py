"""Frames: how a journal file stores records, so that lost, repeated, moved or altered ones are noticed.

A file is eight bytes of magic and format version, then frames. In format 2 a frame is a header (marker, length of the
payload, CRC-32 of all that follows, sequence number, running digest) and its payload, a msgpack list of records. The
running digest is BLAKE2b over the running digest of the frame before, the sequence number and the payload, so it covers
everything from the first record on, which names run, generation and predecessor. The CRC tells whether a frame is
complete, and so a torn tail from damage; sequence number and digest tell whether it is where it was written. A frame
without records is the end mark: its writer closed the file in good order, and nothing comes after it.

Format 1, of the first release, has neither sequence number, digest nor end mark: a frame that was removed or moved as a
whole is not noticed there.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpc_es.errors import JournalDamaged, StoreError
from hpc_es.store import first_schema
from hpc_es.store.records import SCHEMA_VERSION, AnyRecord

FORMAT_VERSION = 2
DIGEST_BYTES = 16

_FILE = struct.Struct("<4sI")
_MAGIC = b"HPCJ"
_MARKER = b"\xb6\x0fJ\xf1"
"""Starts every frame, so that frames can be found again after a damaged length. Valid UTF-8 never contains it."""
_CHECKED = struct.Struct("<4sII")
"""Marker, length, CRC-32 of what follows: the whole header in format 1."""
_PLACED = struct.Struct(f"<I{DIGEST_BYTES}s")
"""Sequence number and running digest, in format 2."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyRecord])
_END_MARK = _encoder.encode([])

FILE_HEADER = _FILE.pack(_MAGIC, FORMAT_VERSION)


class Chain(NamedTuple):
    """State of a file: how many frames it has, and the running digest over them."""

    num_frames: int = 0
    digest: bytes = bytes(DIGEST_BYTES)

    def after(self, payload: bytes | memoryview) -> "Chain":
        """The chain with one more frame."""
        running = blake2b(self.digest, digest_size=DIGEST_BYTES)
        running.update(self.num_frames.to_bytes(4, "little"))
        running.update(payload)
        return Chain(self.num_frames + 1, running.digest())


def frame(records: Sequence[AnyRecord], chain: Chain = Chain()) -> tuple[bytes, Chain]:  # noqa: B008 - immutable
    """Encode one frame that follows `chain`; return its bytes and the new chain. Without records: the end mark."""
    payload = _encoder.encode(records)
    longer = chain.after(payload)
    place = _PLACED.pack(chain.num_frames, longer.digest)
    checksum = zlib.crc32(payload, zlib.crc32(place))
    return b"".join((_CHECKED.pack(_MARKER, len(payload), checksum), place, payload)), longer


END_MARK_BYTES = len(frame([])[0])


class Frames:
    """The valid frames of one file's bytes. After iterating, `end`, `closed` and `seal` say how the file ends."""

    def __init__(self, path: Path, data: bytes) -> None:
        """Errors: JournalDamaged; StoreError for a newer format."""
        self.path, self.data = path, data
        self.version = _version(path, data)
        """Format version; 0 if there is no file header, and so no frame."""
        self.end = _FILE.size if self.version else 0
        """Number of bytes up to a torn tail, or to the end of the file."""
        self.closed = False
        """Whether the last frame is the end mark."""
        self.chain = Chain()
        self.content = (self.end, self.chain)
        """`end` and `chain` before the end mark: where a writer continues."""

    def __iter__(self) -> Iterator[tuple[int, list[AnyRecord]]]:
        """(offset, records) of every frame but the end mark. Errors: JournalDamaged; StoreError for a newer schema."""
        for offset, payload in self.payloads():
            yield offset, self.decode(offset, payload)

    def payloads(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, payload) of the same frames, not decoded."""
        while self.version and (intact := _intact_at(self.data, self.end, self.version)) is not None:
            offset = self.end
            if self.version > 1:
                self._place(offset, intact)
            self.end = intact.end
            if self.version == 1 or not self.closed:
                yield offset, intact.payload
        self._refuse_later_frames()

    @property
    def torn_bytes(self) -> int:
        return len(self.data) - self.end

    @property
    def seal(self) -> bytes:
        """Digest of every valid byte, which the first record of the next segment holds."""
        if self.version > 1:
            return self.chain.digest
        return blake2b(self.data[: self.end], digest_size=DIGEST_BYTES).digest()

    def _place(self, offset: int, intact: "_Intact") -> None:
        """Errors: JournalDamaged when the frame does not continue those before it."""
        longer = self.chain.after(intact.payload)
        if self.closed:
            raise damaged(self.path, offset, "a frame follows the end mark")
        if intact.sequence != self.chain.num_frames:
            raise damaged(
                self.path,
                offset,
                f"frame {intact.sequence} stands where frame {self.chain.num_frames} belongs: frames were removed, "
                "repeated or moved",
            )
        if intact.digest != longer.digest:
            raise damaged(
                self.path,
                offset,
                f"frame {intact.sequence} does not continue the frames before it: it comes from another segment or run",
            )
        self.chain, self.closed = longer, intact.payload == _END_MARK
        if not self.closed:
            self.content = (intact.end, longer)

    def decode(self, offset: int, payload: memoryview) -> list[AnyRecord]:
        """The records of one payload. Errors: JournalDamaged; StoreError for a newer schema."""
        try:
            return first_schema.decode(payload) if self.schema_version == 1 else _decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise damaged(self.path, offset, f"correct checksum, but not a list of records: {error}") from error

    @cached_property
    def schema_version(self) -> int:
        """Schema of the records, which the first one names. Errors: StoreError for a newer schema.

        It is looked at before the types, which a newer schema may have changed.
        """
        first = _intact_at(self.data, _FILE.size, self.version)
        try:
            records = msgspec.msgpack.decode(first.payload) if first is not None else []
        except (msgspec.DecodeError, RecursionError):
            return SCHEMA_VERSION  # decode reports it
        started = records[0] if isinstance(records, list) and records else None
        version = started.get("schema_version", SCHEMA_VERSION) if isinstance(started, dict) else SCHEMA_VERSION
        if not isinstance(version, int) or version <= SCHEMA_VERSION:
            return version if isinstance(version, int) else SCHEMA_VERSION
        raise StoreError(
            f"{self.path} has records of schema version {version}; this hpc_es reads up to {SCHEMA_VERSION}: use a "
            "newer one"
        )

    def _refuse_later_frames(self) -> None:
        """Tell a torn tail from damage: a torn tail ends the file, damage is followed by a complete frame."""
        later = self.data.find(_MARKER, self.end)
        while later >= 0:
            if any(_intact_at(self.data, later, version) for version in (1, 2)):
                raise damaged(self.path, self.end, f"no valid frame here, but one follows at {later}")
            later = self.data.find(_MARKER, later + 1)


def last_records(data: bytes, version: int) -> list[AnyRecord]:
    """Records of the last frame that has any, from the end of a file alone; empty where there is none in `data`."""
    at = data.rfind(_MARKER)
    while at >= 0:
        intact = _intact_at(data, at, version)
        if intact is not None and intact.payload != _END_MARK:
            try:
                return _decoder.decode(intact.payload)
            except msgspec.DecodeError:  # of an older schema
                return []
        at = data.rfind(_MARKER, 0, at)
    return []


class _Intact(NamedTuple):
    """A frame whose checksum is correct."""

    payload: memoryview
    end: int
    sequence: int
    digest: bytes


def _intact_at(data: bytes, offset: int, version: int) -> _Intact | None:
    start = offset + _CHECKED.size
    first = start + (_PLACED.size if version > 1 else 0)
    if first > len(data):
        return None
    marker, length, checksum = _CHECKED.unpack_from(data, offset)
    end = first + length
    if marker != _MARKER or end > len(data):
        return None
    view = memoryview(data)
    if zlib.crc32(view[start:end]) != checksum:
        return None
    sequence, digest = _PLACED.unpack_from(data, start) if version > 1 else (0, b"")
    return _Intact(view[first:end], end, sequence, digest)


def _version(path: Path, data: bytes) -> int:
    """The format of a file; 0 when it does not even have a header."""
    if len(data) < _FILE.size:
        return 0
    magic, version = _FILE.unpack_from(data)
    if magic != _MAGIC:
        return 0
    if not 1 <= version <= FORMAT_VERSION:
        raise StoreError(
            f"{path} has journal format {version}; this hpc_es reads formats 1 to {FORMAT_VERSION}: use a newer one, "
            "or restore the file from a copy"
        )
    return int(version)


def damaged(path: Path, offset: int, what: str) -> JournalDamaged:
    return JournalDamaged(f"{path} is damaged at offset {offset}: {what}; restore the file from a copy")
