"""How an answer is scored, as the DocVQA challenge does it (Mathew et al., 2021; the measure is Biten et al., 2019).

Invariant: case and white space at the ends, or more of it than one blank, never matter; everything else does.
"""

from collections.abc import Sequence

THRESHOLD = 0.5


def anls(answer: str, accepted: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity of one answer: the best over those that are accepted, 0 to 1.

    With d the edit distance and n the length of the longer text it is 1 - d/n where d/n < 0.5, and else 0.
    """
    return max((_similarity(normalised(answer), normalised(each)) for each in accepted), default=0.0)


def is_exact(answer: str, accepted: Sequence[str]) -> bool:
    """What accuracy counts: the answer is one of those accepted, once both are normalised."""
    return normalised(answer) in {normalised(each) for each in accepted}


def normalised(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(one: str, other: str) -> float:
    longest = max(len(one), len(other))
    if not longest:
        return 1.0
    # The lengths alone may settle it, which spares the distance to an answer that quotes half the page.
    if longest - min(len(one), len(other)) >= THRESHOLD * longest:
        return 0.0
    share = distance(one, other) / longest
    return 1.0 - share if share < THRESHOLD else 0.0


def distance(one: str, other: str) -> int:
    """Levenshtein's: the fewest insertions, deletions and substitutions of a character."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]
