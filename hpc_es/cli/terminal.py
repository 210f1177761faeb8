"""Make standard input, output and error work with every terminal, locale and pipe.

Invariants: text from data (a model, an environment, a worker, a file) cannot control the terminal; characters that the
locale cannot show are escaped; after a pipe is closed (`| head`), the command continues and its further output is
dropped. A full disk behind a redirected stdout is still an error.
"""

import io
import os
import re
import sys
from typing import TextIO, cast

import typer

# C0 and C1 controls except tab and line feed, line separators, and characters that change the writing direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Escape all control characters in a text: `\\x1b`, `\\u202e`."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def say(text: object, *, err: bool = False, bold: bool = False, colour: str | None = None) -> None:
    """Print a line of plain text without control characters. For tables, use output.console."""
    stream, plain = sys.stderr if err else sys.stdout, harmless(str(text))
    if stream is None:  # the program was started with this stream closed
        return
    # not typer.echo, which writes UTF-8 even in an ASCII locale
    print(typer.style(plain, bold=bold or None, fg=colour) if stream.isatty() else plain, file=stream, flush=True)


def prepare_streams() -> None:
    """Replace stdin, stdout and stderr by streams that keep the invariants of this module."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # None if the program was started with this stream closed
            stream.flush()
            setattr(sys, name, _surviving(stream))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


class _Pipe(io.FileIO):
    """A file that drops its output once the reader of the pipe has closed it."""

    def write(self, data: object) -> int:
        try:
            return super().write(cast(bytes, data)) or 0
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return memoryview(cast(bytes, data)).nbytes


def _surviving(stream: io.TextIOWrapper) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream is sys.stderr,
    )
