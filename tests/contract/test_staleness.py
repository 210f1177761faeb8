"""Schedules as pure functions: what is dispatched when, and what may enter a cohort."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.staleness import Composed, Controlled, Natural, Staircase, Sync, Tail, Verdict, lag

DEFAULT_STEPS = ((1, 0), (33, 32), (65, 64), (129, 128))


@st.composite
def composed(draw: st.DrawFn) -> Composed:
    size, num_updates = draw(st.integers(2, 8)), draw(st.integers(1, 40))
    match draw(st.sampled_from(["sync", "controlled", "tail", "staircase"])):
        case "controlled":
            return Controlled(size, num_updates, draw(st.integers(1, 9)), draw(st.floats(0.05, 1)))
        case "tail":
            counts = Counter(draw(st.lists(st.integers(0, 12), min_size=size, max_size=size)))
            return Tail(size, num_updates, counts)
        case "staircase":
            begins = sorted(draw(st.sets(st.integers(2, 40), max_size=3)))
            steps = ((1, 0), *((begin, draw(st.integers(0, begin - 1))) for begin in begins))
            return Staircase(size, num_updates, steps, draw(st.booleans()))
        case _:
            return Sync(size, num_updates)


def planned_for(schedule: Composed) -> dict[int, Counter[int]]:
    """Lags of what is dispatched for each update over a whole run."""
    lags: dict[int, Counter[int]] = {update: Counter() for update in range(1, schedule.num_updates + 1)}
    for version in range(schedule.num_updates):
        for dispatch in schedule.plan(version):
            lags[dispatch.update][lag(version, dispatch.update)] += 1
    return lags


@given(composed())
def test_every_update_is_planned_exactly_the_cohort_that_the_schedule_states(schedule: Composed):
    for update, lags in planned_for(schedule).items():
        assert lags == schedule.composition(update)
        assert lags.total() == schedule.population
        assert max(lags) <= min(schedule.max_lag, update - 1)


@given(composed(), st.integers(0, 50))
def test_slots_are_numbered_and_the_next_update_comes_first(schedule: Composed, version: int):
    plan = schedule.plan(version)
    assert [dispatch.slot for dispatch in plan] == list(range(len(plan)))
    assert [dispatch.update for dispatch in plan] == sorted(dispatch.update for dispatch in plan)
    assert all(version < dispatch.update <= schedule.num_updates for dispatch in plan)


def test_a_result_waits_for_the_update_that_it_is_meant_for():
    schedule = Controlled(4, 20, lag=3, share=0.5)
    verdicts = [schedule.judge(version=2, meant_for=6, update=update) for update in (5, 6, 7)]
    assert verdicts == [Verdict.early, Verdict.accept, Verdict.stale]


@pytest.mark.parametrize(
    ("size", "share", "stale"), [(16, 0.1875, 3), (30, 0.1, 3), (16, 0.5, 8), (30, 0.5, 15), (16, 1.0, 16), (5, 0.5, 3)]
)
def test_a_share_of_a_cohort_is_rounded_half_up(size: int, share: float, stale: int):
    assert Controlled(size, 200, lag=4, share=share).composition(10).get(4) == stale


def test_a_lag_class_is_used_as_soon_as_that_old_a_version_exists():
    schedule = Tail(16, 200, {0: 8, 1: 2, 2: 1, 4: 1, 8: 1, 32: 1, 64: 1, 128: 1})
    assert schedule.composition(1) == {0: 16}
    assert schedule.composition(2) == {0: 14, 1: 2}
    assert schedule.composition(9) == {0: 11, 1: 2, 2: 1, 4: 1, 8: 1}
    assert schedule.composition(129) == {0: 8, 1: 2, 2: 1, 4: 1, 8: 1, 32: 1, 64: 1, 128: 1}


def test_each_step_of_the_staircase_consumes_a_cohort_measured_around_theta_0():
    schedule = Staircase(16, 200, DEFAULT_STEPS)
    assert [schedule.composition(update) for update in (32, 33, 64, 65, 128, 129, 200)] == [
        {0: 16},
        {32: 16},
        {32: 16},
        {64: 16},
        {64: 16},
        {128: 16},
        {128: 16},
    ]
    assert [dispatch.update for dispatch in schedule.plan(0)] == [1] * 16 + [33] * 16 + [65] * 16 + [129] * 16


def test_an_isolated_staircase_has_fresh_cohorts_between_its_stale_ones():
    schedule = Staircase(16, 200, DEFAULT_STEPS, isolated=True)
    stale = [update for update in range(1, 201) if schedule.composition(update) != {0: 16}]
    assert stale == [33, 65, 129]


def test_natural_accepts_results_within_the_bound_only():
    schedule = Natural(4, 20, max_lag=2)
    verdicts = [schedule.judge(version=v, meant_for=v + 1, update=8) for v in (7, 6, 5, 4)]
    assert verdicts == [Verdict.accept] * 3 + [Verdict.stale]


def test_natural_keeps_no_more_outstanding_than_later_updates_can_consume():
    schedule = Natural(4, 20, max_lag=2)
    assert schedule.room(10, {}) == 12
    assert schedule.room(10, {8: 2, 9: 3, 10: 4}) == 3
    assert schedule.room(10, {7: 5, 10: 4}) == 8  # what is doomed takes no room
    assert schedule.room(18, {}) == 8  # two updates are left
    assert schedule.room(20, {}) == 0


def test_hold_waits_for_a_live_evaluation_that_would_be_beyond_the_bound_after_this_update():
    hold, discard = (Natural(2, 20, max_lag=1, hold=hold) for hold in (True, False))
    assert not hold.may_commit(6, waiting={5: 2}, live={4: 1})
    assert discard.may_commit(6, waiting={5: 2}, live={4: 1})
    assert hold.may_commit(6, waiting={5: 2}, live={5: 1})
    assert hold.may_commit(6, waiting={4: 1, 5: 2}, live={5: 1})  # the old one goes first


def test_hold_keeps_room_for_all_that_must_be_consumed_by_the_same_update():
    schedule = Natural(1, 20, max_lag=2, hold=True)
    assert not schedule.may_commit(2, waiting={1: 1}, live={0: 2})  # both would have to enter update 3
    assert schedule.may_commit(2, waiting={0: 1, 1: 1}, live={0: 1})


@given(st.data())
def test_under_hold_whatever_is_dispatched_within_the_room_can_be_consumed_in_time(data: st.DataObject):
    """Any order of arrival: the oldest go first, and no result is ever beyond the bound."""
    schedule = Natural(data.draw(st.integers(1, 4)), 30, data.draw(st.integers(0, 3)), hold=True)
    version, live, waiting = 0, Counter[int](), Counter[int]()
    for _ in range(60):
        if schedule.may_commit(version + 1, waiting, live):
            for _ in range(schedule.population):
                oldest = min(waiting)
                assert lag(oldest, version + 1) <= schedule.max_lag
                waiting -= Counter([oldest])
            version += 1
        elif (room := schedule.room(version, live + waiting)) and data.draw(st.booleans()):
            live[version] += data.draw(st.integers(1, room))
        elif live:
            arrived = data.draw(st.sampled_from(sorted(live)))
            live -= Counter([arrived])
            waiting[arrived] += 1
        else:
            live[version] += room  # nothing else can happen, so there is room
            assert room
    assert version > 0 or schedule.population > 2
