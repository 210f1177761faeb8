"""The head's decisions, without sockets or weights (see theatre.py)."""

import math
from collections import Counter

import msgspec
import pytest
from builders import counted, es
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from theatre import Stage, make_config

from hpc_es.errors import StoreError
from hpc_es.head.events import GroupFailed, NoWorkersLeft, Received, StopAsked, Tick
from hpc_es.methods.evaluation import plan_evaluation
from hpc_es.store import records as journal
from hpc_es.transport import messages


def undisturbed(num_workers: int = 2, **changes: object) -> Stage:
    stage = Stage(make_config(**changes))
    for k in range(num_workers):
        stage.add_worker(f"seat-{k}")
    stage.run()
    return stage


def records_of(stage: Stage, kind: type) -> list:
    return [record for record in stage.records if isinstance(record, kind)]


def test_a_run_makes_its_updates_and_evaluates_theta_0_and_the_final_theta():
    stage = undisturbed()
    assert [commit.version for commit in stage.commits()] == [1, 2, 3]
    assert sorted(stage.core.ledger.eval_fitness) == [0, 2, 3]
    assert stage.exit is not None
    assert stage.exit.finished


@pytest.mark.parametrize(("most", "answered"), [(100, [1, 2, 3]), (9, [1, 2]), (1, [1])])
def test_an_answer_to_fetch_holds_what_one_message_may(monkeypatch, most, answered):
    stage = undisturbed()
    monkeypatch.setattr("hpc_es.transport.limits.MEMBERS_PER_ANSWER", most)
    core = stage.core
    assert [commit.version for commit in core._commits(0, 10**9)] == answered
    assert core._commits(3, 1) == ()


def test_evaluations_are_repeated_with_seeds_of_their_own_the_same_at_every_version():
    stage = undisturbed(eval={"repeats": 3})
    planned = [a for record in records_of(stage, journal.Planned) for a in record.assignments if a.purpose == "eval"]
    seeds = {}
    for version in (0, 2, 3):
        batches = [a for a in planned if a.version == version]
        assert [a.eval_id.slot for a in batches] == [0, 1, 2, 3, 4, 5]
        assert [a.tasks for a in batches] == 3 * [(0, 1), (2,)]
        seeds[version] = [a.sampling_seed for a in batches]
    assert seeds[0] == seeds[2] == seeds[3]
    assert len(set(seeds[0])) == 6
    once = [a for r in records_of(undisturbed(), journal.Planned) for a in r.assignments if a.purpose == "eval"]
    assert once[0].sampling_seed == seeds[0][0], "the first repeat is what a run without repeats plays"
    assert stage.commits() == undisturbed().commits()


def test_a_repeat_that_fails_is_played_again_with_its_own_seeds():
    (void,) = list(plan_evaluation(make_config(eval={"repeats": 2}), 1, 1, 0))[1:]
    again = es(make_config()).replacement(void)
    assert (str(again.eval_id), again.sampling_seed, again.tasks) == ("0.eval1r1", void.sampling_seed, void.tasks)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 9])
def test_the_number_of_workers_changes_no_commit(num_workers):
    assert undisturbed(num_workers).commits() == undisturbed(2).commits()


def test_every_evaluation_is_counted_once():
    counted = Counter(each.eval_id for commit in undisturbed().commits() for each in commit.consumed)
    assert set(counted.values()) == {1}
    assert len(counted) == 12


def test_members_of_a_commit_are_sorted_and_fresh():
    for commit in undisturbed(5).commits():
        ids = [member.eval_id for member in counted(commit)]
        assert ids == sorted(ids)
        assert {eval_id.version for eval_id in ids} == {commit.version - 1}


def test_a_commit_waits_for_the_digest_of_its_predecessor():
    stage = undisturbed()
    order = [r for r in stage.records if isinstance(r, journal.Committed | journal.Digested)]
    seen = {0}
    for record in order:
        if isinstance(record, journal.Digested):
            seen.add(record.version)
        else:
            assert record.commit.version - 1 in seen


