"""Two-phase commits: a closed cohort is trained exactly once in effect, never lost and never twice.

The head's core with the toy method of toy.py, on every schedule of staleness, with heads, workers and trainers that end
at any moment. What real processes do is in test_trainer.py.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from theatre import Stage, make_config

from hpc_es import methods
from hpc_es.errors import ConfigError, StoreError
from hpc_es.head.events import Received
from hpc_es.head.ledger import Ledger
from hpc_es.records import Weights
from hpc_es.staleness import Composed
from hpc_es.store import records as journal
from hpc_es.store.projection import Projection

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "natural": {"mode": "natural", "max_lag": 2, "overdue": "discard"},
    "natural-hold": {"mode": "natural", "max_lag": 1, "overdue": "hold"},
    "controlled": {"mode": "controlled", "lag": 2, "share": 0.5},
    "tail": {"mode": "tail", "counts": {0: 2, 1: 1, 3: 1}},
}


def toy_stage(schedule: str, num_workers: int = 3) -> Stage:
    config = make_config(run={"num_updates": 6}, staleness=SCHEDULES[schedule])
    stage = Stage(config.model_copy(update={"method": "toy:Toy"}))
    for seat in range(num_workers):
        stage.add_worker(f"seat-{seat}")
    return stage


def records_of(stage: Stage, kind: type[Any]) -> list[Any]:
    return [record for record in stage.records if isinstance(record, kind)]


def check(stage: Stage) -> None:
    commits, closed = stage.commits(), records_of(stage, journal.Closed)
    assert stage.exit is not None
    assert stage.exit.finished
    assert [commit.version for commit in commits] == list(range(1, 7))
    assert [record.update for record in closed] == list(range(1, 7)), "a cohort is closed once"
    for commit, record in zip(commits, closed, strict=True):
        assert tuple(each.eval_id for each in commit.consumed) == record.evaluations
        assert isinstance(commit.body, Weights)
        assert commit.body.metrics
    cohorts = {record.update: record.evaluations for record in closed}
    assert all(cohorts[version] == cohort for version, cohort in stage.trained), "only what was closed is trained"
    times = Counter(each.eval_id for commit in commits for each in commit.consumed)
    assert max(times.values()) == 1
    schedule = stage.core.method.schedule()
    for commit in commits:
        assert max(commit.lags) <= schedule.max_lag
        if isinstance(schedule, Composed):
            assert Counter(commit.lags) == schedule.composition(commit.version)
    refolded, projection = Ledger(), Projection()
    for record in stage.records:
        refolded.apply(record)
        projection.add(record)
    assert refolded == stage.core.ledger
    assert not refolded.closed
    rows = projection.take().rows["contexts"]
    assert len(rows) == len(records_of(stage, journal.Proposed)) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_cohort_is_closed_trained_and_committed_in_order(schedule: str) -> None:
    stage = toy_stage(schedule)
    stage.run(20_000)
    check(stage)
    assert [version for version, _ in stage.trained] == list(range(1, 7)), "undisturbed, each is trained once"


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_killed_a_closed_cohort_is_trained_once_in_effect(schedule: str, data: st.DataObject) -> None:
    stage = toy_stage(schedule)
    for _ in range(data.draw(st.integers(0, 150), label="moves")):
        if stage.exit is not None:
            break
        faults = ["restart", "kill trainer", *(f"kill {w.name}" for w in stage.workers.values() if not w.gone)]
        what = data.draw(st.sampled_from([*(move for move in stage.moves() for _ in range(8)), *faults]), label="next")
        if what == "restart":
            if stage.to_head and data.draw(st.booleans(), label="before the fsync"):
                stage.core.handle(Received(stage.to_head.popleft()), stage.now)  # its records never reach the disk
            stage.start_head()
        elif what == "kill trainer":
            stage.failing_trainers = int(stage.core._failed_trainings + stage.failing_trainers < 2)
        elif what.startswith("kill "):
            killed = stage.workers[what.removeprefix("kill ")]
            stage.kill_worker(killed.name)
            stage.add_worker(killed.seat)
        else:
            stage.move(what)
    if all(worker.gone for worker in stage.workers.values()):
        stage.add_worker("seat-0")
    stage.run(20_000)
    check(stage)


def test_a_head_that_starts_between_closing_and_commit_trains_the_same_cohort_again() -> None:
    stage = toy_stage("sync")
    while not records_of(stage, journal.Closed):
        stage.move(stage.moves()[0])
    (closed,) = records_of(stage, journal.Closed)
    stage.start_head()
    assert stage.core.ledger.closed == closed.evaluations
    stage.run(20_000)
    assert stage.trained[0] == (1, closed.evaluations)
    check(stage)


def test_a_trainer_that_always_fails_ends_the_run_with_the_cause() -> None:
    stage = toy_stage("sync")
    stage.failing_trainers = 10**6
    found = stage.run(20_000)
    assert found.failed
    assert "training of theta_1 failed 3 times in a row; the last error: the trainer was killed" in found.reason
    assert not stage.commits()


def test_candidates_see_contexts_of_the_pool_and_a_context_names_its_parents() -> None:
    stage = toy_stage("sync")
    stage.run(20_000)
    proposed = {record.context.id: record.context for record in records_of(stage, journal.Proposed)}
    seen = {a.candidate.context for record in records_of(stage, journal.Planned) for a in record.assignments} - {""}
    assert seen
    assert seen <= proposed.keys()
    assert {parent for context in proposed.values() for parent in context.parents} <= proposed.keys()
    assert len(stage.core.ledger.pool) == 2


def test_records_that_contradict_a_closed_cohort_are_refused() -> None:
    stage = toy_stage("sync")
    while not records_of(stage, journal.Closed):
        stage.move(stage.moves()[0])
    (closed,) = records_of(stage, journal.Closed)
    with pytest.raises(StoreError, match="closed for update 1, but the run is at version 0"):
        stage.core.ledger.apply(closed)
    commit = stage.core.cohort.commit()
    wrong = type(commit)(1, commit.consumed[::-1], Weights(1, 1.0))
    with pytest.raises(StoreError, match="consumes other evaluations than were closed for it"):
        stage.core.ledger.apply(journal.Committed(0.0, wrong))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("toy:Toy", {"optimiser": {"kind": "adam"}}, "es.optimiser.kind=adam applies to updates by seeds only"),
        ("toy:Lazy", {}, "has trains=True, but does not define train"),
        ("toy:nudge", {}, "is not a subclass"),
        ("toy:Nothing", {}, "cannot be imported"),
        ("se", {}, "method='se' is unknown; built in: es"),
    ],
)
def test_a_method_that_cannot_work_is_refused_before_anything_starts(
    method: str, changes: dict[str, Any], message: str
) -> None:
    config = make_config(es=changes).model_copy(update={"method": method})
    with pytest.raises(ConfigError, match=message):
        methods.make(config)
