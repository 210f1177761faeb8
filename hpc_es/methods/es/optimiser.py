"""Optimisers for the ES gradient g = sum(w_i * u_i * eps_i): none, momentum, or Adam.

Invariant: elements change by correctly rounded fp32 operations only (multiply, add, divide, square root). The head
computes all scalars once, in float64, rounds them to fp32 and sends them in the commit (design, section 4).
An update leaves theta, m and v of an element unchanged if it has no noise for it: the element is outside the scope or
in no member's subspace, or the commit is null.
"""

import math
from typing import Literal

from hpc_es.methods.es.shaping import fp32
from hpc_es.records import OptimiserStep

Kind = Literal["none", "momentum", "adam"]

STATE: dict[Kind, tuple[str, ...]] = {"none": (), "momentum": ("m",), "adam": ("m", "v")}
"""State of each optimiser per trained element, in fp32. In the digest its name is `<tensor>#m` or `<tensor>#v`."""


def step(kind: Kind, *, alpha: float, update: int, beta1: float, beta2: float, epsilon: float) -> OptimiserStep | None:
    """The scalars of update number `update`, u, counted from 1; None without an optimiser. m and v start at zero.

    momentum: m = beta1 * m + (1 - beta1) * g; theta += alpha * m. Heavy ball (Polyak, 1964) with a running mean,
    so for a constant g theta moves by alpha * g per update after a while, as without momentum.
    adam: in addition v = beta2 * v + (1 - beta2) * g^2; theta += alpha * m' / (sqrt(v') + epsilon) with the corrections
    m' = m / (1 - beta1^u) and v' = v / (1 - beta2^u) (Kingma & Ba, 2015), computed in their efficient order:
    rate * m / (sqrt(v) + epsilon * c) with c = sqrt(1 - beta2^u) and rate = alpha * c / (1 - beta1^u).
    u includes null updates, because a commit contains only its own number. So if a run begins with null updates, its
    first steps are smaller.
    """
    if kind == "none":
        return None
    decay, gain = fp32(beta1), fp32(1 - beta1)
    if kind == "momentum":
        return OptimiserStep(kind, fp32(alpha), decay, gain)
    correction = math.sqrt(1 - beta2**update)
    rate = alpha * correction / (1 - beta1**update)
    return OptimiserStep(kind, fp32(rate), decay, gain, fp32(beta2), fp32(1 - beta2), fp32(epsilon * correction))