@pytest.mark.parametrize(("num_workers", "last"), [(1, "train"), (2, "train"), (5, "eval")])
def test_evaluations_come_before_the_last_round_of_members_where_there_are_several(num_workers: int, last: str):
    """So no full cohort waits for them to begin. Where one round does, they fill the wait for the slowest member."""
    stage = undisturbed(num_workers)
    kinds = {a.eval_id: a.purpose for record in records_of(stage, journal.Planned) for a in record.assignments}
    first = [kinds[lease.eval_id] for lease in records_of(stage, journal.Leased) if lease.eval_id.version == 0]
    assert Counter(first) == {"train": 4, "eval": 2}
    assert first[-1] == last
    assert first[0] == "train"


def test_no_commit_leaves_a_version_before_all_that_was_planned_there_is_leased():
    stage = undisturbed()
    open_ids: set = set()
    for record in stage.records:
        if isinstance(record, journal.Planned):
            open_ids |= {assignment.eval_id for assignment in record.assignments}
        elif isinstance(record, journal.Leased):
            open_ids.discard(record.eval_id)
        elif isinstance(record, journal.Committed):
            assert not open_ids


def test_a_duplicate_result_is_acknowledged_and_not_counted():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    stage.finish_evaluation(worker)
    report = stage.to_head[0]
    for _ in range(3):
        stage.to_head.append(report)
    stage.run()
    assert len([r for r in records_of(stage, journal.Reported) if r.result.eval_id == report.result.eval_id]) == 1
    assert stage.commits() == undisturbed().commits()


def test_a_silent_worker_loses_its_lease_and_its_late_result_still_counts_once():
    stage = Stage(make_config())
    slow = stage.busy_worker("seat-0")
    assignment = slow.current
    stage.now += 31.0
    stage.add_worker("seat-1")
    slow.current = None
    stage.handle(Tick())
    assert any(r.eval_id == assignment.eval_id for r in records_of(stage, journal.Unleased))
    slow.current = assignment
    stage.finish_evaluation(slow)
    stage.run()
    assert stage.commits() == undisturbed().commits()


def test_an_evaluation_that_fails_is_void_and_replaced_by_a_new_member():
    stage = Stage(make_config())
    stage.add_worker("seat-0").errors = 2
    stage.run()
    void = records_of(stage, journal.Voided)
    assert [str(record.eval_id) for record in void] == ["0.0", "0.0r1"]
    first = counted(stage.commits()[0])[0]
    assert str(first.eval_id) == "0.0r2"
    assert first.seed != counted(undisturbed().commits()[0])[0].seed


def test_a_run_whose_evaluations_only_fail_gives_up_and_says_why():
    stage = Stage(make_config(run={"max_failures_in_a_row": 5}))
    stage.add_worker("seat-0").errors = 10**6
    ended = stage.run()
    assert ended.failed
    assert "5 evaluations failed" in ended.reason
    assert "the environment raised" in ended.reason


def test_a_worker_with_different_bits_is_quarantined_and_its_results_are_void():
    stage = Stage(make_config())
    stage.add_worker("seat-0").wrong_digest = True
    stage.add_worker("seat-1")
    stage.run()
    assert records_of(stage, journal.Voided)
    for record in records_of(stage, journal.Reported):
        if any(record.result.eval_id == m.eval_id for commit in stage.commits() for m in counted(commit)):
            assert record.result.digest == stage.core.ledger.digests[record.result.eval_id.version]
    assert any("quarantined" in note.what for note in records_of(stage, journal.Noted))


def test_nan_fitness_is_a_failed_evaluation():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    stage.finish_evaluation(worker)
    report = stage.to_head.pop()
    worker.unacked.clear()
    stage.to_head.append(
        msgspec.structs.replace(report, result=msgspec.structs.replace(report.result, fitness=math.nan))
    )
    stage.run()
    assert "not a finite number" in records_of(stage, journal.Voided)[0].reason


