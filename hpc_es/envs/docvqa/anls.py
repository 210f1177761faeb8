"""Score answers as the DocVQA challenge does (Mathew et al., 2021; the measure is from Biten et al., 2019).

Invariant: case, white space at the ends and the length of white space never matter; everything else does.
"""

from collections.abc import Sequence

THRESHOLD = 0.5


def anls(answer: str, accepted: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity of an answer to the most similar accepted answer, 0 to 1.

    With edit distance d and length n of the longer text, it is 1 - d/n if d/n < 0.5, else 0.
    """
    return max((_similarity(normalised(answer), normalised(each)) for each in accepted), default=0.0)


def is_exact(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer equals an accepted one after both are normalised; this counts as success."""
    return normalised(answer) in {normalised(each) for each in accepted}


def normalised(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(one: str, other: str) -> float:
    longest = max(len(one), len(other))
    if not longest:
        return 1.0
    # If the lengths alone decide, skip the distance, which is slow for an answer that quotes half the page.
    if longest - min(len(one), len(other)) >= THRESHOLD * longest:
        return 0.0
    share = distance(one, other) / longest
    return 1.0 - share if share < THRESHOLD else 0.0


def distance(one: str, other: str) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions of characters."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]
