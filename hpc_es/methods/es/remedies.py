"""Corrections for staleness and for cohorts with several task batches, and a control with random scores.

All are off by default. Invariant: pure functions of recorded values; mathematically equal results are bitwise equal.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Literal

from hpc_es.records import EvalId
from hpc_es.seeds import derive

LagWeight = Literal["none", "inverse", "exponential"]


def lag_weight(kind: LagWeight, lag: int, rate: float) -> float:
    """Weight of a member by its lag; 1 for a fresh member. Not normalised: stale cohorts make smaller steps.

    inverse: (1 + lag)^-rate; with rate 1 the learning rate of staleness-aware SGD (Zhang et al., 2016), whose
    staleness counts from 1.
    exponential: exp(-rate * lag), the penalty of Chan & Lane (2014).
    """
    if kind == "none":
        return 1.0
    return (1.0 + lag) ** -rate if kind == "inverse" else math.exp(-rate * lag)


def without_batch_means(fitness: Sequence[float], versions: Sequence[int]) -> list[float]:
    """Fitness minus the mean of the cohort's members of the same dispatch version, who played the same tasks.

    This is the constant baseline of REINFORCE (Williams, 1992), one per batch: it removes a batch's difficulty from
    the scores of its members. The result is 0 for the only member of a version. Computed exactly and rounded once.
    """
    by_version = defaultdict[int, list[Fraction]](list)
    for value, version in zip(fitness, versions, strict=True):
        by_version[version].append(Fraction(value))
    means = {version: sum(values) / len(values) for version, values in by_version.items()}
    return [float(Fraction(value) - means[version]) for value, version in zip(fitness, versions, strict=True)]


def without_centres(fitness: Sequence[float], versions: Sequence[int], centres: Mapping[int, float]) -> list[float]:
    """Fitness minus that of the unperturbed centre on the same tasks, a baseline that is useful with few members.

    `centres`: version -> fitness of theta_version on its training batch. Errors: KeyError if one is missing.
    """
    return [value - centres[version] for value, version in zip(fitness, versions, strict=True)]


def random_score(run_seed: int, eval_id: EvalId) -> float:
    """A standard normal number that replaces a member's fitness; it follows from the run seed and the member's id."""
    word = derive(run_seed, "random walk", eval_id.version, eval_id.slot, eval_id.replacement)
    return NormalDist().inv_cdf(((word >> 12) + 0.5) / 2**52)
