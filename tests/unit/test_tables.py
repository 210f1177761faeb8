"""The summary of a run: paired by task, with an interval that can be checked by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_run import NUM_EVAL_TASKS, later_eval, started, write_later, write_run
from msgspec import structs
from rich.console import Console

import hpc_es.store
from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.summary import Summary, render, summary
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter, read_journal
from hpc_es.store.read import Run
from hpc_es.store.records import AnyRecord, Planned, Reported, Voided

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


def read(root: Path) -> Run:
    rebuild(root)
    return hpc_es.store.read(root)


def rewrite(root: Path, records: list[AnyRecord]) -> None:
    """A journal with these records instead; the first, Started, is written by the journal itself."""
    RunPaths(root).segment(1).unlink(), RunPaths(root).hdf5.unlink(missing_ok=True)
    writer = JournalWriter.create(RunPaths(root), started)
    for record in records[1:]:
        writer.append(record)
    writer.close()


def eval_rewards(records: list[AnyRecord], version: int) -> dict[int, float]:
    return {
        episode.task: episode.reward
        for record in records
        if isinstance(record, Reported)
        and record.result.eval_id.purpose == "eval"
        and record.result.eval_id.version == version
        for episode in record.result.episodes
    }


def test_fitness_and_difference_follow_from_the_journal(root: Path) -> None:
    records = list(read_journal(root))
    before, after = eval_rewards(records, 0), eval_rewards(records, 4)
    found = summary(read(root))
    assert found.base is not None
    assert found.final is not None
    assert found.difference is not None
    assert found.base.fitness == pytest.approx(np.mean(list(before.values())))
    assert (found.final.version, found.final.fitness) == (4, pytest.approx(np.mean(list(after.values()))))
    assert found.difference.num_tasks == NUM_EVAL_TASKS
    assert found.difference.mean == pytest.approx(np.mean([after[task] - before[task] for task in before]))
    assert found.difference.low < found.difference.mean < found.difference.high
    assert (found.num_commits, found.num_voids, found.num_workers, found.finished) == (4, 1, 2, True)


def test_the_pairing_is_by_task_and_not_by_place(root: Path) -> None:
    """The batches of the final evaluation come in another order, their episodes reversed: nothing changes."""
    expected = summary(read(root))
    records = list(read_journal(root))
    for number, record in enumerate(records):
        if (
            isinstance(record, Reported)
            and record.result.eval_id.purpose == "eval"
            and record.result.eval_id.version == 4
        ):
            result = record.result
            changed = structs.replace(result, episodes=tuple(reversed(result.episodes)))
            records[number] = structs.replace(record, result=changed)
    rewrite(root, records)
    found = summary(read(root))
    assert found.difference is not None
    assert found.difference == expected.difference


def test_a_voided_evaluation_is_not_compared(root: Path) -> None:
    """Its replacement counts instead, although the episodes of both are in the file."""
    records = list(read_journal(root))
    place = next(
        number
        for number, record in enumerate(records)
        if isinstance(record, Reported) and record.result.eval_id == EvalId(4, 0, 0, "eval")
    )
    report = records[place]
    assert isinstance(report, Reported)
    plan = next(
        record
        for record in records
        if isinstance(record, Planned) and record.assignments[0].eval_id == EvalId(4, 0, 0, "eval")
    )
    again = structs.replace(plan.assignments[0], eval_id=EvalId(4, 0, 1, "eval"))
    episodes = tuple(structs.replace(episode, reward=9.0) for episode in report.result.episodes)
    result = structs.replace(report.result, eval_id=again.eval_id, episodes=episodes)
    time = report.time
    records[place + 1 : place + 1] = [
        Voided(time, EvalId(4, 0, 0, "eval"), "wrong digest"),
        Planned(time, 4, (again,)),
        Reported(time, "w0", result, time, time, 1),
    ]
    rewrite(root, records)
    run = read(root)
    rewards = held_out.by_task(held_out.episodes(run, 4))["reward"]
    assert len(rewards) == NUM_EVAL_TASKS
    assert (rewards == 9.0).sum() == len(episodes)
    assert list(run.evals["num_tasks"]) == [NUM_EVAL_TASKS] * 2
    assert run.evals["reward_mean"].iloc[-1] == pytest.approx(rewards.mean())
    useful = run.evaluations[run.evaluations["status"] == "accepted"]
    assert run.workers["num_accepted"].sum() == len(useful)


def test_rates_and_shares_add_up(root: Path) -> None:
    records = list(read_journal(root))
    found = summary(read(root))
    assert found.wall_clock_s == records[-1].time - records[0].time
    results = [record.result for record in records if isinstance(record, Reported)]
    tokens = sum(episode.tokens_in + episode.tokens_out for result in results for episode in result.episodes)
    assert found.tokens_per_second == pytest.approx(tokens / found.wall_clock_s)
    busy = sum(result.seconds_update + result.seconds_perturb + result.seconds_rollout for result in results)
    assert found.busy_share == pytest.approx(busy / 36.0)
    assert found.useful_share == pytest.approx((busy - 0.13) / 36.0)  # all but the void one


def test_time_without_a_head_is_not_counted(root: Path) -> None:
    one = summary(read(root)).wall_clock_s
    JournalWriter.create(RunPaths(root), lambda g, n: structs.replace(started(g, n), time=90_000.0)).close()
    assert summary(read(root)).wall_clock_s == one


def test_later_evaluations_do_not_enter(root: Path) -> None:
    expected = summary(read(root))
    write_later(root, "later", later_eval(4, 123.0))
    assert summary(read(root)) == expected


def test_a_run_that_has_just_begun_has_a_summary(tmp_path: Path) -> None:
    JournalWriter.create(RunPaths(tmp_path), started).close()
    found = summary(read(tmp_path))
    assert (found.base, found.final, found.difference, found.busy_share) == (None, None, None, None)
    assert "not evaluated" in text(found)


def test_the_table_shows_the_numbers_and_json_takes_them(root: Path) -> None:
    found = summary(read(root))
    assert found.base is not None
    assert found.difference is not None
    shown = text(found)
    for expected in (f"{found.base.fitness:.4f}", f"{found.difference.low:+.4f}", "useful share", "tokens per second"):
        assert expected in shown
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["difference"]["num_tasks"] == NUM_EVAL_TASKS
    assert "not finished" in text(replace(found, finished=False))


def text(found: Summary) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()
