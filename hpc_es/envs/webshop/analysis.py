"""Split text into index terms, as Lucene's StandardTokenizer and EnglishAnalyzer do.

Words follow Unicode's word boundaries (UAX#29), and emoji are words of their own. Then the possessive 's is removed,
letters become lower case, 33 stop words are dropped, and the rest is stemmed. Source: Lucene's
StandardTokenizerImpl.jflex and EnglishAnalyzer.
"""

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from hpc_es.envs.webshop.porter import stem
from hpc_es.errors import ConfigError

_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
MAX_TERM = 255
"""Longer words are split into pieces of this many characters."""

_PICTOGRAPHS = (
    "\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388\u23cf\u23e9-\u23f3"
    "\u23f8-\u23fa\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
    "\u2708-\u2712\u2714\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767"
    "\u2795-\u2797\u27a1\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f000-\U0001f0ff\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f171\U0001f17e\U0001f17f\U0001f18e"
    "\U0001f191-\U0001f19a\U0001f1ad-\U0001f1e5\U0001f201-\U0001f20f\U0001f21a\U0001f22f\U0001f232-\U0001f23a"
    "\U0001f23c-\U0001f23f\U0001f249-\U0001f3fa\U0001f400-\U0001f53d\U0001f546-\U0001f64f\U0001f680-\U0001f6ff"
    "\U0001f774-\U0001f77f\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f\U0001f848-\U0001f84f\U0001f85a-\U0001f85f"
    "\U0001f888-\U0001f88f\U0001f8ae-\U0001f8ff\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001fffd"
)
"""Extended_Pictographic of Unicode 11, which Lucene uses; later versions exclude signs such as the black star."""

_LETTERS = r"[A-Za-z]+(?:(?:_+|[:.'])[A-Za-z]+)*"
_DIGITS = r"[0-9]+(?:(?:_+|[,;.'])[0-9]+)*"
_ASCII_WORD = re.compile(rf"_*(?:{_LETTERS}|{_DIGITS})+(?:_+(?:{_LETTERS}|{_DIGITS})+)*_*")


def terms(text: str) -> Iterator[str]:
    """The index terms of a text, those of plain ASCII words first.

    Errors: ConfigError when the text is not ASCII and the package regex is missing.
    """
    pieces = text.split(" ")  # no word contains a space, and the grammar for ASCII is many times faster
    yield from _terms(_ASCII_WORD, [piece for piece in pieces if piece.isascii()])
    if not text.isascii():
        yield from _terms(_unicode_word(), [piece for piece in pieces if not piece.isascii()])


def _terms(word: Any, pieces: list[str]) -> Iterator[str]:
    for token in word.findall(" ".join(pieces)):
        for start in range(0, len(token), MAX_TERM):
            term = normalise(token[start : start + MAX_TERM])
            if term:
                yield term


@lru_cache(maxsize=1 << 16)
def normalise(token: str) -> str:
    """One word as an index term; empty for a stop word."""
    if token[-1:] in ("s", "S") and token[-2:-1] in ("'", "\u2019", "\uff07"):
        token = token[:-2]
    token = (
        token.lower() if token.isascii() else "".join(letter.lower()[0] for letter in token)
    )  # character by character, as in Java
    return "" if token in STOP_WORDS else stem(token)


@cache
def _unicode_word() -> Any:
    """The tokenizer's grammar. Where Unicode has changed since Lucene's version (the colon), Lucene's rules apply."""
    try:
        regex = import_module("regex")
    except ImportError as error:
        raise ConfigError(
            "searching a catalogue with non-ASCII text needs the package regex: pip install regex"
        ) from error
    ignored = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]*"
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{ignored}"
    hebrew = rf"\p{{WB=Hebrew_Letter}}{ignored}"
    digit = rf"(?:\p{{WB=Numeric}}|[\uff10-\uff19]){ignored}"
    katakana = rf"\p{{WB=Katakana}}{ignored}"
    joiner = rf"(?:\p{{WB=ExtendNumLet}}{ignored})"
    in_word = rf"[:\u00b7\u0387\u05f4\u2027\ufe13\ufe55\uff1a.\u2018\u2019\u2024\ufe52\uff07\uff0e']{ignored}"
    in_number = (
        r"[,;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b"
        rf".\u2018\u2019\u2024\ufe52\uff07\uff0e']{ignored}"
    )
    unit = (
        rf"(?:{katakana}(?:{joiner}*{katakana})*"
        rf"|(?:{hebrew}(?:'{ignored}|\"{ignored}{hebrew})"
        rf"|{digit}(?:(?:{joiner}*|{in_number}){digit})*"
        rf"|{letter}(?:(?:{joiner}*|{in_word}){letter})*)+)"
    )
    word = rf"{joiner}*{unit}(?:{joiner}+{unit})*{joiner}*"
    ignored_in_emoji = r"[[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]--[\ufe0e\ufe0f\p{Emoji_Modifier}]]*"
    modifier = rf"\p{{Emoji_Modifier}}{ignored_in_emoji}"
    emoji = (
        rf"(?:(?:\u200d*\p{{Emoji_Modifier_Base}}{ignored_in_emoji})?{modifier}"
        rf"|\u200d*[{_PICTOGRAPHS}]{ignored_in_emoji}\ufe0f?)"
    )
    sequence = rf"{emoji}(?:[\U000e0020-\U000e007e]+\U000e007f|(?:\u200d{emoji})*)"
    keycap = rf"[0-9#*]{ignored_in_emoji}\ufe0f?\u20e3{ignored_in_emoji}"
    flag = rf"(?:\p{{WB=Regional_Indicator}}{ignored}){{2}}"
    ideograph = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{ignored}"
    south_east_asian = rf"(?:\p{{LB=Complex_Context}}{ignored})+"
    return regex.compile("|".join((word, sequence, keycap, flag, south_east_asian, ideograph)), regex.V1)
