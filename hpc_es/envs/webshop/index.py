"""BM25 as in Lucene, with k1 0.9, b 0.4, Lucene's idf, one-byte document lengths and single-precision sums.

Invariant: documents are sorted by their score as a 32-bit float, equal scores by `rank`, so that the list of hits
depends only on the texts. All data are numpy arrays, so that all processes of a node share one index mapped from disk.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from hpc_es.envs.webshop.analysis import terms

K1, B = np.float32(0.9), np.float32(0.4)
_EXACT_LENGTHS = 24
"""Smaller lengths are stored exactly; larger ones are rounded to three bits after the leading one."""


@dataclass(frozen=True)
class Postings:
    """For each term, the documents that contain it, in ascending order. Terms are sorted."""

    term_bytes: NDArray[np.uint8]
    term_ends: NDArray[np.int64]
    ends: NDArray[np.int64]
    docs: NDArray[np.int32]
    dampings: NDArray[np.float32]
    """For each term in each document: 1 + count / (k1 * (1 - b + b * length / average length))."""

    def find(self, term: str) -> slice | None:
        """The slice of a term's postings; None if no document has the term."""
        wanted = term.encode(errors="surrogatepass")
        number = bisect_left(range(len(self.ends)), wanted, key=self._term)
        if number == len(self.ends) or self._term(number) != wanted:
            return None
        return slice(_start(self.ends, number), int(self.ends[number]))

    def _term(self, number: int) -> bytes:
        return self.term_bytes[_start(self.term_ends, number) : int(self.term_ends[number])].tobytes()


def _start(ends: NDArray[np.int64], number: int) -> int:
    return int(ends[number - 1]) if number else 0


class PostingsBuilder:
    """Builds postings from the terms of one document after another."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._terms, self._counts = array("i"), array("i")
        self._sizes, self._lengths = array("i"), array("i")

    def add(self, document: Iterable[str]) -> None:
        numbers = self._numbers
        counted = Counter(numbers.setdefault(term, len(numbers)) for term in document)
        self._terms.extend(counted)
        self._counts.extend(counted.values())
        self._sizes.append(len(counted))
        self._lengths.append(counted.total())

    def build(self) -> Postings:
        names = sorted((term.encode(), number) for term, number in self._numbers.items())
        new_number = np.empty(len(names), np.int32)
        new_number[[number for _, number in names]] = np.arange(len(names), dtype=np.int32)
        term_of = new_number[_array(self._terms)]
        order = np.argsort(term_of, kind="stable")
        docs = np.repeat(np.arange(len(self._sizes), dtype=np.int32), _array(self._sizes))[order]
        counts = _array(self._counts)[order].astype(np.float32)
        return Postings(
            term_bytes=np.frombuffer(b"".join(name for name, _ in names), np.uint8),
            term_ends=np.cumsum([len(name) for name, _ in names], dtype=np.int64),
            ends=np.cumsum(np.bincount(term_of, minlength=len(names)), dtype=np.int64),
            docs=docs,
            dampings=np.float32(1) + counts * self._inverse_norms()[docs],
        )

    def _inverse_norms(self) -> NDArray[np.float32]:
        """1 / (k1 * (1 - b + b * length / average length)) by document, single precision at every step as in Lucene."""
        one = np.float32(1)
        lengths = _array(self._lengths)
        average = np.float32(lengths.sum(dtype=np.int64) / len(lengths))
        kept = np.array([decode_length(encode_length(length)) for length in lengths.tolist()], np.float32)
        return one / (K1 * ((one - B) + B * kept / average))


def _array(numbers: "array[int]") -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


class Ranking:
    """Ranked search in postings."""

    def __init__(self, postings: Postings, rank: NDArray[np.int32]) -> None:
        """`rank`, one number per document, breaks ties."""
        self._postings, self._rank = postings, rank

    def search(self, query: str, limit: int) -> NDArray[np.int64]:
        """Numbers of the best documents, at most `limit`."""
        num_docs = len(self._rank)
        total = np.zeros(num_docs, np.float64)
        for term, times in Counter(terms(query)).items():
            where = self._postings.find(term)
            if where is None:
                continue
            docs = self._postings.docs[where]
            weight = np.float32(times) * np.float32(log(1 + (num_docs - len(docs) + 0.5) / (len(docs) + 0.5)))
            total[docs] += weight - weight / self._postings.dampings[where]
        return self._best(total.astype(np.float32), limit)

    def _best(self, scores: NDArray[np.float32], limit: int) -> NDArray[np.int64]:
        found = np.flatnonzero(scores)
        if len(found) > limit:
            worst = np.partition(scores[found], len(found) - limit)[len(found) - limit]
            found = found[scores[found] >= worst]
        return found[np.lexsort((self._rank[found], -scores[found]))][:limit]


def encode_length(length: int) -> int:
    """The byte in which Lucene's SmallFloat.intToByte4 stores a length."""
    if length < _EXACT_LENGTHS:
        return length
    rest = length - _EXACT_LENGTHS
    shift = rest.bit_length() - 4
    return _EXACT_LENGTHS + (rest if shift < 0 else (shift + 1) << 3 | (rest >> shift) & 7)


def decode_length(byte: int) -> int:
    if byte < _EXACT_LENGTHS:
        return byte
    shift, bits = divmod(byte - _EXACT_LENGTHS, 8)
    return _EXACT_LENGTHS + (bits if shift == 0 else (bits | 8) << (shift - 1))
