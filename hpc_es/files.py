"""Reading files of which nobody knows what became of them.

Invariant: reading ends, and what is not what it should be is an OSError or a msgspec.DecodeError, whatever lies under
the name: a named pipe would block its reader for ever, a device may have no end, and nested JSON may have no bottom.
"""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Errors: OSError, also for anything else of that name."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # or a pipe without a writer would block here
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            number, what = (errno.EISDIR, "is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "is not a file")
            raise OSError(number, what, str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def read_bytes(path: Path) -> bytes:
    """All of a regular file. Errors: OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_json(path: Path, type: type[T]) -> T:
    """JSON of a type that msgspec knows. Errors: OSError; msgspec.DecodeError."""
    try:
        return msgspec.json.decode(read_bytes(path), type=type)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"JSON is not UTF-8: {error}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deeply") from error
