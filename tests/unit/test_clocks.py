"""Clocks that are set back or forward: what a run says of seconds rests on the order of its records and on its heads'
monotonic clocks."""

import itertools
import time
from pathlib import Path

import pytest
from fake_run import CONFIG, fake_records, started
from hdf5_tables import assert_same, from_journal, tables
from msgspec.structs import replace

import hpc_es.store
from hpc_es.analysis.statistics.progress import head_spans, progress
from hpc_es.analysis.statistics.summary import render, summary
from hpc_es.analysis.statistics.timeline import spans, worker_shares
from hpc_es.analysis.statistics.waiting import members
from hpc_es.paths import RunPaths
from hpc_es.store.clock import Clock
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter
from hpc_es.store.projection import Projection
from hpc_es.store.read import Run
from hpc_es.store.records import AnyRecord, Joined, Noted, Reported, Started

YEAR = 365 * 86400.0

pytestmark = pytest.mark.filterwarnings("error")


def run_of_two_heads(root: Path, set_by: float) -> Run:
    """The made-up run, whose head died half-way; the clock of the next one, two seconds later, is off by so much."""
    records = list(fake_records())
    half = next(number for number, record in enumerate(records) if record.time > records[-1].time - 12)
    last = records[half - 1].time
    root.mkdir()
    write_segment(root, replace(started(1, 0), time=records[0].time - 1.0), records[:half])
    back = [Joined(last + 0.5, f"w{number}", f"seat{number}", "node", 10 + number, {}) for number in (0, 1)]
    second = [moved(record, 2 + set_by) for record in [*back, *(moved(record, 1.0) for record in records[half:])]]
    write_segment(root, replace(started(2, 0), time=last + 2 + set_by), second)
    rebuild(root)
    return hpc_es.store.read(root)


def write_segment(root: Path, first: Started, records: list[AnyRecord]) -> None:
    writer = JournalWriter.create(
        RunPaths(root), lambda generation, sealed: replace(first, generation=generation, predecessor_bytes=sealed)
    )
    for record in records:
        writer.append(record)
    writer.close()


def moved(record: AnyRecord, seconds: float) -> AnyRecord:
    if isinstance(record, Reported):
        record = replace(record, started=record.started + seconds, finished=record.finished + seconds)
    return replace(record, time=record.time + seconds)


@pytest.fixture
def right(tmp_path: Path) -> Run:
    return run_of_two_heads(tmp_path / "right", 0.0)


@pytest.mark.parametrize("set_by", [-2.0, -3600.0, -YEAR, YEAR], ids=["equal times", "an hour", "a year", "forward"])
def test_a_clock_that_was_set_between_two_heads_changes_no_span_and_no_rate(
    right: Run, tmp_path: Path, set_by: float
) -> None:
    run = run_of_two_heads(tmp_path / "set", set_by)
    (first, second), expected = head_spans(run), head_spans(right)
    assert first[0] < first[1] < second[0] < second[1]
    assert [end - start for start, end in (first, second)] == pytest.approx([end - start for start, end in expected])
    found, wanted = summary(run), summary(right)
    assert found.wall_clock_s == pytest.approx(wanted.wall_clock_s)
    assert found.tokens_per_second == pytest.approx(wanted.tokens_per_second)
    assert found.busy_share is not None
    render(found)
    for column in ("evaluations", "tokens", "worker_seconds", "wall_clock_s"):
        assert list(progress(run)[column]) == pytest.approx(list(progress(right)[column])), column
    assert_same(tables(run), from_journal(tmp_path / "set"))


@pytest.mark.parametrize("set_by", [-3600.0, -YEAR], ids=["an hour", "a year"])
def test_nothing_takes_less_than_no_time_when_the_clock_was_set_back(tmp_path: Path, set_by: float) -> None:
    run = run_of_two_heads(tmp_path / "run", set_by)
    for table in ("evaluations", "events"):
        times = getattr(run, table)["time_planned" if table == "evaluations" else "time"]
        assert times.is_monotonic_increasing
    waits = members(run)[["unleased", "flight", "queue"]]
    assert (waits.isna() | (waits >= 0)).all(axis=None)
    shown = spans(run)
    assert (shown["start"] >= 0).all()
    assert (shown["end"] >= shown["start"]).all()
    (warning,) = run.events[run.events["level"] == "warning"]["detail"].loc[lambda rows: rows.str.contains("unknown")]
    assert f"by {-set_by - 2:.3f} s or more" in warning


def test_a_worker_that_was_there_before_and_after_did_not_wait_a_year(right: Run, tmp_path: Path) -> None:
    """The tables count at most the time that a worker may wait for its head."""
    run = run_of_two_heads(tmp_path / "set", YEAR)
    more = run.workers["seconds_connected"] - right.workers["seconds_connected"]
    assert ((more > 0) & (more < 4300)).all()
    shares = worker_shares(run)
    assert (shares["busy"] > 0.9 * worker_shares(right)["busy"] / 200).all()


def test_a_clock_that_is_set_while_a_head_runs_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = Clock(), time.time
    before = clock()
    for jump in (-YEAR, YEAR, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
        assert 0 <= clock() - before < 60


def test_every_writer_of_a_journal_uses_that_clock() -> None:
    """No record has a wall-clock time; checked in the source."""
    package = Path(hpc_es.__file__).parent
    for folder in ("head", "launch", "store", "worker"):
        for path in (package / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                assert not ("journal." in line and "time.time()" in line), f"{path}: {line}"
    assert "time.time" not in (package / "head" / "loop.py").read_text()


def test_a_time_that_runs_backwards_within_a_head_is_moved_too() -> None:
    """A journal like that of an evaluation of the first release, with wall-clock times."""
    projection = Projection()
    for record in [started(1, 0), Noted(2000.0, "info", "a"), Noted(1500.0, "info", "b"), Noted(1501.0, "info", "c")]:
        projection.add(record)
    rows = [tuple(row) for row in projection.take().rows["events"].values()]
    assert [row[0] for row in rows if row[2] in "abc"] == [2000.0, 2000.0, 2001.0]


def test_times_that_are_in_order_are_left_as_they_are(right: Run) -> None:
    records = [replace(started(1, 0), config_json=CONFIG), *fake_records()]
    projection = Projection()
    for record in records:
        projection.add(record)
    times = [next(iter(row)) for row in projection.take().rows["events"].values()]
    assert set(times) <= {record.time for record in records}
    assert all(later >= earlier for earlier, later in itertools.pairwise(times))
    assert "the clock was set back" not in set(right.events["what"])
