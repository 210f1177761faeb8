"""Runs in the sandbox: asks a program for its decisions on a set of instances, and prints them. Needs numpy alone.

    python3 inside.py      # reads program.py, request.json and instances.npy beside itself

Nothing that this prints is trusted. It sends decisions (tours, items, priorities, heuristic values), and the worker
outside validates and scores them, so a program that patches this file's functions gains nothing.
Source of the loops: the evaluators of EoH (Liu et al., 2024) and Agentic ESOpt (Zheng et al., 2026).
"""

import base64
import inspect
import json
import os
import random
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

TOLERANCE = 1e-12
"""Rounding allowed when an item is put into a knapsack."""


def tour(program: Callable[..., Any], places: Any, is_final: bool) -> Any:
    """Order in which the nodes are visited. The program chooses all but the first and the last one."""
    distances = np.linalg.norm(places[:, np.newaxis] - places, axis=2)
    nearest = np.array([np.argsort(np.linalg.norm(place - places, axis=1)) for place in places])
    num_nodes = len(places)
    route = np.zeros(num_nodes)
    current: Any = 0
    for step in range(1, num_nodes - 1):
        others = nearest[current][1:]
        unvisited = others[~np.isin(others, route[:step])]
        current = program(current, 0, unvisited, distances)
        if current in route:
            raise ValueError("a node was chosen twice")
        route[step] = current
    route[-1] = np.flatnonzero(~np.isin(np.arange(num_nodes), route[:-1]))[0]
    return route.astype(np.int32)


def knapsack(program: Callable[..., Any], items: Any, is_final: bool, capacity: float) -> Any:
    """Items in the order in which they are packed; -1 fills the rest. In a search, one that does not fit is an error;
    in a final evaluation it ends the packing."""
    weights, values = items[:, 0].copy(), items[:, 1].copy()
    names = np.arange(len(items))
    packed = np.full(len(items), -1, np.int32)
    room = float(capacity)
    while len(weights) and room + TOLERANCE >= weights.min():
        if is_final:
            chosen = program(room, weights.copy(), values.copy())
        else:
            chosen = program(remaining_capacity=room, weights=weights.copy(), values=values.copy())
        if isinstance(chosen, np.ndarray):
            chosen = chosen.item()
        chosen = int(chosen)
        if not 0 <= chosen < len(weights):
            raise ValueError("there is no such item")
        if weights[chosen] > room + TOLERANCE:
            if is_final:
                break
            raise ValueError("the item does not fit")
        packed[len(items) - len(names)] = names[chosen]
        room -= float(weights[chosen])
        weights, values, names = (np.delete(each, chosen) for each in (weights, values, names))
    return packed


def priorities(program: Callable[..., Any], vectors: Any, is_final: bool, w: int) -> Any:
    """Priority of every vector."""
    n = vectors.shape[1]
    return np.array([program(tuple(vector), n, w) for vector in vectors.tolist()], dtype=float)


def tour_values(program: Callable[..., Any], places: Any, is_final: bool) -> Any:
    """Heuristic value of every move between two nodes."""
    distances = _distances(places)
    return _square(program(distances), len(distances))


def route_values(program: Callable[..., Any], customers: Any, is_final: bool, capacity: float) -> Any:
    """Heuristic value of every move between two nodes; programs of two parameters get the scaled demands alone."""
    demands, places = customers[:, 0].copy(), customers[:, 1:].copy()
    distances = _distances(places)
    num_parameters = len(inspect.getfullargspec(program).args)
    if num_parameters == 2:
        return _square(program(distances, demands / capacity), len(distances))
    if num_parameters != 4:
        raise TypeError("the function must have the four parameters of the task")
    return _square(program(distances, places, demands, capacity), len(distances))


def bin_values(program: Callable[..., Any], sizes: Any, is_final: bool, capacity: int) -> Any:
    """Heuristic value of every pair of items in one bin."""
    return _square(program(sizes.astype(np.int32), capacity), len(sizes))


def _distances(places: Any) -> Any:
    distances = np.sqrt(((places[:, np.newaxis] - places) ** 2).sum(axis=2))
    np.fill_diagonal(distances, 1)
    return distances


def _square(values: Any, size: int) -> Any:
    values = np.asarray(values, dtype=float)
    if values.shape != (size, size):
        raise ValueError(f"the values have the shape {values.shape}, not {(size, size)}")
    return values


DECISIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (tour, knapsack, priorities, tour_values, route_values, bin_values)
}


def loaded(source: str, names: list[str], gives_numpy: bool) -> Callable[..., Any]:
    """The function that a program defines, by the first of its possible names."""
    module = types.ModuleType("heuristic_module")
    if gives_numpy:
        module.__dict__["np"] = np
    sys.modules[module.__name__] = module
    exec(source, module.__dict__)
    for name in names:
        if callable(found := getattr(module, name, None)):
            return found
    raise NameError(f"there is no function {names[0]}")


def answers(request: dict[str, Any], source: str, instances: Any) -> Iterator[bytes]:
    """The decisions on each instance: a byte 1 and their array; in a final evaluation also a byte 0 for a failure."""
    decide, is_final = DECISIONS[request["decision"]], request["is_final"]
    program: Callable[..., Any] | None = None
    for instance in instances:
        try:
            program = program or loaded(source, request["names"], request["gives_numpy"])
            decided = decide(program, instance, is_final, **request["options"])
        except Exception:
            if not is_final:
                raise
            yield b"\0"
        else:
            yield b"\1" + np.ascontiguousarray(decided).tobytes()


def main() -> None:
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    instances = np.load("instances.npy", allow_pickle=False)
    out, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # what the program prints is not part of the answer
    os.dup2(quiet, 2)
    random.seed(request["seed"])
    np.random.seed(request["seed"])
    warnings.simplefilter("ignore")
    try:
        packed = zlib.compressobj(1)
        data = b"".join(map(packed.compress, answers(request, source, instances))) + packed.flush()
        said = base64.b64encode(data)
    except BaseException as error:
        said = f"!{type(error).__name__}: {error}"[:300].encode("ascii", "replace")
    with os.fdopen(out, "wb") as file:
        file.write(said)
    os._exit(0)  # nothing that the program left behind may run


if __name__ == "__main__":
    main()
