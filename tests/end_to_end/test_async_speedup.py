"""tools/bench/async_speedup.py, on durations that are too short for its figures to mean much."""

import re
import subprocess
import sys

import pytest
from repository import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_workers_keep_the_closed_form_of_natural_asynchrony_and_wait_at_no_barrier(tmp_path):
    command = [sys.executable, "tools/bench/async_speedup.py", "--out", str(tmp_path / "runs")]
    done = subprocess.run([*command, "--updates", "10", "--median", "0.1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    waits = [float(mean) for mean in re.findall(r"nothing to do +mean +([\d.]+) ms", done.stdout)]
    sync, *natural = waits[:3]
    assert sync > 20
    assert max(natural) < sync / 4
