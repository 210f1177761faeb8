"""Rules of fields that end up in file names."""

import pytest

from hpc_es.bounds import fault
from hpc_es.records import EvalId, Result


@pytest.mark.parametrize("trace", ["", "0123456789abcdef" * 2])
def test_a_hash_or_nothing_is_a_valid_trace(trace: str) -> None:
    assert fault(Result(EvalId(0, 0), 0.5, (), 0, 0.0, 0.0, 0.0, trace=trace)) is None


@pytest.mark.parametrize("trace", ["../../secret", "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n"])
def test_a_trace_that_is_no_hash_is_refused_so_it_cannot_leave_its_folder(trace: str) -> None:
    found = fault(Result(EvalId(0, 0), 0.5, (), 0, 0.0, 0.0, 0.0, trace=trace))
    assert found is not None
    assert found.field.endswith("trace")
    assert "32 hexadecimal digits" in str(found)
