"""Intervals and p-values: published values, coverage on made-up tasks, and repeats that are no further tasks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_es.analysis.statistics.intervals import (
    NUM_RESAMPLES,
    bootstrap_mean,
    by_task,
    paired,
    paired_runs,
    pigeonhole_interval,
    sign_flip_p_value,
    wilson,
)
from hpc_es.errors import ConfigError

REWARDS = st.integers(2, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=n, max_size=n)
)
"""[tasks, 3 repeats]."""


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 1 - 0.1170, 1.0),
    ],
)
def test_wilsons_interval_has_its_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == (pytest.approx(low, abs=5.1e-5), pytest.approx(high, abs=5.1e-5))


@given(st.integers(1, 300), st.data())
def test_wilsons_interval_holds_the_rate_mirrors_and_widens_with_confidence(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert wilson(trials - successes, trials) == (pytest.approx(1 - high), pytest.approx(1 - low, abs=1e-12))
    wider = wilson(successes, trials, 0.99)
    assert wider.low <= low < high <= wider.high


def test_wilsons_interval_covers_the_true_rate_at_128_tasks() -> None:
    for rate in (0.05, 0.5, 0.73):
        solved = np.random.default_rng(0).binomial(128, rate, 2000)
        covered = [low <= rate <= high for low, high in (wilson(int(count), 128) for count in solved)]
        assert np.mean(covered) == pytest.approx(0.95, abs=0.025)


def test_the_bootstrap_covers_the_true_mean() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for trial in range(400):
        low, high = bootstrap_mean(rng.beta(2, 3, 64), seed=trial, resamples=500)
        covered.append(low <= 0.4 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)


def test_repeats_do_not_count_as_further_tasks() -> None:
    """Repeats that always agree change nothing; treated as tasks they would halve the interval."""
    tasks = np.random.default_rng(1).uniform(size=40)
    together = np.repeat(tasks[:, None], 4, axis=1)
    assert bootstrap_mean(together) == bootstrap_mean(tasks)
    low, high = bootstrap_mean(tasks)
    split_low, split_high = bootstrap_mean(together.ravel())
    assert split_high - split_low == pytest.approx((high - low) / 2, rel=0.1)


def test_the_interval_is_that_of_the_normal_approximation_for_many_tasks() -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, 400)
    low, high = bootstrap_mean(values)
    error = values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert bootstrap_mean(values) == (low, high)
    assert bootstrap_mean(values, seed=1) != (low, high)
    narrow = bootstrap_mean(values, confidence=0.5)
    assert narrow.high - narrow.low == pytest.approx(2 * 0.674 * error, rel=0.1)
    assert bootstrap_mean(np.full(7, 0.25)) == (0.25, 0.25)
    assert NUM_RESAMPLES == 10_000


@given(REWARDS)
@settings(max_examples=25, deadline=None)
def test_a_bootstrap_interval_stays_among_the_tasks_and_ignores_the_order_of_repeats(rewards: list[list[int]]) -> None:
    low, high = bootstrap_mean(rewards, resamples=200)
    means = by_task(rewards)
    assert means.min() - 1e-12 <= low <= high <= means.max() + 1e-12
    assert bootstrap_mean([row[::-1] for row in rewards], resamples=200) == (pytest.approx(low), pytest.approx(high))


# --- differences -------------------------------------------------------------------------------------------------


def test_a_paired_difference_averages_repeats_within_their_task() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.uniform(size=(30, 4)) + 0.2, rng.uniform(size=(30, 8))
    found = paired(a, b)
    assert found == paired(a.mean(axis=1), b.mean(axis=1))
    assert (found.num_tasks, found.num_seeds) == (30, 1)
    assert found.difference == pytest.approx(a.mean() - b.mean())
    assert (found.mean_a, found.mean_b) == (pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert found.low < found.difference < found.high
    assert found.verdict == "A better"
    other = paired(b, a)
    assert (other.p_value, other.verdict) == (found.p_value, "B better")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=14))
@settings(deadline=None, max_examples=50)
def test_of_one_yes_or_no_per_task_the_p_value_is_that_of_mcnemars_exact_test(
    outcomes: list[tuple[bool, bool]],
) -> None:
    a, b = np.array(outcomes).T
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    discordant = only_a + only_b
    tail = sum(math.comb(discordant, count) for count in range(min(only_a, only_b) + 1)) / 2**discordant
    assert paired(a, b).p_value == pytest.approx(min(1.0, 2 * tail))


def test_the_number_of_tasks_that_is_named_shows_the_difference_four_times_in_five() -> None:
    rng = np.random.default_rng(0)
    pilot = np.tile([0.6, -0.4], 500)  # mean 0.1, standard deviation 0.5
    needed = paired(pilot, np.zeros(1000)).tasks_needed
    assert needed is not None
    samples = rng.normal(0.1, 0.5, (4000, needed))
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / np.sqrt(needed))
    assert (abs(t) > 1.96).mean() == pytest.approx(0.8, abs=0.03)


def test_a_difference_of_rounding_is_not_priced_in_trillions() -> None:
    noise = np.array([1.0, -1.0 + 1e-15] * 10)
    verdict = paired(noise, np.zeros(20)).verdict
    assert verdict.startswith("no difference shown; it would take more than a million tasks")


def test_the_p_value_is_that_of_all_flips_of_signs() -> None:
    assert sign_flip_p_value([1, 2, 3]) == 2 / 8
    assert sign_flip_p_value([1, 2, 3, 0, 0]) == 2 / 8
    assert sign_flip_p_value([-1, -2, -3, -4, -5]) == 2 / 32
    assert sign_flip_p_value([1, -1]) == 1
    assert sign_flip_p_value(np.zeros(5)) == 1.0
    assert sign_flip_p_value([1.0] * 20) < 1e-3
    many = np.r_[np.ones(12), -np.ones(8)]
    exact = 2 * sum(math.comb(20, n) for n in range(12, 21)) / 2**20
    assert sign_flip_p_value(many) == pytest.approx(exact, abs=0.02)


def test_under_no_difference_one_comparison_in_twenty_is_significant() -> None:
    rng = np.random.default_rng(1)
    values = [sign_flip_p_value(rng.normal(0, 1, 11)) for _ in range(400)]
    assert np.mean(np.array(values) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_seeds_that_disagree_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    tasks = rng.normal(0.1, 0.1, 50)
    agreeing = np.stack([tasks, tasks, tasks, tasks])
    disagreeing = agreeing + np.array([[-0.3], [-0.1], [0.1], [0.3]])
    narrow, wide = pigeonhole_interval(agreeing), pigeonhole_interval(disagreeing)
    assert narrow[0] > 0
    assert wide[0] < 0 < wide[1]
    found = paired_runs([(row, np.zeros(50)) for row in disagreeing])
    assert found.p_value < 0.05
    assert found.verdict.startswith("no difference shown")
    assert found.by_seed == pytest.approx((tasks.mean() + np.array([-0.3, -0.1, 0.1, 0.3])).tolist())


def test_mistakes_are_named() -> None:
    for successes, trials in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"{successes} successes of {trials} trials are not a rate"):
            wilson(successes, trials)
    with pytest.raises(ConfigError, match=r"a confidence of 95 must lie between 0 and 1, e\.g\. 0\.95"):
        wilson(1, 2, 95)
    for values in ([], [[]], [[[1.0]]]):
        with pytest.raises(ConfigError, match=r"must be \[tasks\] or \[tasks, repeats\]"):
            bootstrap_mean(values)
    with pytest.raises(ConfigError, match="the same tasks on all sides, and at least 2: there are 3, 2"):
        paired([1, 2, 3], [1, 2])
    with pytest.raises(ConfigError, match="at least 2: there are 1, 1"):
        paired([1], [2])
