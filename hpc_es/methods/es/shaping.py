"""From the fitness of a cohort to the coefficients of its update.

Invariant: the result depends on the multiset order that the commit states (sorted by dispatch version and slot)
and on nothing else; sums are exact (math.fsum), and each coefficient is rounded to fp32 once, at the very end.
"""

import math
import struct
from collections.abc import Sequence
from typing import Literal

from hpc_es.errors import VerifyError
from hpc_es.records import MAX_REWARD

Kind = Literal["zscore", "centred_ranks"]

EPSILON = 1e-8
"""Added to the standard deviation, as in the papers' code."""
MAX_SCORE = 2 * MAX_REWARD
"""Largest absolute value of a fitness minus its baseline."""


def has_spread(fitness: Sequence[float]) -> bool:
    """Whether the fitness says anything at all; without spread the update is null."""
    return max(fitness) > min(fitness)


def utilities(kind: Kind, fitness: Sequence[float]) -> list[float]:
    """One utility per member, higher is better; all zero when there is no spread.

    `zscore`: (f - mean) / (population std + 1e-8) (Qiu et al., 2025).
    `centred_ranks`: ranks scaled to [-0.5, 0.5], ties averaged (Salimans et al., 2017).
    Errors: VerifyError for a fitness that no worker can have measured, and from which no finite update follows.
    """
    for value in fitness:
        if not abs(value) <= MAX_SCORE:
            raise VerifyError(
                f"a cohort with a fitness of {value!r} makes no update: rewards are finite numbers, at most "
                f"{MAX_REWARD:g} either way; the journal has a result that should have been refused"
            )
    if not has_spread(fitness):
        return [0.0] * len(fitness)
    return zscore(fitness) if kind == "zscore" else centred_ranks(fitness)


def zscore(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / (std + EPSILON) for value in values]


def centred_ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    ties = [sum(other == value for other in values) for value in values]
    return [(b + (t - 1) / 2) / (len(values) - 1) - 0.5 for b, t in zip(below, ties, strict=True)]


def coefficients(
    alpha: float, utilities: Sequence[float], signs: Sequence[int], weights: Sequence[float] | None = None
) -> list[float]:
    """c_i = fp32(alpha * u_i * w_i * sign_i / 4096), the factor of the table value T_i (design, section 4).

    `weights`: w_i, default 1/N each. With an optimiser alpha is 1 here, and the sum over c_i * T_i is its gradient.
    """
    weights = [1.0 / len(utilities)] * len(utilities) if weights is None else weights
    return [fp32(alpha * u * w * sign / 4096) for u, w, sign in zip(utilities, weights, signs, strict=True)]


def fp32(value: float) -> float:
    """Rounded to the nearest float32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
