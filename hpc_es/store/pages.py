"""A file whose writes wait in memory until `commit`.

HDF5 writes through it, because HDF5 does not survive a full disk: when a write fails while it closes a file, it may
crash the process (seen with HDF5 2.0). Here its writes cannot fail; what fails is `commit`, in Python, as an OSError.
Memory in use: the pages written since the last commit.
"""

import fcntl
import io
import os
from pathlib import Path

_PAGE = 4096


class BufferedPages(io.RawIOBase):
    """File object for h5py: reads see what was written, the disk sees it at `commit`."""

    def __init__(self, path: Path, *, create: bool = False, lock: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)
        if lock:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise
        self._size = os.fstat(self._file).st_size
        self._size_on_disk = self._size
        """How much of what is on disk still counts."""
        self._position = 0
        self._dirty: dict[int, bytearray] = {}

    def commit(self) -> None:
        """Hand everything over to the operating system. Errors: OSError; the file is then partly written."""
        os.ftruncate(self._file, self._size_on_disk)  # what was cut off must not come back when the file grows again
        for number, page in sorted(self._dirty.items()):
            start = number * _PAGE
            view = memoryview(page)[: max(self._size - start, 0)]
            while view:
                written = os.pwrite(self._file, view, start)
                start, view = start + written, view[written:]
        os.ftruncate(self._file, self._size)
        self._size_on_disk = self._size
        self._dirty.clear()

    def close(self) -> None:
        """Without a commit, what was written since the last one is dropped."""
        if not self.closed:
            os.close(self._file)
        super().close()

    # --- what h5py asks for --------------------------------------------------------------------------------------

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """A file that shrinks and grows again has zeros in between, as on disk."""
        size = self._position if size is None else size
        for number in [number for number in self._dirty if number * _PAGE >= size]:
            del self._dirty[number]
        if size < self._size and size % _PAGE:
            self._page(size // _PAGE)[size % _PAGE :] = bytes(_PAGE - size % _PAGE)
        self._size_on_disk = min(self._size_on_disk, size)
        self._size = size
        return size

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        length = max(min(len(view), self._size - self._position), 0)
        done = 0
        while done < length:
            number, offset = divmod(self._position + done, _PAGE)
            count = min(_PAGE - offset, length - done)
            page = self._dirty.get(number)
            if page is None:
                page = self._read(number)
            view[done : done + count] = page[offset : offset + count]
            done += count
        self._position += length
        return length

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, offset = divmod(self._position + done, _PAGE)
            count = min(_PAGE - offset, len(view) - done)
            self._page(number)[offset : offset + count] = view[done : done + count]
            done += count
        self._position += len(view)
        self._size = max(self._size, self._position)
        return len(view)

    def _page(self, number: int) -> bytearray:
        """The page, to be changed."""
        if number not in self._dirty:
            self._dirty[number] = self._read(number)
        return self._dirty[number]

    def _read(self, number: int) -> bytearray:
        """The page as it stands on disk; zeros where the file does not reach."""
        start = number * _PAGE
        data = os.pread(self._file, max(min(_PAGE, self._size_on_disk - start), 0), start)
        return bytearray(data.ljust(_PAGE, b"\0"))
