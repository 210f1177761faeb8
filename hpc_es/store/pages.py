"""A file in pages with checksums, whose writes wait in memory until `commit`.

Invariant: no byte that differs from what the last `commit` wrote is ever handed to a reader. HDF5 reads and writes
through here, for it survives neither a damaged file (it may read it for ever, or crash) nor a full disk (a write that
fails while it closes a file may crash the process; seen with HDF5 2.0). Here a damaged page is an OSError before HDF5
sees it, and writes cannot fail; what fails is `commit`, in Python, as an OSError.

The checksums stand behind the content, where HDF5 does not look: CRC-32 of every page (the last one filled up with
zeros), then a footer that says how long the content is and has checksums of the list and of itself. `commit` removes
the footer first and writes it last, so a file without one was left in the middle of a write, or is damaged.
"""

import fcntl
import io
import os
import struct
import sys
import zlib
from array import array
from pathlib import Path

from hpc_es.files import open_regular

_PAGE = 4096
_FOOTER = struct.Struct("<8sQI")
"""Magic, bytes of content, CRC-32 of the list of checksums; the CRC-32 of these three follows."""
_FOOTER_BYTES = _FOOTER.size + 4
_MAGIC = b"hpcpages"
_ZEROS = zlib.crc32(bytes(_PAGE))


class DamagedPage(OSError):
    """Bytes are not those that were written."""


class NoChecksums(OSError):
    """The file ends in no valid footer: a write is under way or was cut short, or it is not such a file."""


