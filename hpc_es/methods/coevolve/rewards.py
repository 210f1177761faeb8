"""Rewards of a cohort of proposals, and the perturbation of an outer generation.

Objectives are minimised; NaN is an invalid heuristic. Rewards are higher for better proposals, and always finite.
Source: Agentic ESOpt (Zheng et al., 2026), as coded.
"""

import math
from collections.abc import Sequence

import numpy as np

from hpc_es.methods.es import schedules

MARGIN = 1.0
"""Most that an invalid child, or one worse than the whole population, counts as worse than its parent."""
NO_SPREAD = 1e-8
"""Standard deviation below which the valid rewards of a batch count as equal."""


def improvement(parent: float, child: float, worst: float) -> float:
    """Reward of a child in EoH: the parent's objective minus the child's.

    `worst`: objective of the worst heuristic in the population before the operator. A child that is invalid or worse
    than that counts as min(worst, parent + 1). So a valid child between parent + 1 and worst gets less than an invalid
    one, as published.
    """
    if math.isnan(child) or child > worst:
        child = min(worst, parent + MARGIN)
    return parent - child


def of_samples(objectives: Sequence[float]) -> list[float]:
    """Rewards of a batch in Sample: minus the objective; invalid ones get one standard deviation less than the worst.

    If the valid ones do not differ, invalid ones get less by 1 % of the mean, at least by 1. All invalid: all 0.
    """
    rewards = -np.array(objectives, dtype=float)
    valid = rewards[np.isfinite(rewards)]
    if not len(valid):
        return [0.0] * len(objectives)
    spread = float(valid.std())
    below = spread if spread > NO_SPREAD else max(0.01 * abs(float(valid.mean())), MARGIN)
    return [float(each) for each in np.where(np.isfinite(rewards), rewards, valid.min() - below)]


def sigma_of_generation(generation: int, num_generations: int, start: float = 1e-3, end: float = 0.0) -> float:
    """Standard deviation of the noise in an outer generation, counted from 0: a cosine with exact ends.

    All operators of a generation share it. At 0 all members are the centre, so their update is null.
    """
    return schedules.value("cosine", start, end, update=generation + 1, num_updates=num_generations)
