"""The statistics of the probes give back what synthetic scores were made of."""

import math

import numpy as np
import pytest

from hpc_es.analysis.statistics import probes
from hpc_es.analysis.statistics.probes import Agreement, agreement, noise_floor, pearson, spearman, verdict

Scores = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
SIGNAL, TASK, SAMPLING, BATCH = 0.04, 0.02, 0.06, 0.5
"""Variances of one score."""


def make_scores(rng: np.random.Generator, members: int, repeats: int) -> tuple[Scores, Scores]:
    """(on one batch, on fresh batches), [members, repeats] each; the first column is the same."""

    def normal(variance: float, *shape: int) -> Scores:
        return rng.normal(0, math.sqrt(variance), shape)

    member, batch, sampling = normal(SIGNAL, members, 1), normal(BATCH, 1, repeats), normal(SAMPLING, members, repeats)
    task = normal(TASK, members, repeats)
    fresh = 3 + member + batch + task + sampling
    same = 3 + member + batch[:, :1] + task[:, :1] + normal(SAMPLING, members, repeats)
    same[:, 0] = fresh[:, 0]
    return same, fresh


def test_repeats_of_one_member_are_set_beside_the_spread_over_members() -> None:
    found = probes.repeatability([[1.0, 3.0], [5.0, 5.0], [8.0, 10.0]])
    assert not found.identical
    assert found.sd_repeats == pytest.approx(math.sqrt((2 + 0 + 2) / 3))
    assert found.sd_members == pytest.approx(np.std([2, 5, 9], ddof=1))
    assert probes.repeatability([[1.0, 1.0], [2.0, 2.0]]) == probes.Repeatability(True, 0.0, math.sqrt(0.5))


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "NUM_RESAMPLES", 200)


def floor_of(rng: np.random.Generator, members: int = 24, repeats: int = 4) -> probes.NoiseFloor:
    same, fresh = make_scores(rng, members, repeats)
    return noise_floor(same.tolist(), fresh.tolist(), num_tasks=16, population=30, seeds=range(members))


def test_variance_components_are_found_without_bias(few_resamples: None) -> None:
    rng = np.random.default_rng(1)
    floors = [floor_of(rng) for _ in range(150)]
    for name, truth in (("signal", SIGNAL), ("task_noise", TASK), ("sampling_noise", SAMPLING), ("batch", BATCH)):
        values = np.array([getattr(floor, name).value for floor in floors])
        error = values.std() / math.sqrt(len(values))
        assert abs(values.mean() - truth) < 3.5 * error, name
        assert error < 0.12 * truth, name


def test_intervals_hold_the_truth_as_often_as_they_say(few_resamples: None) -> None:
    """Percentile bootstraps over two dozen members fall somewhat short of 95 %."""
    rng = np.random.default_rng(2)
    floors = [floor_of(rng) for _ in range(150)]
    reliability = SIGNAL / (SIGNAL + TASK + SAMPLING)
    for name, truth in (("signal", SIGNAL), ("sampling_noise", SAMPLING), ("reliability", reliability)):
        estimates = [getattr(floor, name) for floor in floors]
        covered = sum(estimate.low <= truth <= estimate.high for estimate in estimates) / len(floors)
        assert 0.86 <= covered <= 0.99, (name, covered)


def test_a_common_shift_of_all_members_is_not_noise_of_z() -> None:
    same, fresh = make_scores(np.random.default_rng(3), 12, 3)
    shifted = fresh + np.array([0.0, 7.0, -40.0])
    facts = {"num_tasks": 16, "population": 30, "seeds": range(12)}
    before = noise_floor(same.tolist(), fresh.tolist(), **facts)  # type: ignore[arg-type]
    after = noise_floor(same.tolist(), shifted.tolist(), **facts)  # type: ignore[arg-type]
    assert after.reliability.value == pytest.approx(before.reliability.value)
    assert after.batch.value > 100 * before.batch.value


def simulate_update(rng: np.random.Generator, members: int, tasks: int, dimension: int) -> tuple[float, float]:
    """(cosine to the noise-free update, cosine to the gradient) of one update on a linear objective."""
    gradient = np.zeros(dimension)
    gradient[0] = 1.0
    noise = rng.normal(0, 1, (members, dimension))
    truth = noise @ gradient
    z = truth + rng.normal(0, math.sqrt(3.0 / tasks), members)

    def cosine(a: Scores, b: Scores) -> float:
        return float(a @ b / math.sqrt((a @ a) * (b @ b)))

    update = ((z - z.mean()) / z.std()) @ noise
    return cosine(update, (truth - truth.mean()) @ noise), cosine(update, gradient)


def test_predicted_cosines_and_gains_are_those_of_real_updates() -> None:
    """A linear objective in 3,000 dimensions: signal 1, noise of a single task 3; N = 24, T = 4 against others."""
    rng = np.random.default_rng(4)
    trades = {trade.num_tasks: trade for trade in probes._trades(1.0, 3.0, 4, 24, None)}
    squares = {}
    for tasks, members in ((1, 96), (4, 24), (16, 6)):
        cosines = np.array([simulate_update(rng, members, tasks, 3000) for _ in range(150)])
        if tasks > 1 and members > 10:
            assert cosines[:, 0].mean() == pytest.approx(trades[tasks].cosine, abs=0.03)
        squares[tasks] = float((cosines[:, 1] ** 2).mean())
    assert [trades[tasks].members for tasks in (1, 4, 16)] == [96, 24, 6]
    assert squares[1] / squares[4] == pytest.approx(trades[1].gain, rel=0.2)
    assert squares[16] / squares[4] == pytest.approx(trades[16].gain, rel=0.35)


