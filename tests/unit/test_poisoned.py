"""Journals of the first release with what a broken worker reported: numbers that no column holds, and times that are
none. Such a run can be read, and what is impossible is unknown."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_records, started
from hdf5_tables import assert_same, from_journal, tables
from msgspec.structs import replace

import hpc_es.store
from hpc_es.analysis.statistics.progress import progress
from hpc_es.analysis.statistics.summary import render, summary
from hpc_es.analysis.statistics.timeline import spans
from hpc_es.paths import RunPaths
from hpc_es.records import Result
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter
from hpc_es.store.read import Run
from hpc_es.store.records import AnyRecord, Reported

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of means of 1e308 and infinity

HUGE = 2**63


def run_of(root: Path, records: Sequence[AnyRecord]) -> Run:
    root.mkdir()
    writer = JournalWriter.create(RunPaths(root), started)
    for record in records:
        writer.append(record)
    writer.close()
    rebuild(root)
    run = hpc_es.store.read(root)
    assert_same(tables(run), from_journal(root))
    return run


Fields = dict[str, Any]


def with_result(
    records: Sequence[AnyRecord], number: int, *, of_record: Fields, of_result: Fields, of_episode: Fields
) -> list[AnyRecord]:
    """The records, with some fields of the n-th report, of its result and of its episodes replaced."""
    places = [place for place, record in enumerate(records) if isinstance(record, Reported)]
    record = records[places[number]]
    assert isinstance(record, Reported)
    result: Result = record.result
    episodes = tuple(replace(episode, **of_episode) for episode in result.episodes)
    changed = replace(record, result=replace(result, episodes=episodes, **of_result), **of_record)
    return [*records[: places[number]], changed, *records[places[number] + 1 :]]


@pytest.mark.parametrize("number", [0, 3], ids=["evaluation", "member"])
@pytest.mark.parametrize(
    "poison",
    [
        {"of_episode": {"tokens_in": HUGE, "tokens_out": 2**64 - 1}},
        {"of_episode": {"turns": 2**31, "task": HUGE, "retries": -(2**40), "invalid_actions": HUGE}},
        {"of_result": {"digest": -1}},
        {"of_result": {"seconds_rollout": math.inf, "seconds_update": math.nan, "seconds_perturb": -5.0}},
        {"of_record": {"started": math.nan, "finished": -math.inf}},
        {"of_record": {"started": 1e300, "finished": -1e300}},
        {"of_record": {"attempt": HUGE}},
        {"of_episode": {"reward": 1e308}, "of_result": {"fitness": 1e200}},
        {"of_episode": {"reward": math.inf}},
        {"of_episode": {"seconds_generating": math.nan, "seconds_in_env": math.inf}},
    ],
    ids=str,
)
def test_a_run_can_be_read_whatever_was_reported(tmp_path: Path, poison: dict[str, Fields], number: int) -> None:
    nothing: dict[str, Fields] = {"of_record": {}, "of_result": {}, "of_episode": {}}
    run = run_of(tmp_path / "run", with_result(list(fake_records()), number, **(nothing | poison)))
    found = summary(run)
    render(found)
    assert found.wall_clock_s > 0
    assert found.busy_share is not None
    assert 0 < found.busy_share < 10
    assert progress(run)["worker_seconds"].notna().all()
    shown = spans(run)
    assert (shown["start"].isna() | shown["start"].between(0, 100)).all()
    assert (shown["end"].isna() | shown["end"].between(0, 100)).all()
    assert (run.evaluations["tokens_in"].isna() | (run.evaluations["tokens_in"] >= 0)).all()


def test_values_that_no_column_can_hold_become_unknown_or_the_nearest_number(tmp_path: Path) -> None:
    poison = {"of_record": {}, "of_result": {"digest": -1}, "of_episode": {"tokens_in": HUGE, "turns": -(2**40)}}
    run = run_of(tmp_path / "run", with_result(list(fake_records()), 3, **poison))
    row = run.evaluations[run.evaluations["digest"].isna() & run.evaluations["fitness"].notna()].iloc[0]
    episode = run.episodes[
        (run.episodes["dispatch_version"] == row["dispatch_version"]) & (run.episodes["slot"] == row["slot"])
    ].iloc[0]
    assert episode["tokens_in"] == HUGE - 1
    assert episode["turns"] == -(2**31)
    assert run.evaluations["tokens_in"].isna()[row.name]
