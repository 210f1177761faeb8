"""The noise table of reference.py as line segments, for devices that compute faster than they look up a large table.

Invariant: the segments give exactly the table at each of the 32,768 places of its first half (the table is odd).

The table value at place p is (intercept + slope * p) >> SHIFT, in 32-bit integers that wrap around. Places share a
segment if the floats p + OFFSET have the same upper 16 bits. This gives 128 segments per octave, short where the table
is steep. With 64 per octave, or with most other offsets, some segments have no line that is exact everywhere.
"""

import numpy as np

from hpc_es.noise.reference import LOW, Array, table

OFFSET, SHIFT = 160, 16
FIRST = 0x4320
"""The upper 16 bits of the float OFFSET: segment 0."""
SEGMENTS = 1024
"""Number of entries that a kernel looks up in, a power of two; 993 of them hold a line."""


def segments() -> Array:
    """All segments, int64 [SEGMENTS]: the slope in the upper 32 bits, the intercept in the lower 32."""
    values = table()[: table().size // 2].astype(np.int64)
    places = np.arange(values.size)
    firsts = np.flatnonzero(np.diff(segment_of(places), prepend=-1))
    lines = np.zeros(SEGMENTS, np.int64)
    for number, mine in enumerate(np.split(places, firsts[1:])):
        intercept, slope = _line(mine, values[mine])
        lines[number] = slope << 32 | intercept & int(LOW)
    return lines


def segment_of(places: Array) -> Array:
    """The segment number of each place, int64."""
    return ((places + OFFSET).astype(np.float32).view(np.uint32) >> SHIFT).astype(np.int64) - FIRST


def _line(places: Array, values: Array) -> tuple[int, int]:
    """Intercept and slope, in the middle of all exact ones; any two places bound the slope."""
    slope = 0
    if places.size > 1:
        one, other = np.triu_indices(places.size, 1)
        run, rise = places[other] - places[one], values[other] - values[one]
        slope = round((((rise - 1) / run).max() + ((rise + 1) / run).min()) / 2 * 2**SHIFT)
    rest = (values << SHIFT) - slope * places
    return int(rest.max() + rest.min() + (1 << SHIFT) - 1) // 2, slope