def test_the_best_number_of_tasks_makes_the_gain_largest() -> None:
    best = probes._best_num_tasks(0.04, 1.6, (30.0, 2.0))
    assert best is not None

    def value(tasks: float) -> float:
        return 0.04 / (0.04 + 1.6 / tasks) / (30 + 2 * tasks)

    assert value(best) > max(value(best * 1.02), value(best / 1.02))
    assert best == pytest.approx(math.sqrt(30 / 2 * 1.6 / 0.04))


def test_the_verdict_names_the_better_choice_at_equal_cost() -> None:
    same, fresh = make_scores(np.random.default_rng(5), 40, 8)

    def say(*costs: float) -> str:
        given = (costs[0], costs[1]) if costs else None
        return verdict(
            noise_floor(same.tolist(), fresh.tolist(), num_tasks=16, population=40, seeds=range(40), costs=given)
        )

    assert "of the variance of z is signal; at equal episodes more members" in say()
    assert "more tasks per member pay" in say(100.0, 1.0)
    assert "more members pay" in say(0.1, 1.0)


def test_scores_without_signal_are_called_so() -> None:
    rng = np.random.default_rng(6)
    noise = rng.normal(0, 1, (2, 8, 4))
    floor = noise_floor(noise[0].tolist(), noise[1].tolist(), num_tasks=4, population=8, seeds=range(8))
    assert verdict(floor).startswith("no signal shows above the noise with 8 members on 4 batches")
    still = noise_floor([[0.5] * 3] * 4, [[0.5] * 3] * 4, num_tasks=4, population=8, seeds=range(4))
    assert (still.reliability.value, still.trades, still.best_num_tasks) == (0.0, (), None)
    assert verdict(still).startswith("no signal shows")


def test_one_batch_twice_and_many_fresh_ones_give_the_same_components(few_resamples: None) -> None:
    """A greedy probe may have different numbers of scores on the same and on fresh batches."""
    rng = np.random.default_rng(8)
    floors = []
    for _ in range(100):
        _, fresh = make_scores(rng, 24, 6)
        own = fresh[:, :1].tolist()
        floors.append(
            noise_floor([row * 2 for row in own], fresh.tolist(), num_tasks=16, population=30, seeds=range(24))
        )
    assert max(abs(floor.sampling_noise.value) for floor in floors) < 1e-12
    assert np.mean([floor.signal.value for floor in floors]) == pytest.approx(SIGNAL, rel=0.15)
    assert np.mean([floor.task_noise.value for floor in floors]) == pytest.approx(TASK + SAMPLING, rel=0.1)


def test_halves_of_a_pair_are_resampled_together() -> None:
    for rows in probes._draws([7, 7, 8, 8, 9])[:50]:
        counts = np.bincount(rows, minlength=5)
        assert counts[0] == counts[1]
        assert counts[2] == counts[3]


def test_rank_correlation_averages_ties_and_knows_no_scale() -> None:
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0, 4.0])
    assert spearman(x, y) == pytest.approx(pearson(np.array([0, 1.5, 1.5, 3]), np.array([0.0, 2, 1, 3])))
    assert spearman(np.exp(x), -(y**3)) == pytest.approx(-spearman(x, y))
    assert spearman(x, x) == pytest.approx(1.0)
    assert math.isnan(spearman(x, np.ones(4)))


def agree(rng: np.random.Generator, correlation: float, lag: int, ceiling: Agreement | None = None) -> Agreement:
    x = rng.normal(0, 1, 40)
    y = correlation * x + math.sqrt(1 - correlation**2) * rng.normal(0, 1, 40)
    return agreement(x.tolist(), y.tolist(), seeds=range(40), lag=lag, version=9 - lag, ceiling=ceiling)


def test_agreement_is_measured_against_the_ceiling() -> None:
    rng = np.random.default_rng(7)
    ceiling = agree(rng, 0.9, 0)
    stale = agree(rng, 0.3, 4, ceiling)
    assert ceiling.rank_correlation is not None
    assert stale.rank_correlation is not None
    assert ceiling.share_of_ceiling is None
    assert stale.share_of_ceiling == pytest.approx(stale.rank_correlation.value / ceiling.rank_correlation.value)
    assert ceiling.rank_correlation.low < ceiling.rank_correlation.value < ceiling.rank_correlation.high
    assert stale.rank_correlation.low < 0.3 < stale.rank_correlation.high


def test_agreement_without_spread_is_unknown() -> None:
    found = agreement([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], seeds=range(3), lag=1, version=2)
    assert (found.rank_correlation, found.correlation, found.share_of_ceiling) == (None, None, None)
    assert (found.mean_then, found.mean_now) == (1.0, 2.0)
