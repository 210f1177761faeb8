"""Compute the coefficients of an update from the fitness of its cohort.

Invariant: the result depends only on the cohort in the order of the commit (sorted by dispatch version and slot). Sums
are exact (math.fsum), and each coefficient is rounded to fp32 once, at the end.
"""

import math
import struct
from collections.abc import Sequence
from typing import Literal

from hpc_es.errors import VerifyError
from hpc_es.methods.es.low_rank import noise_scale
from hpc_es.records import MAX_REWARD

Kind = Literal["zscore", "centred_ranks"]

EPSILON = 1e-8
"""Added to the standard deviation, as in the papers' code."""
MAX_SCORE = 2 * MAX_REWARD
"""Largest absolute value of a fitness minus its baseline."""


def has_spread(fitness: Sequence[float]) -> bool:
    """Whether fitness differs within the cohort; otherwise the update is null."""
    return max(fitness) > min(fitness)


def utilities(kind: Kind, fitness: Sequence[float]) -> list[float]:
    """One utility per member, higher is better; all zero when there is no spread.

    `zscore`: (f - mean) / (population std + 1e-8) (Qiu et al., 2025).
    `centred_ranks`: ranks scaled to [-0.5, 0.5], ties averaged (Salimans et al., 2017).
    Errors: VerifyError for an impossible fitness, which would make the update infinite or NaN.
    """
    for value in fitness:
        if not abs(value) <= MAX_SCORE:
            raise VerifyError(
                f"no update can be made from a fitness of {value!r}: rewards must be between -{MAX_REWARD:g} and "
                f"{MAX_REWARD:g}; the journal contains a result that should have been refused"
            )
    if not has_spread(fitness):
        return [0.0] * len(fitness)
    return zscore(fitness) if kind == "zscore" else centred_ranks(fitness)


def zscore(values: Sequence[float]) -> list[float]:
    """(value - mean) / (population standard deviation + EPSILON)."""
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / (std + EPSILON) for value in values]


def centred_ranks(values: Sequence[float]) -> list[float]:
    """Ranks scaled to [-0.5, 0.5], with ties averaged."""
    below = [sum(other < value for other in values) for value in values]
    ties = [sum(other == value for other in values) for value in values]
    return [(b + (t - 1) / 2) / (len(values) - 1) - 0.5 for b, t in zip(below, ties, strict=True)]


def coefficients(
    alpha: float,
    utilities: Sequence[float],
    signs: Sequence[int],
    weights: Sequence[float] | None = None,
    rank: int = 0,
) -> list[float]:
    """c_i = fp32(alpha * u_i * w_i * sign_i / 4096), the factor of the table value T_i (design, section 4).

    With a rank, c_i is the factor of the integer P_i, and the divisor is 4096^2 * sqrt(rank) (design, section 15).

    `weights`: w_i, by default 1/N. With an optimiser, pass alpha=1: the sum of c_i * T_i is then its gradient.
    """
    weights = [1.0 / len(utilities)] * len(utilities) if weights is None else weights
    divisor = noise_scale(rank)
    return [fp32(alpha * u * w * sign / divisor) for u, w, sign in zip(utilities, weights, signs, strict=True)]


def fp32(value: float) -> float:
    """Round to the nearest float32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
