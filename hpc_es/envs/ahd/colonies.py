"""Ant colonies that a matrix of heuristic values guides: tours, vehicle routes and bins.

Kernels of our own in numba; they release the GIL, so evaluations run side by side. All randomness comes from a seed.
The published evaluators draw from torch's streams, so values agree statistically, not bit for bit.
Settings of Agentic ESOpt (Zheng et al., 2026): 30 ants, 100 iterations, 200 samples for bins. Source: ReEvo (2024).
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUM_ANTS = 30
DECAY = 0.9
SMALLEST = 1e-9
"""Added to heuristic values, which are at least this much: an ant may then choose any move."""
SMALLEST_PHEROMONE = 1e-10
BIN_RANGE = 1e-6
"""Smallest heuristic value of bins, before and after dividing by the largest; 1 / BIN_RANGE is the largest before."""


def _compile(kernel: Callable[..., Any]) -> Any:
    """Compile a kernel at its first call; cached on disk where a folder for the cache can be written."""
    try:
        return numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:  # numba finds no folder for its cache
        return numba.njit(nogil=True)(kernel)


def shortest_tour(distances: Array, heuristic: Array, seed: int, num_iterations: int = 100) -> float:
    """Length of the best tour that the colony finds; NaN if the heuristic values are unusable."""
    values = _positive(heuristic)
    return float(_tours(distances, values, num_iterations, seed % 2**32)) if _usable(values) else np.nan


def shortest_routes(
    distances: Array,
    demands: Array,
    capacity: float,
    heuristic: Array,
    seed: int,
    num_iterations: int = 100,
    waiting: bool = True,
) -> float:
    """Length of the best routes from the depot, node 0; NaN if the heuristic values are unusable.

    `waiting`: whether an ant that is done pays distances[0, 0] for every step until the last ant is done, as published.
    """
    values = _positive(heuristic)
    if not _usable(values):
        return np.nan
    return float(_routes(distances, demands, capacity, values, num_iterations, waiting, seed % 2**32))


def fewest_bins(sizes: Array, capacity: int, heuristic: Array, seed: int, num_samples: int = 200) -> float:
    """Fewest bins in a number of samples: each bin begins with a random item, then takes the item that fits best.

    NaN if the largest heuristic value is not positive and finite.
    """
    largest = heuristic.max()
    if not 0 < largest < np.inf:
        return np.nan
    values = np.clip(heuristic, BIN_RANGE, 1 / BIN_RANGE)
    values = np.maximum(values / values.max(), BIN_RANGE)
    return float(_bins(sizes.astype(np.int64), capacity, values, num_samples, seed % 2**32))


def _positive(heuristic: Array) -> Array:
    return np.maximum(heuristic + SMALLEST, SMALLEST)


def _usable(values: Array) -> bool:
    """Whether probabilities can be made of the values: an ant that stands at any node needs all of its row."""
    return bool(np.isfinite(values).all())


@_compile
def _drawn(weights, total):  # type: ignore[no-untyped-def]
    """An index, with a probability proportional to its weight."""
    left = np.random.random() * total
    last = -1
    for index in range(len(weights)):
        if weights[index] > 0:
            last = index
            left -= weights[index]
            if left < 0:
                return index
    return last  # rounding left a rest


@_compile
def _tours(distances, heuristic, num_iterations, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    n = len(distances)
    pheromone = np.ones((n, n))
    paths = np.empty((NUM_ANTS, n), np.int64)
    lengths = np.empty(NUM_ANTS)
    weights = np.empty(n)
    best = np.inf
    for _ in range(num_iterations):
        attraction = pheromone * heuristic
        for ant in range(NUM_ANTS):
            is_free = np.ones(n, np.bool_)
            at = np.random.randint(0, n)
            paths[ant, 0] = at
            is_free[at] = False
            length = 0.0
            for step in range(1, n):
                total = 0.0
                for node in range(n):
                    weights[node] = attraction[at, node] if is_free[node] else 0.0
                    total += weights[node]
                if not 0 < total < np.inf:
                    return np.nan
                following = _drawn(weights, total)
                length += distances[at, following]
                at = following
                paths[ant, step] = at
                is_free[at] = False
            lengths[ant] = length + distances[at, paths[ant, 0]]
            best = min(best, lengths[ant])
        pheromone *= DECAY
        for ant in range(NUM_ANTS):
            for step in range(n):
                one, other = paths[ant, step], paths[ant, step - 1]
                pheromone[one, other] += 1.0 / lengths[ant]
                pheromone[other, one] += 1.0 / lengths[ant]
    return best


@_compile
def _routes(distances, demands, capacity, heuristic, num_iterations, waiting, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    n = len(distances)
    pheromone = np.ones((n, n))
    paths = np.zeros((NUM_ANTS, 2 * n), np.int64)  # a customer and a way home each, at most
    num_steps = np.empty(NUM_ANTS, np.int64)
    lengths = np.empty(NUM_ANTS)
    weights = np.empty(n)
    best = np.inf
    for _ in range(num_iterations):
        attraction = pheromone * heuristic
        for ant in range(NUM_ANTS):
            is_free = np.ones(n, np.bool_)
            at, step, num_left = 0, 0, n - 1
            used = 0.0
            length = 0.0
            while num_left > 0 or at != 0:
                total = 0.0
                for node in range(n):
                    is_allowed = at != 0 if node == 0 else is_free[node] and demands[node] <= capacity - used
                    weights[node] = attraction[at, node] if is_allowed else 0.0
                    total += weights[node]
                if not 0 < total < np.inf:
                    return np.nan
                following = _drawn(weights, total)
                length += distances[at, following]
                at = following
                step += 1
                paths[ant, step] = at
                if at == 0:
                    used = 0.0
                else:
                    is_free[at] = False
                    used += demands[at]
                    num_left -= 1
            num_steps[ant] = step
            lengths[ant] = length
        longest = num_steps.max()
        if waiting:
            for ant in range(NUM_ANTS):
                lengths[ant] += distances[0, 0] * (longest - num_steps[ant])
        best = min(best, lengths.min())
        pheromone *= DECAY
        for ant in range(NUM_ANTS):
            for step in range(num_steps[ant]):
                pheromone[paths[ant, step], paths[ant, step + 1]] += 1.0 / lengths[ant]
            if num_steps[ant] < longest:
                pheromone[0, 0] += 1.0 / lengths[ant]
        pheromone = np.maximum(pheromone, SMALLEST_PHEROMONE)
    return best


@_compile
def _bins(sizes, capacity, heuristic, num_samples, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    n = len(sizes)
    fewest = n
    inside = np.empty(n, np.int64)
    candidates = np.empty(n, np.int64)
    for _ in range(num_samples):
        is_free = np.ones(n, np.bool_)
        num_bins, count, room = 1, 0, capacity
        for _item in range(n):
            num_candidates = 0
            for item in range(n):
                if is_free[item] and sizes[item] <= room:
                    candidates[num_candidates] = item
                    num_candidates += 1
            if num_candidates == 0:  # the bin is full: the next one begins with any item
                num_bins, count, room = num_bins + 1, 0, capacity
                for item in range(n):
                    if is_free[item]:
                        candidates[num_candidates] = item
                        num_candidates += 1
            if count == 0:
                chosen = candidates[int(np.random.random() * num_candidates)]
            else:
                chosen, highest = -1, -1.0
                for place in range(num_candidates):
                    item = candidates[place]
                    fit = 0.0
                    for other in range(count):
                        fit += heuristic[inside[other], item]
                    if fit > highest:
                        chosen, highest = item, fit
            is_free[chosen] = False
            room -= sizes[chosen]
            place = count
            while place > 0 and inside[place - 1] > chosen:  # sums are in the order of items, as numpy's
                inside[place] = inside[place - 1]
                place -= 1
            inside[place] = chosen
            count += 1
        fewest = min(fewest, num_bins)
    return fewest
