"""Whether another evaluation fits into what is left of a job."""

import time

from hpc_es.worker.budget import MARGIN_S, Budget


def test_without_an_end_everything_fits():
    budget = Budget()
    budget.note(10**9)
    assert budget.fits()
    assert not budget.end_is_near


def test_an_evaluation_fits_while_the_longest_recent_one_and_a_margin_do():
    budget = Budget(time.time() + 100 + MARGIN_S)
    assert budget.fits()
    budget.note(60)
    assert budget.fits()  # 75 of 100 s
    budget.note(90)
    assert not budget.fits()
    assert budget.fits(elapsed_s=50)


def test_slow_evaluations_long_ago_are_forgotten():
    budget = Budget(time.time() + 100 + MARGIN_S)
    budget.note(1000)
    for _ in range(8):
        budget.note(1)
    assert budget.fits()


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch):
    budget = Budget(time.time() + 100 + MARGIN_S)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 95 < budget.remaining_s <= 100


def test_nothing_fits_once_the_end_is_there():
    assert not Budget(time.time() + MARGIN_S - 1).fits()
