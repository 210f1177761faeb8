"""tools/bench: every bench of all.sh starts, and what they end with becomes one table. How fast things are, no test
says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import started

from hpc_es.es.records import Commit, EvalId, Result, UpdateMember
from hpc_es.paths import RunPaths
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter

ROOT = Path(__file__).resolve().parent.parent
BENCHES = sorted(set(re.findall(r"^    bench (\w+)", (ROOT / "tools/bench/all.sh").read_text(), re.MULTILINE)))


def run(*arguments: str | Path, stdin: str = "") -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_benches_are_in_the_table():
    assert set(BENCHES) >= {"noise", "update", "cycle", "commit", "join", "store"}


@pytest.mark.slow
def test_every_bench_starts():
    for bench in BENCHES:
        if bench != "cycle":  # needs vLLM
            assert "--json" in run(f"tools/bench/{bench}.py", "--help")


def test_the_store_is_measured_and_becomes_markdown():
    line = run("tools/bench/store.py", "--updates", "7", "--rounds", "2", "--json").splitlines()[-1]
    rows = {row["what"]: row for row in json.loads(line)["rows"]}
    assert len(rows) == 6
    assert all(row["ours"] > 0 for row in rows.values())
    table = run("tools/bench/markdown.py", stdin=line + "\n")
    assert "GB/s copied by all" in table
    assert "| **store** |" in table
    assert len(re.findall(r"^\| .* \|$", table, re.MULTILINE)) == len(rows) + 3  # titles, line, bench


def test_the_share_of_a_cohorts_wall_clock_is_read_from_the_journal(tmp_path, monkeypatch):
    """Cohorts are full at 10, 20 and 40 s; a worker has begun on what comes of them 0.1, 0.2 and 0.4 s later."""
    monkeypatch.syspath_prepend(ROOT / "tools/bench")
    from commit import of_run

    writer = JournalWriter.create(RunPaths(tmp_path), started)
    begun = 0.0
    for version, full in enumerate((10.0, 20.0, 40.0, 80.0)):
        for slot, (begins, ends) in enumerate(((begun, full), (begun + 1, full - 1))):
            result = Result(EvalId(version, slot), 0.5, (), 1, 0.0, 0.0, 1.0)
            writer.append(journal.Reported(ends, "w", result, begins, ends, 1))
        members = [UpdateMember(EvalId(version, slot), 1, 1, 0.1, 0, 0.5, 0.0, 0.0) for slot in (0, 1)]
        writer.append(journal.Committed(full + 0.001, Commit(version + 1, 0.1, tuple(members))))
        writer.append(journal.Digested(full + 3, version + 1, 1, 0.0, 2.5))
        begun = full * 1.01
    writer.close()
    share, worst, milliseconds, arena = of_run(tmp_path)
    assert share.ours == pytest.approx(2.0)  # 0.2 of 10 s, and 0.4 of 20 s
    assert share.met
    assert worst.ours == pytest.approx(2.0)
    assert milliseconds.ours == pytest.approx(200)
    assert arena.ours == pytest.approx(2500)
