"""Bytes of a commit on the network, as the kernel counts them: tools/bench/wire.py."""

import json
import subprocess
import sys

from repository import ROOT


def test_a_commit_of_thirty_members_is_under_1500_bytes_per_worker_on_every_way() -> None:
    command = [sys.executable, "tools/bench/wire.py", "--commits", "8", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    commits = {row["what"]: row["ours"] for row in rows if row["what"].startswith("commit")}
    assert len(commits) == 6
    # no less than the seeds and coefficients that it carries: else something was not counted
    assert all(30 * 12 * (0.7 if "mirrored" in what else 1) < cost < 1500 for what, cost in commits.items()), commits
