"""Text to index terms, as Lucene's StandardTokenizer and EnglishAnalyzer do it.

Words by Unicode's word boundaries (UAX#29), emoji are words of their own; then the possessive 's goes, upper case goes,
33 stop words go, and what is left is stemmed. Source: Lucene's StandardTokenizerImpl.jflex and EnglishAnalyzer.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from hpc_es.envs.webshop.porter import stem
from hpc_es.errors import ConfigError

STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
MAX_TERM = 255
"""Longer words are cut into pieces of this many characters."""

_LETTERS = r"[A-Za-z]+(?:(?:_+|[:.'])[A-Za-z]+)*"
_DIGITS = r"[0-9]+(?:(?:_+|[,;.'])[0-9]+)*"
_ASCII_WORD = re.compile(rf"_*(?:{_LETTERS}|{_DIGITS})+(?:_+(?:{_LETTERS}|{_DIGITS})+)*_*")


def terms(text: str) -> Iterator[str]:
    """The index terms of a text, in order."""
    word = _ASCII_WORD if text.isascii() else _unicode_word()
    for token in word.findall(text):
        for start in range(0, len(token), MAX_TERM):
            term = normalise(token[start : start + MAX_TERM])
            if term:
                yield term


def normalise(token: str) -> str:
    """One word as an index term; empty where it is a stop word."""
    if token[-1:] in ("s", "S") and token[-2:-1] in ("'", "\u2019", "\uff07"):
        token = token[:-2]
    token = token.lower()
    return "" if token in STOP_WORDS else stem(token)


@cache
def _unicode_word() -> Any:
    """The tokenizer's grammar. Where Unicode has moved on since Lucene's version (the colon), Lucene's rules hold."""
    try:
        import regex
    except ImportError as error:
        raise ConfigError(
            "searching a catalogue with other than ASCII text needs the package regex: pip install regex"
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
    character = rf"[[\p{{Emoji}}\p{{Extended_Pictographic}}]--[\p{{WB=Regional_Indicator}}0-9#*\p{{Emoji_Modifier}}]]"
    emoji = (
        rf"(?:(?:\u200d*\p{{Emoji_Modifier_Base}}{ignored_in_emoji})?{modifier}"
        rf"|\u200d*{character}{ignored_in_emoji}\ufe0f?)"
    )
    sequence = rf"{emoji}(?:[\U000e0020-\U000e007e]+\U000e007f|(?:\u200d{emoji})*)"
    keycap = rf"[0-9#*]{ignored_in_emoji}\ufe0f?\u20e3{ignored_in_emoji}"
    flag = rf"(?:\p{{WB=Regional_Indicator}}{ignored}){{2}}"
    ideograph = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{ignored}"
    south_east_asian = rf"(?:\p{{LB=Complex_Context}}{ignored})+"
    return regex.compile("|".join((word, sequence, keycap, flag, south_east_asian, ideograph)), regex.V1)
