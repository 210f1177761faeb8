"""How words that come from outside are quoted: errors of environments, answers of servers and models, Slurm's stderr,
messages of workers.

Whoever sends a megabyte, or control sequences, must not fill a log or drive a terminal. So what is quoted is bounded,
is valid UTF-8, and has its control characters escaped.
"""

from collections.abc import Callable

MAX_QUOTE = 1000
"""Characters of one quotation."""
MAX_MESSAGE = 8000
"""Characters of a whole error or event."""
MAX_RECORD = 32_000
"""Characters of a log record or traceback: those through vLLM and torch are long."""

_NOTICE = 60
"""Characters kept free for the words that stand for what was cut."""


def quote(text: str, most: int = MAX_QUOTE) -> str:
    """At most `most` characters of a text, all printable but for line ends and tabs.

    A long text loses its middle: what matters in an error is at its beginning or its end. A text that has been quoted
    stays as it is.
    """
    if len(text) <= most and text.isprintable():
        return text
    shown = text if len(text) <= most else _ends(text, most, len(text))
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= most else _ends(shown, most, len(text))  # escapes are longer than what they escape


def quote_error(error: BaseException, most: int = MAX_QUOTE) -> str:
    """Type and text of an error of someone else's code."""
    text = quote(_text_of(error, str), most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def quote_value(value: object, most: int = 200) -> str:
    """A value of someone else's code, as it would stand in a program."""
    return quote(_text_of(value, repr), most)


def _text_of(value: object, text: Callable[[object], str]) -> str:
    try:
        return text(value)
    except BaseException:  # their own class raises what it likes, SystemExit too; or a number of thousands of digits
        return "(its text cannot be shown)"


def _ends(text: str, most: int, length: int) -> str:
    """The first and last characters, and between them how long the whole was."""
    if most <= 2 * _NOTICE:
        return text[:most]
    room = most - _NOTICE
    tail = room // 4
    return f"{text[: room - tail]} [... shortened from {length:,} characters ...] {text[-tail:]}"
