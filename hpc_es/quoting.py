"""Quote text from outside: errors of environments, replies of servers and models, Slurm's stderr, messages of workers.

Such text must not fill a log or control a terminal. So quoted text has a maximum length, is valid UTF-8, and its
control characters are escaped.
"""

from collections.abc import Callable

MAX_QUOTE = 1000
"""Maximum number of characters of a quoted text."""
MAX_MESSAGE = 8000
"""Maximum number of characters of a whole error message or event."""
MAX_RECORD = 32_000
"""Maximum number of characters of a log record with its traceback; tracebacks through vLLM and torch are long."""

_NOTICE = 60
"""Number of characters reserved for the note about a cut."""


def quote(text: str, most: int = MAX_QUOTE) -> str:
    """Shorten a text to `most` characters and escape all unprintable ones except line ends and tabs.

    The middle of a long text is cut, because the important parts of an error are its beginning and end. Quoting a
    quoted text again changes nothing.
    """
    if len(text) <= most and text.isprintable():
        return text
    shown = text if len(text) <= most else _ends(text, most, len(text))
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= most else _ends(shown, most, len(text))  # escaping has made it longer


def quote_error(error: BaseException, most: int = MAX_QUOTE) -> str:
    """Type and message of an error that foreign code raised."""
    text = quote(_text_of(error, str), most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def quote_value(value: object, most: int = 200) -> str:
    """repr() of a value from foreign code."""
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
