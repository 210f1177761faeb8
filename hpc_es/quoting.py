"""Quote text from outside: errors of environments, replies of servers and models, Slurm's stderr, messages of workers.

A megabyte of text, or control sequences, must not fill a log or control a terminal. So quoted text is bounded, is valid
UTF-8, and has its control characters escaped.
"""

from collections.abc import Callable

MAX_QUOTE = 1000
"""Most characters of one quotation."""
MAX_MESSAGE = 8000
"""Most characters of a whole error or event."""
MAX_RECORD = 32_000
"""Most characters of a log record or traceback: those through vLLM and torch are long."""

_NOTICE = 60
"""Characters reserved for the note about what was cut."""


def quote(text: str, most: int = MAX_QUOTE) -> str:
    """At most `most` characters of a text, all printable except line ends and tabs.

    A long text loses its middle, because what matters in an error is at its beginning or its end. Quoting a quoted text
    again changes nothing.
    """
    if len(text) <= most and text.isprintable():
        return text
    shown = text if len(text) <= most else _ends(text, most, len(text))
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= most else _ends(shown, most, len(text))  # escapes are longer than what they escape


def quote_error(error: BaseException, most: int = MAX_QUOTE) -> str:
    """Type and text of an error from code that is not ours."""
    text = quote(_text_of(error, str), most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def quote_value(value: object, most: int = 200) -> str:
    """repr() of a value from code that is not ours."""
    return quote(_text_of(value, repr), most)


def _text_of(value: object, text: Callable[[object], str]) -> str:
    try:
        return text(value)
    except BaseException:  # a class whose str() or repr() fails, or a number of thousands of digits
        return "(its text cannot be shown)"


def _ends(text: str, most: int, length: int) -> str:
    """The first and last characters, with a note between them that gives the original length."""
    if most <= 2 * _NOTICE:
        return text[:most]
    room = most - _NOTICE
    tail = room // 4
    return f"{text[: room - tail]} [... shortened from {length:,} characters ...] {text[-tail:]}"
