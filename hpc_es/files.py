"""Read files safely whose content and type cannot be trusted.

Invariant: every function returns or raises OSError or msgspec.DecodeError, for any kind of file. Otherwise a named pipe
would block its reader for ever, a device might have no end, and deeply nested JSON would exceed the recursion limit.
"""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. Errors: OSError, also for pipes, devices and directories."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK a pipe could block here
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
    """Read a whole regular file. Errors: OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def read_json(path: Path, type: type[T]) -> T:
    """Read a JSON file into a type that msgspec supports. Errors: OSError, msgspec.DecodeError."""
    try:
        return msgspec.json.decode(read_bytes(path), type=type)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"JSON is not UTF-8: {error}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deeply") from error
