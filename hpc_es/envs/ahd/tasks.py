"""The published tasks of automatic heuristic design: what a program decides, and what its decisions are worth.

Invariant: an objective is minimised, so values that a task maximises are negative. It is computed here, outside of the
sandbox, from decisions that are validated first; a program cannot change how it is scored.
Source: Agentic ESOpt (Zheng et al., 2026); golden values in data/ahd.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from hpc_es.envs.ahd import admissible, instances
from hpc_es.errors import ConfigError

Array = np.ndarray[Any, np.dtype[Any]]
Score = Callable[[Array, Array, int], float]
"""(instance, decisions, seed) -> objective; NaN if the decisions are invalid."""

KNAPSACK_CAPACITY = {50: 12.5, 100: 25.0, 200: 25.0, 500: 25.0}
VEHICLE_CAPACITY = 50
BIN_CAPACITY = 150
WEIGHT = {12: 7, 15: 10, 21: 15}
"""Non-zero entries w of the vectors of an admissible set, by their length n."""
HEURISTICS = ("heuristics", "heuristics_v1", "heuristics_v2", "heuristics_v3")

Set = Literal["search", "final"]


@dataclass(frozen=True)
class Evaluation:
    """A task on a set of instances."""

    problem: str
    instances: Array
    decision: str
    """Function of inside.py that asks the program."""
    names: tuple[str, ...]
    """Names that the program's function may have."""
    score: Score
    decided: tuple[tuple[int, ...], Any]
    """Shape and data type of the decisions on one instance."""
    cpu_seconds: float
    """Time limit per program on a search; published as wall-clock time."""
    is_final: bool = False
    gives_numpy: bool = True
    """Whether `np` is defined without an import, as in the published evaluator."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function of inside.py."""


def tour_length(places: Array, route: Array, _seed: int = 0) -> float:
    """Length of a closed tour; NaN if it does not visit every node once."""
    if not np.array_equal(np.sort(route), np.arange(len(places))):
        return np.nan
    return float(np.linalg.norm(places[route] - places[np.roll(route, -1)], axis=1).sum())


def minus_value(items: Array, packed: Array, _seed: int = 0, *, capacity: float) -> float:
    """Minus the value of the packed items; NaN if they do not fit or an item is packed twice."""
    chosen = packed[packed >= 0]
    if len(np.unique(chosen)) != len(chosen) or chosen.max(initial=-1) >= len(items):
        return np.nan
    if items[chosen, 0].sum() > capacity + 1e-9:
        return np.nan
    return -float(items[chosen, 1].sum())


def minus_size(vectors: Array, priorities: Array, _seed: int = 0, *, w: int) -> float:
    """Minus the size of the admissible set that the priorities lead to."""
    return -float(admissible.construct(vectors.shape[1], w, priorities)[0])


def distances_between(places: Array) -> Array:
    """Euclidean distances with ones on the diagonal, as ant colonies and their programs see them."""
    distances = np.sqrt(((places[:, np.newaxis] - places) ** 2).sum(axis=2))
    np.fill_diagonal(distances, 1)
    return distances


def _colony_tour(places: Array, values: Array, seed: int, *, effort: int) -> float:
    from hpc_es.envs.ahd import colonies  # compiles kernels, which only the tasks with ants need

    return colonies.shortest_tour(distances_between(places), values, seed, effort)


def _colony_routes(customers: Array, values: Array, seed: int, *, effort: int, waiting: bool) -> float:
    from hpc_es.envs.ahd import colonies

    distances, demands = distances_between(customers[:, 1:]), customers[:, 0].copy()
    return colonies.shortest_routes(distances, demands, VEHICLE_CAPACITY, values, seed, effort, waiting)


def _colony_bins(sizes: Array, values: Array, seed: int, *, effort: int) -> float:
    from hpc_es.envs.ahd import colonies

    return colonies.fewest_bins(sizes, BIN_CAPACITY, values, seed, effort)


SIZES: dict[str, tuple[int, ...]] = {
    "tsp_constructive": (20, 50),
    "kp_constructive": (50, 100),
    "asp_constructive": (15, 21),
    "tsp_aco": (50, 100),
    "cvrp_aco": (50, 100),
    "bpp_offline_aco": (500, 1000),
}
"""Published sizes of every problem; all that data/ahd has can be evaluated."""
SEARCH_SIZE = {
    "tsp_constructive": 50,
    "kp_constructive": 100,
    "asp_constructive": 15,
    "tsp_aco": 50,
    "cvrp_aco": 50,
    "bpp_offline_aco": 500,
}
EFFORT = {"tsp_aco": 100, "cvrp_aco": 100, "bpp_offline_aco": 200}
"""Iterations of an ant colony; samples for bins."""


def evaluation(
    problem: str,
    which: Set = "search",
    size: int | None = None,
    *,
    split: str | None = None,
    effort: int | None = None,
    waiting: bool = True,
    num_instances: int | None = None,
) -> Evaluation:
    """A task on its search instances, or on its final ones of a size.

    split: another set of instances (`train`, `val`, `test`). effort: iterations of an ant colony, or samples for bins.
    waiting: whether ants of cvrp_aco pay for waiting, as published. num_instances: the first so many instances.
    Errors: ConfigError naming what exists.
    """
    if problem not in SIZES:
        raise ConfigError(f"problem={problem!r} must be one of {', '.join(SIZES)}")
    is_final = which == "final"
    size = size or SEARCH_SIZE[problem]
    if problem == "asp_constructive":
        if size not in WEIGHT:
            raise ConfigError(f"{problem} has the sizes {', '.join(map(str, WEIGHT))}, not {size}")
        drawn = admissible.vectors(size, WEIGHT[size]).astype(np.int8)[np.newaxis]
    else:
        drawn = instances.load(problem, split or ("test" if is_final else "train"), size)[:num_instances]
    effort = effort or EFFORT.get(problem, 0)
    make = partial(Evaluation, problem, drawn, is_final=is_final)
    square = ((drawn.shape[1],) * 2, np.float64)
    order = ((size,), np.int32)
    match problem:
        case "tsp_constructive":
            return make("tour", ("select_next_node",), tour_length, order, 20, gives_numpy=False)
        case "kp_constructive":
            capacity = KNAPSACK_CAPACITY[size]
            score: Score = partial(minus_value, capacity=capacity)
            return make("knapsack", ("select_next_item",), score, order, 30, options={"capacity": capacity})
        case "asp_constructive":
            w = WEIGHT[size]
            each = ((drawn.shape[1],), np.float64)
            return make("priorities", ("priority",), partial(minus_size, w=w), each, 30, options={"w": w})
        case "tsp_aco":
            return make("tour_values", HEURISTICS, partial(_colony_tour, effort=effort), square, 30)
        case "cvrp_aco":
            score = partial(_colony_routes, effort=effort, waiting=waiting)
            return make("route_values", HEURISTICS, score, square, 30, options={"capacity": VEHICLE_CAPACITY})
        case _:
            score = partial(_colony_bins, effort=effort)
            return make("bin_values", HEURISTICS, score, square, 30, options={"capacity": BIN_CAPACITY})