def test_a_second_worker_in_a_seat_replaces_the_first():
    stage = Stage(make_config())
    first = stage.busy_worker("seat-0")
    stage.add_worker("seat-0")
    stage.run()
    assert first.gone
    assert stage.commits() == undisturbed().commits()


def test_a_worker_that_died_loses_its_lease_at_once_and_the_cause_is_an_event():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    stage.kill_worker(worker.name)
    stage.handle(Received(messages.Goodbye(worker.name, "ended with code 0 in rogue: step 1 of task 7", died=True)))
    stage.add_worker("seat-1")
    stage.run()
    assert stage.commits() == undisturbed().commits()
    (note,) = [note for note in records_of(stage, journal.Noted) if note.level == "error"]
    assert note.what == f"worker {worker.name} died"
    assert "step 1 of task 7" in note.detail


def test_a_run_whose_workers_are_all_gone_for_good_ends_with_the_cause():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    stage.handle(NoWorkersLeft("no worker is left"))
    assert stage.exit is None  # one is there after all
    stage.handle(Received(messages.Goodbye(worker.name, "died", died=True)))
    stage.handle(NoWorkersLeft("no worker is left"))
    assert stage.exit is not None
    assert (stage.exit.failed, stage.exit.reason) == (True, "no worker is left")


def test_a_worker_with_another_base_model_is_refused():
    stage = Stage(make_config())
    hello = messages.Hello("w", "seat", "host", 1, 12345, {})
    stage.to_head.append(hello)
    stage.move("to_head")
    (name, answer) = stage.to_workers[-1]
    assert name == "w"
    assert isinstance(answer, messages.Refused)
    assert "not the same checkpoint" in answer.reason


def test_a_cohort_without_spread_commits_a_null_update():
    config = make_config()
    stage = undisturbed()
    entries = [record for record in records_of(stage, journal.Reported) if record.result.eval_id.version == 0][:4]
    method = es(config)
    cohort = [
        (method.assign(0, r.result.eval_id.slot, 1), msgspec.structs.replace(r.result, fitness=0.5)) for r in entries
    ]
    commit = method.commit(1, cohort)
    assert commit.null
    assert all(member.coefficient == 0 for member in counted(commit))


def test_a_stop_request_checkpoints_and_sends_the_workers_home():
    stage = Stage(make_config(run={"num_updates": 50}))
    worker = stage.add_worker("seat-0")
    while stage.core.ledger.version < 3:
        stage.move(stage.moves()[0])
    stage.handle(StopAsked("SIGTERM"))
    ended = stage.run()
    assert not ended.finished
    assert ended.reason == "SIGTERM"
    assert stage.core.ledger.checkpoint == stage.core.ledger.version
    while stage.to_workers:
        stage.deliver_to_worker()
    assert worker.gone


def test_a_restarted_head_dismisses_no_worker():
    stage = Stage(make_config(run={"num_updates": 50}))
    worker = stage.add_worker("seat-0")
    while stage.core.ledger.version < 3:
        stage.move(stage.moves()[0])
    stage.handle(StopAsked("SIGUSR2", comes_back=True))
    assert not stage.run().finished
    while stage.to_workers:
        stage.deliver_to_worker()
    assert not worker.gone
    stage.exit = None
    stage.start_head()
    assert stage.run().finished


def test_a_draining_worker_gets_no_more_work_and_others_redo_what_it_returns():
    stage = Stage(make_config())
    leaving = stage.busy_worker("seat-0")
    held, leaving.current = leaving.current.eval_id, None
    stage.to_head.append(messages.Draining(leaving.name, "its job is nearly over"))
    stage.to_head.append(messages.HandBack(leaving.name, held, "no time is left for it"))
    stage.add_worker("seat-1")
    stage.run()
    leases = [record for record in records_of(stage, journal.Leased) if record.worker == leaving.name]
    assert [record.eval_id for record in leases] == [held]
    assert stage.commits() == undisturbed().commits()


