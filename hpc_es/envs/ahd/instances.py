"""Instances of the published tasks of automatic heuristic design, drawn from numpy's legacy generator.

Invariant: every array equals the published file of the same name bit for bit. The order of draws is therefore part of
the data: a set is drawn by drawing everything that comes before it in its stream.
Source: the generators of ReEvo (Ye et al., 2024), as used by Agentic ESOpt (Zheng et al., 2026).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from hpc_es.errors import ConfigError

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Callable[[np.random.RandomState, int, int], Array]
Stream = tuple[int, tuple[tuple[str, int, int], ...]]
"""Seed, and the sets in the order in which they are drawn: (split, number of instances, size)."""


def _points(random: np.random.RandomState, count: int, size: int) -> Array:
    return random.rand(count, size, 2)


def _customers(random: np.random.RandomState, count: int, size: int) -> Array:
    """Rows (demand, x, y); row 0 is the depot."""
    drawn = np.empty((count, size + 1, 3))
    drawn[:, 0] = 0, 0.5, 0.5
    for instance in drawn:
        instance[1:, 1:] = random.rand(size, 2)
        instance[1:, 0] = random.randint(1, 10, size)
    return drawn


def _items(random: np.random.RandomState, count: int, size: int) -> Array:
    return random.randint(20, 101, (count, size)).astype(np.uint8)


def _each(split: str, count: int, *sizes: int) -> tuple[tuple[str, int, int], ...]:
    return tuple((split, count, size) for size in sizes)


_STREAMS: dict[str, tuple[Draw, tuple[Stream, ...]]] = {
    "tsp_constructive": (
        _points,
        (
            (
                1234,
                _each("train", 64, 50)
                + _each("val", 64, 20, 50, 100, 200)
                + _each("test", 1000, 20, 50, 100, 200, 500, 1000),
            ),
        ),
    ),
    "kp_constructive": (
        _points,
        ((3333, _each("train", 64, 100) + _each("val", 64, 50, 100, 200) + _each("test", 1000, 50, 100, 200, 500)),),
    ),
    # test20 of the two routing tasks is a stream of its own: drawn directly after the validation sets
    **{
        problem: (
            draw,
            (
                (1234, _each("train", count, 50) + _each("val", 64, 20, 50, 100) + _each("test", 64, 50, 100)),
                (1234, _each("train", count, 50) + _each("val", 64, 20, 50, 100) + _each("test", 64, 20)),
            ),
        )
        for problem, draw, count in (("tsp_aco", _points, 5), ("cvrp_aco", _customers, 10))
    },
    "bpp_offline_aco": (
        _items,
        (
            (5, _each("train", 5, 500)),
            (3, _each("val", 64, 120, 500, 1000)),
            (4, _each("test", 64, 500, 1000)),
        ),
    ),
}


def available() -> dict[str, tuple[tuple[str, int], ...]]:
    """(split, size) of every set of instances, by problem."""
    return {
        problem: tuple(dict.fromkeys((split, size) for _, sets in streams for split, _, size in sets))
        for problem, (_, streams) in _STREAMS.items()
    }


@lru_cache(maxsize=8)
def load(problem: str, split: str, size: int) -> Array:
    """A set of instances, read-only. Errors: ConfigError naming the sets that exist."""
    if problem not in _STREAMS:
        raise ConfigError(f"there are no instances of {problem!r}; problems with instances: {', '.join(_STREAMS)}")
    draw, streams = _STREAMS[problem]
    for seed, sets in streams:
        if all((split, size) != (each, n) for each, _, n in sets):
            continue
        random = np.random.RandomState(seed)
        for each, count, n in sets:
            drawn = draw(random, count, n)
            if (each, n) == (split, size):
                drawn.flags.writeable = False
                return drawn
    listed = ", ".join(f"{each} {n}" for each, n in available()[problem])
    raise ConfigError(f"{problem} has no instances {split} {size}; there are {listed}")
