"""End a failed command with one message and an exit code.

Invariant: a user's mistake, a damaged file or an error of the operating system is one message without a traceback.
Every other exception is reported as a bug of hpc_es, and its traceback is kept: in a file, or on stderr with
HPC_ES_TRACEBACK=1 and in the logs of head and workers.
"""

import errno
import os
import tempfile
import traceback
from typing import NoReturn

import typer

from hpc_es.cli.arguments import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED
from hpc_es.cli.terminal import say
from hpc_es.envs.guard import process_guard
from hpc_es.errors import ConfigError, HpcEsError, ModelError
from hpc_es.quoting import MAX_MESSAGE, MAX_RECORD, quote, quote_error

SHOW_TRACEBACK = "HPC_ES_TRACEBACK"
"""Environment variable; if it is set to anything but 0, every failure shows its traceback."""

_MISTAKES = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}
"""Errors of the operating system that are mistakes in a path. Others, such as a full disk, are no fault of the user."""


def end_with_message(error: BaseException, *, is_role: bool) -> NoReturn:
    """Print what went wrong and raise typer.Exit. click reports wrong usage itself.

    Must be called while `error` is being handled. `is_role`: the command is a head or a worker, which ends with
    EXIT_FAILED if a restart may succeed.
    """
    if type(error).__module__.partition(".")[0] in ("typer", "click"):
        raise error
    process_guard().end_if_damaged()  # an environment damaged this process; `error` is only a consequence
    if isinstance(error, KeyboardInterrupt):
        _end("stopped by Ctrl-C", EXIT_STOPPED)
    if isinstance(error, HpcEsError):
        if _asked_for_traceback():
            _show_traceback()
        _end(f"error: {error}", EXIT_MISTAKE if isinstance(error, (ConfigError, ModelError)) else EXIT_FAILED)
    traced = is_role or _asked_for_traceback()
    if traced:
        _show_traceback()
    foreseen = _foreseen(error)
    if foreseen is None:
        _end(f"error: {_bug(error, 'above' if traced else f'in {_keep_traceback()}')}", EXIT_FAILED)
    message, code = foreseen
    _end(f"error: {message}", EXIT_FAILED if is_role else code)


def _end(message: str, code: int) -> NoReturn:
    say(quote(message, MAX_MESSAGE), err=True, colour="red")
    raise typer.Exit(code) from None


def _foreseen(error: BaseException) -> tuple[str, int] | None:
    """(message, exit code) of an error that can occur in any command without a bug; None for a bug."""
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}; use more memory, or do less at once", EXIT_FAILED
    if isinstance(error, UnicodeError):
        text = getattr(error, "object", "")
        return f"{text!r} is not valid {getattr(error, 'encoding', 'text')}: use text in UTF-8", EXIT_MISTAKE
    if isinstance(error, OSError) and error.errno is not None:
        name = f"{_shown(error.filename)}: " if error.filename is not None else ""
        other = f" -> {_shown(error.filename2)}" if error.filename2 is not None else ""
        return f"{name}{os.strerror(error.errno)}{other}", EXIT_MISTAKE if error.errno in _MISTAKES else EXIT_FAILED
    return None


def _shown(filename: object) -> str:
    return os.fsdecode(filename) if isinstance(filename, (str, bytes)) else str(filename)


def _bug(error: BaseException, kept: str) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    what = quote_error(error, 500).split("\n")[0]
    place = f"{os.path.basename(where.filename)}:{where.lineno}"
    return f"this is a bug in hpc-es, please report it: {what} ({place}); its traceback is {kept}"


def _keep_traceback() -> str:
    """Write the traceback to a file; returns its path, or why there is none."""
    try:
        file, path = tempfile.mkstemp(prefix="hpc-es-traceback-", suffix=".txt")
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as kept:
            traceback.print_exc(file=kept)
    except OSError:
        return f"no file, since none can be written: set {SHOW_TRACEBACK}=1"
    return path


def _asked_for_traceback() -> bool:
    return os.environ.get(SHOW_TRACEBACK, "0") not in ("", "0")


def _show_traceback() -> None:
    say(quote(traceback.format_exc(), MAX_RECORD), err=True)
