"""The head under every schedule, on the stage of theatre.py: any history of arrivals, losses and restarts."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from theatre import BASE_DIGEST, Stage, make_config

from hpc_es import methods
from hpc_es.head.events import Received
from hpc_es.head.ledger import Ledger
from hpc_es.head.status import Anchor, status
from hpc_es.staleness import Composed, lag
from hpc_es.store import records as journal
from hpc_es.transport import messages


def staged(num_workers: int, **changes: object) -> Stage:
    """A stage without evaluations of the centre, unless `eval` says otherwise."""
    stage = Stage(make_config(**{"eval": {"every": 0, "num_tasks": 0}, **changes}))
    for k in range(num_workers):
        stage.add_worker(f"seat-{k}")
    return stage


def records_of(stage: Stage, kind: type) -> list:
    return [record for record in stage.records if isinstance(record, kind)]


def lags_of(stage: Stage) -> list[Counter[int]]:
    return [Counter(commit.lags) for commit in stage.commits()]


def check(stage: Stage) -> None:
    """Check the properties of every run, whatever happened in it."""
    config, schedule = stage.config, methods.make(stage.config).schedule()
    assert stage.exit is not None
    assert stage.exit.finished
    assert [commit.version for commit in stage.commits()] == list(range(1, config.run.num_updates + 1))
    times = Counter(each.eval_id for commit in stage.commits() for each in commit.consumed)
    assert not times or max(times.values()) == 1
    dropped = {r.eval_id for r in stage.records if isinstance(r, journal.Voided | journal.Discarded)}
    assert not dropped & times.keys()
    for update, lags in enumerate(lags_of(stage), start=1):
        assert lags.total() == config.es.population
        assert max(lags) <= schedule.max_lag
        if isinstance(schedule, Composed):
            assert lags == schedule.composition(update)
    for commit in stage.commits():
        ids = [each.eval_id for each in commit.consumed]
        assert ids == sorted(ids)
    refolded = Ledger()
    for record in stage.records:
        refolded.apply(record)
    assert refolded == stage.core.ledger


@st.composite
def settings_of_schedules(draw: st.DrawFn) -> dict[str, object]:
    size = draw(st.integers(2, 5))
    match draw(st.sampled_from(["sync", "natural", "natural", "controlled", "tail", "staircase"])):
        case "natural":
            overdue = draw(st.sampled_from(["discard", "hold"]))
            staleness: dict[str, object] = {"mode": "natural", "max_lag": draw(st.integers(0, 3)), "overdue": overdue}
        case "controlled":
            staleness = {"mode": "controlled", "lag": draw(st.integers(1, 4)), "share": draw(st.floats(0.1, 1))}
        case "tail":
            lags = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
            staleness = {"mode": "tail", "counts": dict(Counter(lags))}
        case "staircase":
            isolated = draw(st.booleans())
            staleness = {"mode": "staircase", "steps": [[1, 0], [3, 2], [5, 4]], "isolated": isolated}
        case _:
            staleness = {"mode": "sync"}
    return {
        "staleness": staleness,
        "run": {"num_updates": draw(st.integers(3, 7))},
        "eval": {"every": 2, "num_tasks": draw(st.integers(0, 5))},
        "es": {"population": size, "baseline": draw(st.sampled_from(["none", "centre"]))},
    }


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_happens_the_bound_holds_and_cohorts_have_their_composition(data: st.DataObject):
    changes = data.draw(settings_of_schedules(), label="settings")
    stage = staged(data.draw(st.integers(1, 5), label="workers"), **changes)
    slow = data.draw(st.sampled_from(["nobody", "seat-0", "seat-1"]), label="slow")
    for _ in range(data.draw(st.integers(0, 200), label="moves")):
        if stage.exit is not None:
            break
        possible = [move for move in stage.moves() for _ in range(1 if f"finish {slow}" in move else 8)]
        faults = ["restart", *(f"kill {w.name}" for w in stage.workers.values() if not w.gone)]
        faults += [f"fail {w.name}" for w in stage.workers.values() if w.current is not None]
        what = data.draw(st.sampled_from([*possible, *faults]), label="next")
        if what == "restart":
            if stage.to_head and data.draw(st.booleans(), label="before the fsync"):
                stage.core.handle(Received(stage.to_head.popleft()), stage.now)  # its records never reach the disk
            stage.start_head()
        elif what.startswith("kill "):
            killed = stage.workers[what.removeprefix("kill ")]
            stage.kill_worker(killed.name)
            stage.add_worker(killed.seat)
        elif what.startswith("fail "):
            stage.workers[what.removeprefix("fail ")].errors += 1
        else:
            stage.move(what)
    for worker in stage.workers.values():
        worker.errors = min(worker.errors, 3)
    if all(worker.gone for worker in stage.workers.values()):
        stage.add_worker("seat-0")
    stage.run(20_000)
    check(stage)
    if changes["staleness"].get("overdue") == "hold":  # type: ignore[attr-defined]
        assert not records_of(stage, journal.Discarded)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_composed_schedule_ends_with_the_same_commits_whatever_the_order_of_arrival(data: st.DataObject):
    changes = data.draw(settings_of_schedules().filter(lambda s: s["staleness"]["mode"] != "natural"))  # type: ignore[index]
    orderly = staged(1, **changes)
    orderly.run(20_000)
    stage = staged(data.draw(st.integers(1, 5)), **changes)
    for _ in range(data.draw(st.integers(0, 200))):
        if stage.exit is None:
            stage.move(data.draw(st.sampled_from(stage.moves() or ["to_head"]))) if stage.moves() else None
    stage.run(20_000)
    assert stage.commits() == orderly.commits()


NATURAL = {"mode": "natural", "max_lag": 1}


@pytest.mark.parametrize("overdue", ["discard", "hold"])
def test_population_2_and_two_workers_do_not_deadlock(overdue):
    for max_lag in (0, 1, 2):
        staleness = {**NATURAL, "max_lag": max_lag, "overdue": overdue}
        stage = staged(2, staleness=staleness, es={"population": 2}, run={"num_updates": 8})
        stage.run()
        check(stage)


def run_evenly(stage: Stage) -> None:
    """All evaluations take equally long: whoever began first finishes first."""
    begun: list[str] = []
    while stage.exit is None:
        instant = [move for move in stage.moves() if not move.startswith("finish")]
        if instant:
            stage.move(instant[0])
            begun += [w.name for w in stage.workers.values() if w.current is not None and w.name not in begun]
        else:
            stage.move(f"finish {begun.pop(0)}")


@pytest.mark.parametrize(("num_workers", "size"), [(2, 4), (4, 8), (4, 4), (3, 8)])
def test_with_g_workers_at_most_g_minus_1_results_of_a_cohort_are_stale(num_workers, size):
    """The closed form of natural asynchrony, reached in the live head where evaluations take equally long."""
    stage = staged(num_workers, staleness=NATURAL, es={"population": size}, run={"num_updates": 12})
    run_evenly(stage)
    check(stage)
    stale = [lags.total() - lags[0] for lags in lags_of(stage)]
    assert max(stale) == num_workers - 1
    assert not records_of(stage, journal.Discarded)


def slow_worker(stage: Stage, name: str) -> None:
    """Let everything happen except the end of this worker's evaluation."""
    for _ in range(400):
        possible = [move for move in stage.moves() if move != f"finish {name}"]
        if not possible or stage.exit is not None:
            return
        stage.move(possible[0])


