"""Similarity of two texts as sets of words: thefuzz's `token_set_ratio`, which WebShop's reward uses.

Invariant: equal to thefuzz 0.22.1 (rapidfuzz) with its default processing, integers from 0 to 100. The processing
deletes characters from U+0080 to U+00FF and replaces other non-word characters by spaces. It is reimplemented here
because it is short and the reward needs nothing else from those packages.
"""

import re
from functools import lru_cache

_LATIN_1 = dict.fromkeys(range(128, 256))
_NOT_WORD = re.compile(r"[\W_]")


@lru_cache(maxsize=1 << 14)
def words(text: str) -> frozenset[str]:
    """The set of words of a processed text."""
    kept = text.translate(_LATIN_1)
    lowered = kept.lower() if kept.isascii() else "".join(character.lower()[0] for character in kept)
    return frozenset(_NOT_WORD.sub(" ", lowered).split())


def token_set_ratio(one: str, two: str) -> int:
    """100 if one text's words are a subset of the other's; else lower, depending on the words they share."""
    words_one, words_two = words(one), words(two)
    if not words_one or not words_two:
        return 0
    shared = words_one & words_two
    only_one, only_two = words_one - shared, words_two - shared
    if shared and not (only_one and only_two):
        return 100
    rest_one, rest_two = " ".join(sorted(only_one)), " ".join(sorted(only_two))
    length_shared = len(" ".join(shared))
    space = bool(shared)
    length_one = length_shared + space + len(rest_one)
    length_two = length_shared + space + len(rest_two)
    best = _similarity(_edits(rest_one, rest_two), length_one + length_two)
    if shared:
        best = max(
            best,
            _similarity(space + len(rest_one), length_shared + length_one),
            _similarity(space + len(rest_two), length_shared + length_two),
        )
    return round(best)


def _similarity(distance: int, length: int) -> float:
    return 100 - 100 * distance / length if length else 100.0


def _edits(one: str, two: str) -> int:
    """Number of insertions and deletions that turn one text into the other."""
    return len(one) + len(two) - 2 * _longest_common_subsequence(one, two)


def _longest_common_subsequence(one: str, two: str) -> int:
    """Length by the bit-parallel algorithm (Hyyrö, 2004): bit i of `row` is 0 where the subsequence grew at one[i]."""
    places: dict[str, int] = {}
    for i, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << i
    full = (1 << len(one)) - 1
    row = full
    for character in two:
        match = row & places.get(character, 0)
        row = (row + match | row - match) & full
    return len(one) - row.bit_count()
