"""tools/bench: every bench of all.sh starts, and what they end with becomes one table. How fast things are, no test
says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Counted, built_assignment, built_commit
from fake_run import started
from repository import ROOT

from hpc_es.paths import RunPaths
from hpc_es.records import EvalId, Result
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter

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


@pytest.mark.slow
def test_a_commit_is_measured_with_a_real_head():
    line = run(
        "tools/bench/commit.py", "--updates", "2", "--members", "4", "--workers", "3", "--parameters", "64", "--json"
    )
    rows = json.loads(line.splitlines()[-1])["rows"]
    assert rows[0]["ours"] > 0


@pytest.mark.slow
def test_the_capacity_of_a_real_head_is_measured_and_no_result_is_lost():
    table = run("tools/bench/head_capacity.py", "--clients", "6", "--updates", "2", "--tasks", "1", "--modes", "sync")
    *_, lost, double = table.splitlines()[-1].split()
    assert (lost, double) == ("0", "0")


def test_the_waits_of_a_commit_and_the_heads_time_are_read_from_the_journal(tmp_path, monkeypatch, capsys):
    """Cohorts are full at 10, 20, 40 and 80 s. One waits 4 s more, until an evaluation of the centre is handed out. A
    worker begins on what comes of them 0.1, 0.2 and 0.4 s later; the one that begins last had been busy 0.3 s of it."""
    monkeypatch.syspath_prepend(ROOT / "tools/bench")
    import commit

    writer, begun = JournalWriter.create(RunPaths(tmp_path), started), 0.0
    for version, full in enumerate((10.0, 20.0, 40.0, 80.0)):
        ready = full + 4 * (version == 1)
        centre = built_assignment(EvalId(version, 2), 0, "centre", None, (), 0)
        writer.append(journal.Planned(begun, version, (centre,)))
        for slot, (begins, ends) in enumerate(((begun, full), (begun + 1, full - 1))):
            result = Result(EvalId(version, slot), 0.5, (), 1, 0.0, 0.0, 1.0)
            writer.append(journal.Reported(ends, f"w{slot}", result, begins, ends, 1))
        writer.append(journal.Leased(ready, centre.eval_id, "w1", 1))
        if version == 2:
            result = Result(EvalId(version, 2), 0.5, (), 1, 0.0, 0.0, 1.0)
            writer.append(journal.Reported(ready + 0.3, "w0", result, ready, ready + 0.3, 1))
        members = [Counted(EvalId(version, slot), 1, 1, 0.1, 0, 0.5, 0.0, 0.0) for slot in (0, 1)]
        writer.append(journal.Committed(ready + 0.05, built_commit(version + 1, 0.1, tuple(members))))
        writer.append(journal.Digested(full + 3, version + 1, 1, 0.0, 2.5))
        begun = ready + full / 100
    writer.close()
    monkeypatch.setattr(commit, "SHORTEST_S", 30.0)
    found = commit.of_run(tmp_path)
    assert [row.goal for row in found if row.goal is not None] == [commit.GOAL_SHARE]
    monkeypatch.undo()
    assert not any(row.goal for row in commit.of_run(tmp_path))
    assert "not judged" in capsys.readouterr().out
    rows = [row.ours for row in found]
    wall_clock = 40.4 - 10.0  # from the first lease
    own = [0.1, 0.2, 0.1]
    assert rows == pytest.approx(
        [100 * 4 / wall_clock, 0, 4000, 100 * sum(own) / wall_clock, 1e3 * 0.1, 1e3 * 0.2, 2500], abs=1e-6
    )


def test_a_folder_that_is_not_a_run_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/bench/commit.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path} is not a run: it has no journal.1.hpcj\n")
