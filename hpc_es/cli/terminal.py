"""Make standard input, output and error work with every terminal, locale and pipe.

Invariants: text that came from data (a model, an environment, a worker, a file) cannot control the terminal; a
character that the locale cannot show is escaped, never an error; a closed pipe (`| head`) costs the command
only the rest of its output. A full disk under a redirected stdout remains an error.
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
    """The text with all control characters escaped: `\\x1b`, `\\u202e`."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def say(text: object, *, err: bool = False, bold: bool = False, colour: str | None = None) -> None:
    """Print a line of plain text, harmless to the terminal: for commands that need no table (see output.console)."""
    stream, plain = sys.stderr if err else sys.stdout, harmless(str(text))
    if stream is None:  # the program was started with it closed
        return
    # not typer.echo, which writes UTF-8 where the locale says ASCII
    print(typer.style(plain, bold=bold or None, fg=colour) if stream.isatty() else plain, file=stream, flush=True)


def prepare_streams() -> None:
    """Make the process's own stdin, stdout and stderr keep the invariants of this module."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # None if the program was started with it closed
            stream.flush()
            setattr(sys, name, _surviving(stream))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


class _Pipe(io.FileIO):
    """A file that drops what is written once the reader of the pipe has gone."""

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
