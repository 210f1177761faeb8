"""The lines that a GPU computes the table from."""

import numpy as np

from hpc_es.noise.reference import table
from hpc_es.noise.segments import SEGMENTS, SHIFT, segment_of, segments


def test_the_lines_are_the_table_at_every_place() -> None:
    places = np.arange(table().size // 2)
    line = segments()[segment_of(places)]
    slope, intercept = (line >> 32).astype(np.uint32), line.astype(np.uint32)
    values = (intercept + slope * places.astype(np.uint32)).view(np.int32) >> SHIFT
    assert values.tolist() == table()[: places.size].tolist()


def test_there_is_a_segment_for_every_place_and_none_is_left_out() -> None:
    found = np.unique(segment_of(np.arange(table().size // 2)))
    assert found.tolist() == list(range(993))
    assert segments().shape == (SEGMENTS,)
