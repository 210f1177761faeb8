"""Values to compare a program with: simple programs, exact optima and bounds.

Objectives are in the task's own sign (values and set sizes are maximised). Means are over the 1,000 test instances, or
those of one admissible set. Where the published tables and exact computation differ, both stand here.
"""

from dataclasses import dataclass
from typing import Literal

NEAREST_NODE = """
def select_next_node(current_node, destination_node, unvisited_nodes, distance_matrix):
    return min(unvisited_nodes, key=lambda node: distance_matrix[current_node][node])
"""
BEST_RATIO = """
import numpy as np
def select_next_item(remaining_capacity, weights, values):
    return int(np.argmax(np.where(weights <= remaining_capacity, values / weights, -np.inf)))
"""
NO_PRIORITY = """
def priority(el, n, w):
    return 0.0
"""
INVERSE_DISTANCE = """
def heuristics(distance_matrix):
    return 1 / distance_matrix
"""
INVERSE_DISTANCE_OF_ROUTES = """
def heuristics(distance_matrix, coordinates, demands, capacity):
    return 1 / distance_matrix
"""
LARGEST_ITEM = """
import numpy as np
def heuristics(demand, capacity):
    return np.tile(demand / demand.max(), (len(demand), 1))
"""

GREEDY = {
    "tsp_constructive": NEAREST_NODE,
    "kp_constructive": BEST_RATIO,
    "asp_constructive": NO_PRIORITY,
    "tsp_aco": INVERSE_DISTANCE,
    "cvrp_aco": INVERSE_DISTANCE_OF_ROUTES,
    "bpp_offline_aco": LARGEST_ITEM,
}
"""A plain program for every task: what a search has to beat."""

Kind = Literal["optimum", "near-optimum", "best known", "bound"]


@dataclass(frozen=True)
class Best:
    """The best value of a task that is known."""

    value: float
    kind: Kind
    source: str


BEST = {
    ("tsp_constructive", 20): Best(3.819887631203097, "optimum", "LKH, one run per instance"),
    ("tsp_constructive", 50): Best(5.675531521930982, "near-optimum", "LKH, one run per instance"),
    ("kp_constructive", 50): Best(20.03685253871595, "optimum", "branch and bound"),
    ("kp_constructive", 100): Best(40.27227651172159, "optimum", "branch and bound; 40.2710 in the published table"),
    ("asp_constructive", 15): Best(3003, "bound", "C(15, 10)"),
    ("asp_constructive", 21): Best(43596, "best known", "FunSearch; the bound is C(21, 15) = 54,264"),
}
"""By problem and size. For bins, see `bins_needed`; no optimum of the routing tasks with ants is known."""


def bins_needed(sizes: list[int], capacity: int) -> int:
    """Lower bound on the number of bins: the total size in whole bins, or the number of items above half a bin."""
    large = sum(2 * size > capacity for size in sizes)
    return max(-(-sum(sizes) // capacity), large)


def tsp_template(a: float, b: float, c: float = 0.0) -> str:
    """A program for constructive TSP that takes the smallest d + a * d_start + b * mean d + c * min d.

    A control without any model: the best of 81 pairs (a, b) gives 6.2947 on the search instances, less than all
    published programs.
    """
    return f"""
import numpy as np
def select_next_node(current_node, destination_node, unvisited_nodes, distance_matrix):
    nodes = np.sort(unvisited_nodes)
    among = distance_matrix[np.ix_(nodes, nodes)]
    others = among + np.where(np.eye(len(nodes), dtype=bool), np.inf, 0)
    cost = distance_matrix[current_node, nodes] + {a} * distance_matrix[destination_node, nodes]
    cost = cost + {b} * among.mean(axis=1)
    if {c} and len(nodes) > 1:
        cost = cost + {c} * others.min(axis=1)
    return int(nodes[np.flatnonzero(cost <= cost.min() + 1e-15)[0]])
"""
