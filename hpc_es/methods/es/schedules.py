"""Values that change over the updates: sigma and alpha.

Invariant: the values at both ends are exact. Both schedules may end at 0. Members with sigma 0 equal the unperturbed
centre, so nothing can be learnt from their fitness; an update with sigma 0 or alpha 0 is null.
"""

import math
from typing import Literal

Kind = Literal["constant", "cosine", "linear"]


def value(kind: Kind, start: float, end: float | None, *, update: int, num_updates: int) -> float:
    """The value for `update` (1-based) of `num_updates`: `start` at the first, `end` at the last.

    cosine: end + (start - end) * (1 + cos(pi p)) / 2 with p from 0 to 1 (Agentic ESOpt; Zheng et al., 2026).
    """
    if kind == "constant" or end is None or update <= 1:
        return start
    if update >= num_updates:
        return end
    progress = (update - 1) / (num_updates - 1)
    share = (1 + math.cos(math.pi * progress)) / 2 if kind == "cosine" else 1 - progress
    return end + (start - end) * share