def test_a_slow_evaluation_is_discarded_when_it_comes_too_late_and_is_never_counted():
    stage = staged(3, staleness=NATURAL, es={"population": 2}, run={"num_updates": 6})
    slow = stage.busy_worker("slow")
    late = slow.current.eval_id
    slow_worker(stage, slow.name)
    stage.run()
    check(stage)
    assert stage.core.ledger.evaluations[late].state in (
        "leased",
        "discarded",
    )  # it may still be at it when the run ends
    assert all(record.eval_id == late for record in records_of(stage, journal.Discarded))


def test_a_late_result_is_journalled_with_the_lag_that_refused_it():
    stage = staged(2, staleness=NATURAL, es={"population": 2}, run={"num_updates": 40})
    slow = stage.busy_worker("slow")
    late = slow.current.eval_id
    while stage.core.ledger.version < 3:
        stage.move(next(move for move in stage.moves() if move != f"finish {slow.name}"))
    stage.move(f"finish {slow.name}")
    stage.run(20_000)
    check(stage)
    (discarded,) = records_of(stage, journal.Discarded)
    assert discarded.eval_id == late
    assert lag(late.version, discarded.update) == 3
    assert any(r.result.eval_id == late for r in records_of(stage, journal.Reported))


def test_hold_does_not_starve_a_slow_evaluation():
    stage = staged(3, staleness={**NATURAL, "overdue": "hold"}, es={"population": 2}, run={"num_updates": 6})
    slow = stage.busy_worker("slow")
    late = slow.current.eval_id
    slow_worker(stage, slow.name)
    assert stage.core.ledger.version <= late.version + 2  # nobody went past it
    stage.run()
    check(stage)
    assert any(each.eval_id == late for commit in stage.commits() for each in commit.consumed)


