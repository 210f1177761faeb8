"""Symmetric admissible sets: the greedy construction that a priority function guides.

A vector of {0, 1, 2}^n with w non-zero entries is written as n / 3 symbols, each one of seven triples; a symbol stands
for all rotations of its triple, so a row of symbols stands for a whole class of vectors.
Invariant: the set that `construct` returns is admissible, and depends on the priorities alone: the first of equal
priorities in lexicographic order wins, and NaN counts as the highest, as in numpy's argmax.
Source: FunSearch (Romera-Paredes et al., 2024). One-hot bit masks make a test of a class against a pair one AND.
"""

import itertools
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

TRIPLES = ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 2), (0, 2, 1), (1, 1, 1), (2, 2, 2))
_SYMBOLS = range(len(TRIPLES))
_WEIGHT = tuple(sum(entry != 0 for entry in triple) for triple in TRIPLES)
_SEPARATING = ([0, 0, 1], [0, 0, 2], [0, 1, 2])
"""Entries that tell three vectors of an admissible set apart in one coordinate, sorted."""


def _rotations(symbol: int) -> tuple[tuple[int, ...], ...]:
    x, y, z = TRIPLES[symbol]
    return tuple(dict.fromkeys(((x, y, z), (z, x, y), (y, z, x))))


@lru_cache(maxsize=1)
def _separated() -> Array:
    """[x, y, z]: whether three symbols are told apart, whichever rotation each of them takes."""
    separated = np.ones((7, 7, 7), dtype=bool)
    for symbols in itertools.product(_SYMBOLS, repeat=3):
        separated[symbols] = all(
            any(sorted(entries) in _SEPARATING for entries in zip(*vectors, strict=True))
            for vectors in itertools.product(*map(_rotations, symbols))
        )
    return separated


@lru_cache(maxsize=4)
def classes(n: int, w: int) -> Array:
    """All classes of vectors of length n with w non-zero entries, (classes, n / 3) symbols in lexicographic order."""
    symbols = np.indices((7,) * (n // 3)).reshape(n // 3, -1).T
    return np.ascontiguousarray(symbols[np.take(_WEIGHT, symbols).sum(axis=1) == w])


def vectors(n: int, w: int) -> Array:
    """The vector that a priority function sees for each class, (classes, n)."""
    return np.take(np.array(TRIPLES), classes(n, w), axis=0).reshape(-1, n)


def construct(n: int, w: int, priorities: Array) -> tuple[int, int]:
    """(size of the admissible set, number of chosen classes) of the greedy construction."""
    symbols = classes(n, w)
    left = np.bitwise_or.reduce(np.uint64(1) << _bits(symbols), axis=1)
    index = np.arange(len(symbols))
    chosen: list[Array] = []
    size = 0
    while len(index):
        best = int(np.argmax(priorities[index]))
        new = symbols[index[best]]
        outside = [~_mask(weights) for weights in _comparable(new)] + [~_mask(_unseparated(old, new)) for old in chosen]
        # A class survives if, for every mask, at least one of its symbols lies outside.
        keep = np.ones(len(index), dtype=bool)
        for mask in outside:
            keep &= (left & mask) != 0
        chosen.append(new)
        size += int(np.prod([len(_rotations(int(symbol))) for symbol in new]))
        left, index = left[keep], index[keep]
    return size, len(chosen)


def _bits(symbols: Array) -> Array:
    """Bit of every symbol of a row: group g, symbol s is bit 7 g + s."""
    return (7 * np.arange(symbols.shape[-1]) + symbols).astype(np.uint64)


def _mask(allowed: Array) -> np.uint64:
    """One bit per group and symbol, from a (groups, 7) table of booleans."""
    return np.uint64(sum(1 << int(bit) for bit in np.flatnonzero(allowed.ravel())))


def _comparable(new: Array) -> tuple[Array, Array]:
    """Symbols with at least, and with at most, the new class's weight in each group; such classes are comparable."""
    weights, of_new = np.array(_WEIGHT), np.take(_WEIGHT, new)[:, None]
    return weights >= of_new, weights <= of_new


def _unseparated(old: Array, new: Array) -> Array:
    """Symbols that two chosen classes do not tell apart, in each group."""
    found: Array = ~_separated()[old, new]
    return found
