"""What turns the ES gradient g = sum(w_i * u_i * eps_i) into a step: nothing, momentum, or Adam.

Invariant: elements change by fp32 operations that round correctly (multiply, add, divide, square root), and every other
number is computed once, by the head, in float64, rounded to fp32 and shipped with the commit (design, section 4).
An element that no noise reaches in an update (outside the scope, in no member's subspace, a null commit) keeps theta,
m and v as they are.
"""

import math
from typing import Literal

from hpc_es.methods.es.shaping import fp32
from hpc_es.records import OptimiserStep

Kind = Literal["none", "momentum", "adam"]

STATE: dict[Kind, tuple[str, ...]] = {"none": (), "momentum": ("m",), "adam": ("m", "v")}
"""What each keeps for every trained element, in fp32: under the name `<tensor>#m`, `<tensor>#v` in the digest."""


def step(kind: Kind, *, alpha: float, update: int, beta1: float, beta2: float, epsilon: float) -> OptimiserStep | None:
    """The scalars of update `update` (1-based); None without an optimiser. m and v begin at zero.

    momentum: m = beta1 * m + (1 - beta1) * g; theta += alpha * m. Heavy ball (Polyak, 1964), as a running mean: a g
    that stays the same comes to move theta by alpha * g per update, as it does without momentum.
    adam: besides, v = beta2 * v + (1 - beta2) * g^2; theta += alpha * m' / (sqrt(v') + epsilon) with the corrections
    m' = m / (1 - beta1^u) and v' = v / (1 - beta2^u) (Kingma & Ba, 2015), computed in the order that they advise:
    rate * m / (sqrt(v) + epsilon * c) with c = sqrt(1 - beta2^u) and rate = alpha * c / (1 - beta1^u).
    u counts null updates too, since a commit knows no others; after some of them the first steps are smaller.
    """
    if kind == "none":
        return None
    decay, gain = fp32(beta1), fp32(1 - beta1)
    if kind == "momentum":
        return OptimiserStep(kind, fp32(alpha), decay, gain)
    correction = math.sqrt(1 - beta2**update)
    rate = alpha * correction / (1 - beta1**update)
    return OptimiserStep(kind, fp32(rate), decay, gain, fp32(beta2), fp32(1 - beta2), fp32(epsilon * correction))
