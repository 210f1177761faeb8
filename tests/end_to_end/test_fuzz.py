"""tools/fuzz.py: whatever happens to a run's files, every reader is right, warns, or refuses."""

import subprocess
import sys

import pytest
from repository import ROOT


@pytest.mark.parametrize("target", ["journal", "hdf5", "checkpoint", "config"])
def test_a_hundred_mutations_leave_nothing_silent_and_no_traceback(target: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), target, "--seeds", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all |  | 100 |" in done.stdout