def test_hold_continues_when_the_slow_worker_is_lost():
    stage = staged(3, staleness={**NATURAL, "overdue": "hold"}, es={"population": 2}, run={"num_updates": 6})
    slow = stage.busy_worker("slow")
    late = slow.current.eval_id
    slow_worker(stage, slow.name)
    stage.kill_worker(slow.name)
    stage.run()
    check(stage)
    assert stage.core.ledger.evaluations[late].state == "void"


def test_a_hundred_results_dropped_in_a_row_do_not_stop_a_run():
    stage = staged(2, staleness=NATURAL, es={"population": 4}, run={"num_updates": 3, "max_failures_in_a_row": 1000})
    for worker in stage.workers.values():
        worker.errors = 50
    run_evenly(stage)
    check(stage)
    assert len(records_of(stage, journal.Voided)) == 100


def test_natural_makes_a_lost_evaluation_void_and_dispatches_a_new_member_at_the_current_version():
    stage = staged(1, staleness={**NATURAL, "max_lag": 3}, es={"population": 2}, run={"num_updates": 8})
    lost = stage.busy_worker("lost")
    held = lost.current.eval_id
    while stage.core.ledger.version < 2:
        stage.move(next(move for move in stage.moves() if move != f"finish {lost.name}"))
    stage.kill_worker(lost.name)
    stage.to_head.append(messages.Goodbye(lost.name, "killed"))
    stage.run()
    check(stage)
    (void,) = records_of(stage, journal.Voided)
    assert void.eval_id == held
    assert "lost" in void.reason
    planned = [a.eval_id for r in records_of(stage, journal.Planned) for a in r.assignments]
    assert not any(eval_id.replacement for eval_id in planned)


def test_a_natural_evaluation_survives_a_restart_of_the_head_in_the_hands_of_its_worker():
    stage = staged(2, staleness=NATURAL, es={"population": 4}, run={"num_updates": 4})
    held = stage.busy_worker("seat-2").current.eval_id
    stage.start_head()
    stage.move("finish seat-2.2")
    stage.run()
    check(stage)
    assert stage.core.ledger.evaluations[held].state == "accepted"
    assert not records_of(stage, journal.Voided)


def test_a_natural_evaluation_whose_worker_did_not_survive_the_head_is_given_up_in_time():
    stage = staged(2, staleness={**NATURAL, "overdue": "hold"}, es={"population": 4}, run={"num_updates": 4})
    lost = stage.busy_worker("seat-2")
    held = lost.current.eval_id
    stage.kill_worker(lost.name)
    stage.start_head()
    stage.run()
    check(stage)
    assert "did not come back" in next(r.reason for r in records_of(stage, journal.Voided) if r.eval_id == held)