class Pages(io.RawIOBase):
    """File object for h5py to read from: the content as the last commit left it, or an OSError, and nothing else.

    Memory: the checksums, a thousandth of the file.
    """

    def __init__(self, path: Path) -> None:
        """Errors: OSError; NoChecksums."""
        self._path = path
        self._position = 0
        self._file = open_regular(path)
        try:
            self._size, self._checksums = _read_checksums(self._file, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()

    @property
    def state(self) -> int:
        """Differs between any two commits, for all that a CRC-32 of the checksums can tell."""
        return zlib.crc32(self._checksums)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Errors: DamagedPage."""
        view = memoryview(buffer).cast("B")
        length = min(len(view), self._size - self._position)
        if length <= 0:
            return 0
        first, last = self._position // _PAGE, (self._position + length - 1) // _PAGE
        start = self._position - first * _PAGE
        view[:length] = self._read(first, last - first + 1)[start : start + length]
        self._position += length
        return length

    def _read(self, first: int, count: int) -> memoryview:
        """Pages of the file, proven. Errors: DamagedPage."""
        data = os.pread(self._file, min(count * _PAGE, self._size - first * _PAGE), first * _PAGE)
        view = memoryview(data.ljust(count * _PAGE, b"\0"))
        for number in range(first, first + count):
            place = (number - first) * _PAGE
            if zlib.crc32(view[place : place + _PAGE]) != self._checksums[number]:
                raise self._damaged(number)
        return view

    def _damaged(self, number: int) -> DamagedPage:
        return DamagedPage(f"the {_PAGE} bytes at {number * _PAGE} of {self._path} are not what was written")


class BufferedPages(Pages):
    """File object for h5py to write to: reads see what was written, the disk sees it at `commit`.

    Memory: also the pages written since the last commit.
    """

    def __init__(self, path: Path, *, create: bool = False, lock: bool = False) -> None:
        """Errors: OSError; NoChecksums for a file that exists and is not one of these."""
        self._path = path
        self._position = 0
        self._dirty: dict[int, bytearray] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)
        try:
            if lock:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size, self._checksums = (0, array("I")) if create else _read_checksums(self._file, path)
        except BaseException:
            self.close()
            raise
        self._size_on_disk = self._size
        """How much of what is on disk still counts."""

    def commit(self) -> None:
        """Hand everything over to the operating system. Errors: OSError; the file is then partly written."""
        os.ftruncate(self._file, self._size_on_disk)  # what was cut off must not come back when the file grows again
        checksums = self._checksums[: _num_pages(self._size)]
        checksums.extend([_ZEROS] * (_num_pages(self._size) - len(checksums)))
        for number, page in sorted(self._dirty.items()):
            start = number * _PAGE
            self._write_at(memoryview(page)[: max(self._size - start, 0)], start)
            checksums[number] = zlib.crc32(page)
        os.ftruncate(self._file, self._size)
        self._write_at(memoryview(_trailer(self._size, checksums)), self._size)
        self._size_on_disk, self._checksums = self._size, checksums
        self._dirty.clear()

    def _write_at(self, view: memoryview, start: int) -> None:
        while view:
            written = os.pwrite(self._file, view, start)
            start, view = start + written, view[written:]

    # --- what h5py asks for beyond reading. Without a commit, what was written since the last one is dropped. --------

    def writable(self) -> bool:
        return True

    def truncate(self, size: int | None = None) -> int:
        """A file that shrinks and grows again has zeros in between, as on disk."""
        size = self._position if size is None else size
        for number in [number for number in self._dirty if number * _PAGE >= size]:
            del self._dirty[number]
        if size < self._size and size % _PAGE:
            self._page(size // _PAGE)[size % _PAGE :] = bytes(_PAGE - size % _PAGE)
        if size < self._size_on_disk:
            self._size_on_disk = size
            del self._checksums[_num_pages(size) :]
        self._size = size
        return size

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        length = max(min(len(view), self._size - self._position), 0)
        done = 0
        while done < length:
            number, offset = divmod(self._position + done, _PAGE)
            count = min(_PAGE - offset, length - done)
            view[done : done + count] = (self._dirty.get(number) or self._clean(number))[offset : offset + count]
            done += count
        self._position += length
        return length

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, offset = divmod(self._position + done, _PAGE)
            count = min(_PAGE - offset, len(view) - done)
            if count == _PAGE:  # what it held need not be read
                self._dirty[number] = bytearray(view[done : done + _PAGE])
            else:
                self._page(number)[offset : offset + count] = view[done : done + count]
            done += count
        self._position += len(view)
        self._size = max(self._size, self._position)
        return len(view)

    def _page(self, number: int) -> bytearray:
        """The page, to be changed."""
        if number not in self._dirty:
            self._dirty[number] = bytearray(self._clean(number))
        return self._dirty[number]

    def _clean(self, number: int) -> bytes:
        """The page as it stands on disk, proven; zeros behind the end. Errors: DamagedPage."""
        start = number * _PAGE
        if start >= self._size_on_disk:
            return bytes(_PAGE)
        page = os.pread(self._file, min(_PAGE, self._size_on_disk - start), start).ljust(_PAGE, b"\0")
        if zlib.crc32(page) != self._checksums[number]:
            raise self._damaged(number)
        return page


# --- checksums ----------------------------------------------------------------------------------------------------


def _num_pages(size: int) -> int:
    return -(-size // _PAGE)


def _trailer(size: int, checksums: "array[int]") -> bytes:
    """What stands behind the content."""
    listed = _little_endian(checksums).tobytes()
    footer = _FOOTER.pack(_MAGIC, size, zlib.crc32(listed))
    return listed + footer + zlib.crc32(footer).to_bytes(4, "little")


def _read_checksums(file: int, path: Path) -> "tuple[int, array[int]]":
    """(Bytes of content, checksum of each page). Errors: NoChecksums."""
    missing = NoChecksums(f"{path} does not end in a list of checksums")
    num_bytes = os.fstat(file).st_size
    end = os.pread(file, _FOOTER_BYTES, max(num_bytes - _FOOTER_BYTES, 0))
    footer, checksum = end[:-4], end[-4:]
    if len(end) < _FOOTER_BYTES or zlib.crc32(footer).to_bytes(4, "little") != checksum:
        raise missing
    magic, size, of_list = _FOOTER.unpack(footer)
    length = 4 * _num_pages(size)
    if magic != _MAGIC or num_bytes != size + length + _FOOTER_BYTES:
        raise missing
    listed = os.pread(file, length, size)
    if zlib.crc32(listed) != of_list:
        raise missing
    return size, _little_endian(array("I", listed))


def _little_endian(numbers: "array[int]") -> "array[int]":
    """As they stand in the file, from how they stand in memory, or back."""
    if sys.byteorder == "little":
        return numbers
    swapped = array("I", numbers)
    swapped.byteswap()
    return swapped
