"""The population of heuristics: ranks, choice of parents, survival.

Invariant: everything is a pure function of the pool and of seeds that derive from the run's, so a pool can be rebuilt
from the journal. A context's score is higher for a better heuristic: it is minus the objective, and NaN if invalid.
Source: EoH (Liu et al., 2024); rules as coded in Agentic ESOpt (Zheng et al., 2026).
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from hpc_es.records import Context, PoolChange
from hpc_es.seeds import derive

DECIMALS = 5
"""Heuristics whose objectives agree to so many decimals count as the same."""
MAX_SIZE = 10
"""Published size of the population."""
NUM_PARENTS = {"i1": 0, "e1": 2, "e2": 2, "m1": 1, "m2": 1}
"""Number of parents of each operator, in the order in which EoH applies them."""


def ranked(pool: Mapping[str, Context]) -> list[Context]:
    """Contexts from the best to the worst; equal ones in the order of their ids. Invalid ones are left out."""
    valid = [context for context in pool.values() if math.isfinite(context.score)]
    return sorted(valid, key=lambda context: (-context.score, context.id))


def probabilities(size: int) -> list[float]:
    """Probability of each rank to become a parent, the best first: proportional to 1 / (rank + 1 + size)."""
    weights = [1 / (rank + 1 + size) for rank in range(size)]
    total = sum(weights)
    return [weight / total for weight in weights]


def parents(
    pool: Mapping[str, Context], operator: str, *, run_seed: int, generation: int, slot: int
) -> tuple[Context, ...]:
    """The parents of one proposal, drawn by rank with replacement: two of them may be the same heuristic.

    Empty if the operator needs none, or the pool has no valid heuristic.
    """
    best_first = ranked(pool)
    if not best_first:
        return ()
    drawn = random.Random(derive(run_seed, "parents", operator, generation, slot))
    return tuple(drawn.choices(best_first, probabilities(len(best_first)), k=NUM_PARENTS[operator]))


def survivors(pool: Mapping[str, Context], children: Iterable[Context], size: int = MAX_SIZE) -> list[Context]:
    """The population after an operator's batch: the best `size` of pool and children, the best first.

    Invalid ones and those whose rounded objective is already there are dropped; earlier ones win.
    """
    kept: dict[float, Context] = {}
    for context in [*pool.values(), *children]:
        if math.isfinite(context.score):
            kept.setdefault(_rounded(context.score), context)
    return ranked({context.id: context for context in kept.values()})[:size]


def change(pool: Mapping[str, Context], children: Sequence[Context], size: int = MAX_SIZE) -> PoolChange | None:
    """How a batch of children changes the pool; None: not at all."""
    after = [context.id for context in survivors(pool, children, size)]
    added = tuple(each for each in after if each not in pool)
    removed = tuple(each for each in pool if each not in after)
    return PoolChange(added, removed) if added or removed else None


def _rounded(score: float) -> float:
    return round(score, DECIMALS) + 0.0  # not -0.0
