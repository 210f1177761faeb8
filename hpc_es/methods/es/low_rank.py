"""Noise of rank r: a matrix moves by c * P with the exact integers P = A B^T (EGGROLL; Sarkar et al., 2025).

A and B hold table values, 4096 times a standard normal, so P / (4096^2 * sqrt(r)) has mean 0 and variance 1, as the
full-rank noise T / 4096 has. The scale is computed in float64 and rounded to fp32 once, within a coefficient.
"""

import math


def noise_scale(rank: int) -> float:
    """What turns the noise of a rank into units of sigma, as a divisor: 4096 for full rank (0)."""
    return 4096.0**2 * math.sqrt(rank) if rank else 4096.0