def test_a_drain_is_remembered_by_the_next_head_and_lasts_until_the_worker_has_left():
    stage = Stage(make_config())
    leaving = stage.busy_worker("seat-0")
    stage.to_head.append(messages.DrainRequest("seat-0"))
    while stage.to_head:
        stage.move("to_head")
    held = leaving.current.eval_id
    stage.start_head()
    stage.add_worker("seat-1")
    stage.run()
    leases = [record.eval_id for record in records_of(stage, journal.Leased) if record.worker == leaving.name]
    assert leases == [held, held]  # by either head
    assert leaving.gone
    assert stage.commits() == undisturbed().commits()
    assert not stage.core.ledger.dismissed


def test_a_worker_drained_on_request_finishes_its_evaluation_and_is_dismissed():
    stage = Stage(make_config())
    leaving = stage.busy_worker("seat-0")
    stage.to_head.append(messages.DrainRequest("seat-0"))
    stage.add_worker("seat-1")
    dismissed = []
    while stage.exit is None:
        dismissed += [
            m.drained for name, m in stage.to_workers if isinstance(m, messages.Leave) and name == leaving.name
        ]
        stage.move(stage.moves()[0])
    assert leaving.gone
    assert all(dismissed)
    assert dismissed
    assert [r.worker for r in records_of(stage, journal.Reported)].count(leaving.name) == 1
    assert stage.commits() == undisturbed().commits()


def test_a_commit_is_broadcast_to_the_epoch_and_announced_inline_to_others():
    stage = Stage(make_config(run={"num_updates": 6}))
    stage.add_worker("seat-0")
    inline, broadcast = 0, 0
    while stage.exit is None:
        if stage.to_workers and isinstance(stage.to_workers[0][1], messages.Announce):
            announce = stage.to_workers[0][1]
            inline += announce.record is not None
            broadcast += announce.record is None
            if announce.version == 4:
                stage.handle(GroupFailed(announce.epoch, "timed out"))
        stage.move(stage.moves()[0])
    assert inline == 2  # the first commit, before there was a group, and the one after the failure
    assert broadcast == 4


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_history_of_kills_and_restarts_ends_with_the_same_commits(data):
    stage = Stage(make_config())
    num_seats = data.draw(st.integers(1, 3), label="seats")
    for k in range(num_seats):
        stage.add_worker(f"seat-{k}")
    for _ in range(data.draw(st.integers(0, 120), label="moves")):
        if stage.exit is not None:
            break
        possible = stage.moves()
        faults = ["kill head", *(f"kill {w.name}" for w in stage.workers.values() if not w.gone)]
        what = data.draw(st.sampled_from([*(possible * 4), *faults]), label="next")
        if what == "kill head":
            if stage.to_head and data.draw(st.booleans(), label="before the fsync"):
                stage.core.handle(Received(stage.to_head.popleft()), stage.now)  # its records never reach the disk
            stage.start_head()
        elif what.startswith("kill "):
            killed = stage.workers[what.removeprefix("kill ")]
            stage.kill_worker(killed.name)
            stage.add_worker(killed.seat)
        else:
            stage.move(what)
    if not any(not w.gone for w in stage.workers.values()):
        stage.add_worker("seat-0")
    stage.run()
    assert stage.commits() == undisturbed().commits()
    assert stage.core.ledger.eval_fitness == undisturbed().core.ledger.eval_fitness


def test_validate_notices_a_count_that_no_longer_fits_the_entries():
    stage = undisturbed()
    stage.core.ledger.validate()
    stage.core.ledger.live[99] += 1
    with pytest.raises(StoreError, match="the ledger's live is"):
        stage.core.ledger.validate()