def test_a_new_head_does_not_reassign_an_evaluation_about_to_be_reported():
    stage = staged(1, staleness=NATURAL, es={"population": 4}, run={"num_updates": 4})
    busy = stage.busy_worker("seat-1")
    done = busy.current.eval_id
    stage.finish_evaluation(busy)
    stage.start_head()
    stage.run()
    check(stage)
    assert stage.core.ledger.evaluations[done].state == "accepted"
    assert [r.worker for r in records_of(stage, journal.Leased) if r.eval_id == done] == [busy.name] * 2  # by each head
    assert not records_of(stage, journal.Voided)


def test_a_worker_that_works_on_something_else_is_not_offered_one_member_after_the_other():
    stage = staged(2, staleness=NATURAL, es={"population": 4}, run={"num_updates": 4})
    busy = stage.busy_worker("seat-2")
    stage.to_head.append(messages.Hello(busy.name, busy.seat, "host", 1, BASE_DIGEST, {}))  # as if it held nothing
    slow_worker(stage, busy.name)
    assert [r.reason for r in records_of(stage, journal.Voided)] == [
        "lost: the worker no longer holds it",
        "lost: another is running",
    ]
    stage.run()
    check(stage)


def test_workers_beyond_the_bound_stay_idle():
    stage = staged(9, staleness=NATURAL, es={"population": 2}, run={"num_updates": 5})
    while any(not move.startswith("finish") for move in stage.moves()):
        stage.move(next(move for move in stage.moves() if not move.startswith("finish")))
    assert stage.core.ledger.live.total() == 4
    assert stage.core.crew.num_idle == 5
    shown = status(stage.core, Anchor("stage", 1, 0.0, 0), stage.now)
    assert shown.why_idle == "5 idle: more than 4 evaluations at once would break the bound of lag 1"
    assert shown.cohort_done == 0


def test_a_stale_cohort_is_the_same_members_as_were_planned_at_the_old_version():
    stage = staged(2, staleness={"mode": "controlled", "lag": 2, "share": 1.0}, run={"num_updates": 5})
    stage.run()
    check(stage)
    assert [set(lags) for lags in lags_of(stage)] == [{0}, {0}, {2}, {2}, {2}]


def test_the_centre_on_the_members_batch_is_measured_once_per_version_and_before_its_cohort_commits():
    stage = staged(3, es={"population": 4, "baseline": "centre"}, run={"num_updates": 3})
    stage.run()
    check(stage)
    planned = [a for r in records_of(stage, journal.Planned) for a in r.assignments]
    centres = [a for a in planned if a.purpose == "centre"]
    assert [a.version for a in centres] == [0, 1, 2]
    assert all(a.member is None for a in centres)
    for version in range(3):
        batches = {a.tasks for a in planned if a.version == version and a.purpose != "eval"}
        assert len(batches) == 1
    assert sorted(stage.core.ledger.centres) == [0, 1, 2]


def test_a_run_with_few_members_per_subspace_says_so_once():
    stage = staged(1, es={"population": 8, "subspaces": 4})
    stage.start_head()
    notes = [record.what for record in records_of(stage, journal.Noted)]
    assert sum("CoPES advises at least 10" in note for note in notes) == 1


def test_a_half_of_a_mirrored_pair_that_is_left_alone_stays_valid_and_is_logged():
    stage = staged(1, es={"population": 4, "mirrored": True}, run={"num_updates": 2})
    next(iter(stage.workers.values())).errors = 1
    stage.run()
    check(stage)
    notes = [record.what for record in records_of(stage, journal.Noted)]
    assert [note for note in notes if "without their other half" in note] == [
        "update 1 has 2 members of mirrored pairs without their other half"
    ]
