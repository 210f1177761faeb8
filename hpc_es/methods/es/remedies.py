"""Remedies against staleness and mixed task batches, and the control that shows what an update looks like without
meaning. All are off by default.

Invariant: pure functions of recorded values; what is mathematically equal comes out equal to the bit.
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
    """Factor of a member's coefficient by its lag; a fresh member's is 1. Not normalised: stale cohorts step less.

    inverse: (1 + lag)^-rate; with rate 1 the learning rate of staleness-aware SGD (Zhang et al., 2016), whose
    staleness counts from 1.
    exponential: exp(-rate * lag), the penalty of Chan & Lane (2014).
    """
    if kind == "none":
        return 1.0
    return (1.0 + lag) ** -rate if kind == "inverse" else math.exp(-rate * lag)


def without_batch_means(fitness: Sequence[float], versions: Sequence[int]) -> list[float]:
    """Fitness minus the mean of the cohort's members of the same dispatch version, who played the same tasks.

    The constant baseline of REINFORCE (Williams, 1992), one per batch: how hard a batch was says nothing about its
    members. A version's only member comes out at 0: alone it says nothing. Exact, rounded once.
    """
    by_version = defaultdict[int, list[Fraction]](list)
    for value, version in zip(fitness, versions, strict=True):
        by_version[version].append(Fraction(value))
    means = {version: sum(values) / len(values) for version, values in by_version.items()}
    return [float(Fraction(value) - means[version]) for value, version in zip(fitness, versions, strict=True)]


def without_centres(fitness: Sequence[float], versions: Sequence[int], centres: Mapping[int, float]) -> list[float]:
    """Fitness minus that of the unperturbed centre on the same tasks: a baseline with less noise from few members.

    `centres`: version -> fitness of theta_version on its training batch. Errors: KeyError where one is missing.
    """
    return [value - centres[version] for value, version in zip(fitness, versions, strict=True)]


def meaningless(run_seed: int, eval_id: EvalId) -> float:
    """A standard normal number in place of a member's fitness, from the run seed and its id."""
    word = derive(run_seed, "random walk", eval_id.version, eval_id.slot, eval_id.replacement)
    return NormalDist().inv_cdf(((word >> 12) + 0.5) / 2**52)
