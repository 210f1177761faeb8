"""Members, task batches, schedules and shaping: pure functions with known answers."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_es import seeds
from hpc_es.config.es import EsConfig
from hpc_es.errors import VerifyError
from hpc_es.methods.es import population, remedies, schedules, shaping, subspaces
from hpc_es.records import MAX_REWARD, EvalId

finite = st.floats(-1e6, 1e6)


def member(slot, *, version=0, replacement=0, mirrored=False):
    return population.member(1, EvalId(version, slot, replacement), sigma=0.1, mirrored=mirrored)


def test_seeds_are_the_same_in_every_process_and_release():
    assert seeds.derive(0, "member", 0, 0, 0) == 9256427606233750146
    assert seeds.task_batch(5, 3, 4, 10) == seeds.task_batch(5, 3, 4, 10)


def test_seeds_of_a_long_run_never_collide():
    seeds = {member(slot, version=version).seed for version in range(300) for slot in range(64)}
    assert len(seeds) == 300 * 64


def test_labels_that_join_to_the_same_text_give_different_seeds():
    assert seeds.derive(0, "a", 1, 2) != seeds.derive(0, "a", 12)
    assert seeds.derive(0, 1) != seeds.derive(0, "1")


def test_mirrored_members_share_noise_and_differ_in_sign():
    plus, minus, other = (member(slot, mirrored=True) for slot in (0, 1, 2))
    assert plus.seed == minus.seed != other.seed
    assert (plus.sign, minus.sign) == (1, -1)


def test_a_replacement_is_a_new_member():
    assert member(0).seed != member(0, replacement=1).seed


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 40), st.integers(0, 200))
def test_a_task_batch_has_different_tasks_within_range(seed, version, size, more):
    num_tasks = size + more
    batch = seeds.task_batch(seed, version, size, num_tasks)
    assert len(set(batch)) == size
    assert all(0 <= task < num_tasks for task in batch)


def test_task_batches_visit_all_tasks_alike():
    counts = [0] * 10
    for version in range(3000):
        for task in seeds.task_batch(0, version, 3, 10):
            counts[task] += 1
    assert all(abs(count - 900) < 5 * math.sqrt(900 * 0.7) for count in counts)


def test_a_batch_larger_than_the_tasks_is_refused():
    with pytest.raises(ValueError, match="cannot be drawn from 3"):
        seeds.task_batch(0, 0, 4, 3)


def test_episode_seeds_fit_a_signed_integer_and_differ_by_turn_and_position():
    drawn = {seeds.episode_seed(2**64 - 1, position, turn) for position in range(20) for turn in range(20)}
    assert len(drawn) == 400
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@given(st.floats(1e-6, 1.0), st.floats(0, 1.0), st.integers(2, 500))
def test_schedules_hit_both_endpoints_exactly_and_stay_between(kind, start, end, num_updates):
    values = [schedules.value(kind, start, end, update=u, num_updates=num_updates) for u in range(1, num_updates + 1)]
    assert values[0] == start
    assert values[-1] == end
    assert all(min(start, end) - 1e-12 <= value <= max(start, end) + 1e-12 for value in values)


def test_the_cosine_schedule_follows_the_published_formula():
    got = schedules.value("cosine", 1e-3, 2.5e-4, update=26, num_updates=101)
    assert got == pytest.approx(2.5e-4 + (1e-3 - 2.5e-4) * (1 + math.cos(math.pi * 0.25)) / 2, rel=1e-15)


def test_a_schedule_of_one_update_is_its_start():
    assert schedules.value("linear", 0.5, 0.0, update=1, num_updates=1) == 0.5


def test_zscores_use_the_population_deviation():
    values = [0.0, 1.0, 5.0]
    expected = [(v - 2.0) / (statistics.pstdev(values) + 1e-8) for v in values]
    assert shaping.utilities("zscore", values) == pytest.approx(expected, rel=1e-15)


@given(st.lists(finite, min_size=2, max_size=30).filter(lambda v: max(v) > min(v)))
def test_utilities_keep_the_order_and_give_equal_fitness_equal_utility(values):
    for kind in ("zscore", "centred_ranks"):
        utilities = shaping.utilities(kind, values)
        for a, ua in zip(values, utilities, strict=True):
            for b, ub in zip(values, utilities, strict=True):
                assert (a < b) <= (ua <= ub)
                assert (a == b) <= (ua == ub)


@given(st.lists(finite, min_size=2, max_size=12).filter(lambda v: max(v) > min(v)), st.randoms())
def test_utilities_do_not_depend_on_the_order_of_arrival(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    for kind in ("zscore", "centred_ranks"):
        straight = shaping.utilities(kind, values)
        shuffled = shaping.utilities(kind, [values[i] for i in order])
        assert shuffled == [straight[i] for i in order]


@pytest.mark.parametrize("kind", ["zscore", "centred_ranks"])
@pytest.mark.parametrize("poison", [1e200, -1e200, math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 2])
def test_fitness_that_no_worker_can_have_measured_is_refused_by_name(kind, poison, place):
    values = [0.1, 0.2, 0.3]
    values[place] = poison
    with pytest.raises(
        VerifyError, match=r"no update can be made from a fitness of .*: rewards must be between -1e\+100 and 1e\+100"
    ):
        shaping.utilities(kind, values)


@given(st.lists(st.floats(-2 * MAX_REWARD, 2 * MAX_REWARD), min_size=2, max_size=50))
def test_utilities_of_all_fitness_that_may_be_are_finite(values):
    for kind in ("zscore", "centred_ranks"):
        assert all(map(math.isfinite, shaping.utilities(kind, values)))


def test_centred_ranks_average_ties_and_span_one():
    assert shaping.utilities("centred_ranks", [3.0, 1.0, 3.0, 7.0]) == pytest.approx([0, -0.5, 0, 0.5])


def test_fitness_without_spread_gives_no_utility():
    assert shaping.utilities("zscore", [0.25] * 4) == [0.0] * 4
    assert shaping.utilities("centred_ranks", [0.25] * 4) == [0.0] * 4


def test_coefficients_are_fp32_and_carry_sign_and_table_scale():
    plus, minus = shaping.coefficients(5e-4, [1.5, 1.5], [1, -1])
    assert plus == -minus
    assert plus == shaping.fp32(5e-4 * 1.5 / 2 / 4096)
    assert shaping.fp32(plus) == plus


# --- subspaces and remedies ---------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 4), st.booleans())
def test_slots_fill_all_subspaces_alike_and_pairs_stay_together(num_subspaces, per_subspace, mirrored):
    slots = range(num_subspaces * per_subspace * (2 if mirrored else 1))
    owners = [subspaces.subspace(slot, num_subspaces, mirrored=mirrored) for slot in slots]
    assert all(owners.count(k) == len(slots) / num_subspaces for k in range(num_subspaces))
    if mirrored:
        assert owners[::2] == owners[1::2]


def test_every_update_has_a_partition_of_its_own_and_one_subspace_has_none():
    seeds = {subspaces.partition_seed(1, update, 4) for update in range(1, 1000)}
    assert len(seeds) == 999
    assert subspaces.partition_seed(2, 1, 4) not in seeds
    assert subspaces.partition_seed(1, 1, 1) == 0


def test_members_share_the_weight_of_their_subspace():
    assert subspaces.weights([0, 1, 1, 2, 1]) == [1, 1 / 3, 1 / 3, 1, 1 / 3]
    assert subspaces.scaled(1e-3, 4) == 2e-3
    assert subspaces.scaled(0.1, 1) == 0.1


def test_few_members_per_subspace_are_warned_about():
    assert subspaces.advice(40, 4) is None
    assert subspaces.advice(8, 1) is None
    assert "9.75 members per subspace" in subspaces.advice(39, 4)


@pytest.mark.parametrize(
    ("es", "message"),
    [
        ({"population": 42, "subspaces": 4}, r"es\.population=42 must be a multiple of 4.*es\.subspaces=4.*members"),
        ({"population": 36, "subspaces": 8, "mirrored": True}, r"multiple of 16.*equally many pairs"),
        ({"optimiser": {"kind": "adam", "epsilon": 1e-60}}, "greater than or equal"),
    ],
)
def test_settings_that_cannot_work_are_refused(es, message):
    with pytest.raises(ValueError, match=message):
        EsConfig.model_validate(es)


def test_weights_by_lag_are_one_when_fresh_and_fall():
    assert [remedies.lag_weight("inverse", lag, 1.0) for lag in (0, 1, 3)] == [1, 0.5, 0.25]
    assert remedies.lag_weight("exponential", 2, 0.5) == pytest.approx(math.exp(-1))
    for kind in ("none", "inverse", "exponential"):
        assert remedies.lag_weight(kind, 0, 3.0) == 1


@given(st.lists(st.tuples(finite, st.integers(0, 3)), min_size=1, max_size=20))
def test_a_baseline_per_batch_leaves_each_batch_with_mean_zero_and_its_order(pairs):
    values, versions = zip(*pairs, strict=True)
    left = remedies.without_batch_means(values, versions)
    for version in set(versions):
        mine = [(value, rest) for value, rest, v in zip(values, left, versions, strict=True) if v == version]
        assert abs(math.fsum(rest for _, rest in mine)) <= 1e-9 * max(abs(value) for value, _ in mine) + 1e-300
        assert all((a[0] < b[0]) <= (a[1] <= b[1]) for a in mine for b in mine)
        if len({value for value, _ in mine}) == 1:
            assert all(rest == 0 for _, rest in mine)


def test_a_baseline_of_the_centre_compares_each_member_with_its_own_batch():
    assert remedies.without_centres([1.0, 2.0, 5.0], [3, 3, 4], {3: 1.5, 4: 4.0, 5: 9.0}) == [-0.5, 0.5, 1.0]


def test_meaningless_scores_are_standard_normal_and_belong_to_their_evaluation():
    scores = [remedies.random_score(1, EvalId(version, slot)) for version in range(100) for slot in range(50)]
    assert abs(statistics.fmean(scores)) < 0.05
    assert abs(statistics.pstdev(scores) - 1) < 0.05
    assert len(set(scores)) == 5000
    assert remedies.random_score(1, EvalId(3, 7)) == scores[3 * 50 + 7]
    assert remedies.random_score(1, EvalId(3, 7, 1)) != scores[3 * 50 + 7] != remedies.random_score(2, EvalId(3, 7))


def test_members_equally_far_above_their_batches_stay_tied():
    """Their means are not exact floats; rounding them first would rank one member above the other."""
    left = remedies.without_batch_means([value / 16 for value in (1, 2, 2, 3, 4, 4)], [0, 0, 0, 1, 1, 1])
    assert left[:3] == left[3:]
