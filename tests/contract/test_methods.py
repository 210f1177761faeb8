"""Each method against a dense float64 reference: quadratic objective, real arena, real commits, stale members too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
from builders import Counted, built_commit, counted
from builders import es as method_of

from hpc_es.config.es import EsConfig
from hpc_es.config.schema import Config
from hpc_es.errors import VerifyError
from hpc_es.methods.es import optimiser, shaping
from hpc_es.noise import Array, noise, reference, tensor_id
from hpc_es.params import Arena
from hpc_es.records import Assignment, Commit, EvalId, Member, Result

SEED, NUM_UPDATES, STALE = 11, 5, 2
"""From update 2 on, this many members of every cohort were measured one version earlier."""

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mirrored": {"mirrored": True},
    "centred ranks": {"shaping": "centred_ranks"},
    "subspaces": {"subspaces": 4},
    "subspaces, mirrored": {"subspaces": 2, "mirrored": True},
    "momentum": {"optimiser": {"kind": "momentum", "beta1": 0.7}},
    "adam": {"optimiser": {"kind": "adam", "beta1": 0.8, "beta2": 0.95}},
    "adam, subspaces": {"optimiser": {"kind": "adam"}, "subspaces": 4},
    "weights by lag": {"lag_weight": {"kind": "inverse", "rate": 0.5}},
    "weights by lag, exponential": {"lag_weight": {"kind": "exponential"}, "subspaces": 2},
    "baseline per batch": {"baseline": "batch"},
    "baseline of the centre": {"baseline": "centre", "shaping": "centred_ranks"},
}


def configured(model: Path, **es: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "methods", "num_updates": NUM_UPDATES, "seed": SEED},
            "model": {"path": str(model), "exclude": ["*norm*"]},
            "task": {"env": "sudoku"},
            "es": {"population": 8, "sigma": 1e-2, "alpha": {"kind": "linear", "start": 0.3, "end": 0.1}, **es},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint.make(tmp_path_factory.mktemp("methods") / "model")


def arena_of(config: Config) -> Arena:
    settings, kind = config.model, config.es.optimiser.kind
    return Arena.from_pretrained(settings.path, settings.include, settings.exclude, optimiser=kind)


def fitness(theta: Mapping[str, Array], version: int) -> float:
    """A quadratic whose optimum is at 0.5; batches of some versions are harder than those of others."""
    return -sum(float(np.mean((values - 0.5) ** 2)) for values in theta.values()) - version % 3


def measure(config: Config, arena: Arena, slot: int) -> tuple[Assignment, Result]:
    """Evaluate one member around the arena's theta, as a worker does."""
    assignment = method_of(config).assign(arena.version, slot, arena.version + 1)
    assert assignment.member is not None
    weights = {name: arena.perturbed(name, assignment.member, "float32") for name in arena.names}
    return assignment, Result(assignment.eval_id, fitness(weights, arena.version), (), 0, 0.0, 0.0, 0.0)


Cohort = list[tuple[Assignment, Result]]


def commits_of(config: Config, arena: Arena) -> list[tuple[Commit, Cohort, dict[int, float]]]:
    """A whole run; the arena ends at its last version."""
    made, kept, centres = [], [], dict[int, float]()
    for update in range(1, NUM_UPDATES + 1):
        centres[arena.version] = fitness({name: arena.tensor(name) for name in arena.names}, arena.version)
        cohort = kept + [measure(config, arena, slot) for slot in range(8 - len(kept))]
        kept = [measure(config, arena, slot) for slot in range(8, 8 + STALE)]
        commit = method_of(config).commit(update, cohort, centres)
        assert not commit.null
        arena.apply([commit])
        made.append((commit, cohort, dict(centres)))
    return made


class Dense:
    """The published formulas in float64, over whole vectors of noise and masks. Shares no code with what it checks
    but the noise itself and the members' seeds."""

    def __init__(self, arena: Arena) -> None:
        self.theta = {name: arena.tensor(name).astype(np.float64).ravel() for name in arena.trained}
        self.m = {name: np.zeros_like(theta) for name, theta in self.theta.items()}
        self.v = {name: np.zeros_like(theta) for name, theta in self.theta.items()}

    def update(self, es: EsConfig, alpha: float, number: int, cohort: Cohort, centres: Mapping[int, float]) -> None:
        members, versions = [a.member for a, _ in cohort], np.array([r.eval_id.version for _, r in cohort])
        weights = np.array([1 / sum(m.subspace == other.subspace for other in members) for m in members])
        utilities = self.utilities(es, np.array([r.fitness for _, r in cohort]), versions, centres)
        lags = number - 1 - versions
        if es.lag_weight.kind == "inverse":
            weights /= (1 + lags) ** es.lag_weight.rate
        elif es.lag_weight.kind == "exponential":
            weights *= np.exp(-es.lag_weight.rate * lags)
        for name, theta in self.theta.items():
            gradient, hit = np.zeros_like(theta), np.zeros(theta.shape, bool)
            for member, factor in zip(members, utilities * weights, strict=True):
                mask = np.ones(theta.shape, bool)
                if es.subspaces > 1:
                    ident, partition = tensor_id(name), member.partition_seed
                    mask = reference.subspaces(partition, ident, 0, theta.size, es.subspaces) == member.subspace
                gradient += factor * member.sign * mask * noise(member.seed, name, 0, theta.size) / 4096
                hit |= mask
            theta[hit] += self.change(es, alpha, number, name, gradient, hit)[hit]

    @staticmethod
    def utilities(es: EsConfig, values: Array, versions: Array, centres: Mapping[int, float]) -> Array:
        if es.baseline == "batch":
            values = values - np.array([values[versions == version].mean() for version in versions])
        elif es.baseline == "centre":
            values = values - np.array([centres[version] for version in versions])
        if es.shaping == "zscore":
            return (values - values.mean()) / (values.std() + 1e-8)
        return values.argsort().argsort() / (len(values) - 1) - 0.5

    def change(self, es: EsConfig, alpha: float, number: int, name: str, gradient: Array, hit: Array) -> Array:
        settings, m, v = es.optimiser, self.m[name], self.v[name]
        if settings.kind == "none":
            return alpha * gradient
        m[hit] = (settings.beta1 * m + (1 - settings.beta1) * gradient)[hit]
        if settings.kind == "momentum":
            return alpha * m
        v[hit] = (settings.beta2 * v + (1 - settings.beta2) * gradient**2)[hit]
        root = np.sqrt(v / (1 - settings.beta2**number))
        return alpha * m / (1 - settings.beta1**number) / (root + settings.epsilon)


@pytest.mark.parametrize("es", METHODS.values(), ids=METHODS)
def test_updates_are_those_of_the_dense_reference(model: Path, es: dict[str, Any]) -> None:
    config = configured(model, **es)
    arena = arena_of(config)
    dense, before = Dense(arena), arena_of(config)
    for commit, cohort, centres in commits_of(config, arena):
        assert commit.seeds.alpha == pytest.approx(0.3 - 0.05 * (commit.version - 1))
        dense.update(config.es, commit.seeds.alpha, commit.version, cohort, centres)
    for name in arena.trained:
        moved = np.abs(arena.tensor(name) - before.tensor(name)).max()
        assert np.abs(arena.tensor(name).ravel() - dense.theta[name]).max() < 3e-6 * max(1.0, moved)
        assert moved > 0.01
    for name, values in arena.contents().items():
        if "#" in name:
            tensor, kept = name.split("#")
            expected = getattr(dense, kept)[tensor]
            assert np.allclose(values.ravel(), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_the_dense_reference_would_notice(model: Path) -> None:
    """Each method ends somewhere else, by far more than the tolerance above."""
    ends = []
    for es in METHODS.values():
        arena = arena_of(configured(model, **es))
        commits_of(configured(model, **es), arena)
        ends.append(arena.tensor("model.embed_tokens.weight").copy())
    for i, end in enumerate(ends):
        assert all(np.abs(end - other).max() > 1e-3 for other in ends[:i])


def test_fitness_climbs_with_every_method(model: Path) -> None:
    for name, es in METHODS.items():
        config = configured(model, population=40, sigma=0.05, **es)
        arena = arena_of(config)
        begin = fitness({n: arena.tensor(n) for n in arena.trained}, 0)
        for update in range(1, 4):
            cohort = [measure(config, arena, slot) for slot in range(40)]
            theta = {n: arena.tensor(n) for n in arena.names}
            arena.apply([method_of(config).commit(update, cohort, {update - 1: fitness(theta, update - 1)})])
        assert fitness({n: arena.tensor(n) for n in arena.trained}, 0) > begin, name


# --- along exactly the noise that was evaluated -------------------------------------------------------------------


def one_hot(config: Config, slot: int) -> tuple[Member, Commit]:
    """Update 1 if utility is 1 for one member and 0 for all others."""
    members = [method_of(config).member_of(EvalId(0, s), 1) for s in range(8)]
    made = method_of(config).commit(1, cohort_of(config, 1, [float(s) for s in range(8)]))
    utilities, signs = [float(s == slot) for s in range(8)], [member.sign for member in members]
    alpha = 1.0 if made.seeds.step else made.seeds.alpha
    weights = [1 / sum(m.subspace == member.subspace for m in members) for member in members]
    coefficients = shaping.coefficients(alpha, utilities, signs, weights)
    changed = [
        Counted(m.eval_id, m.seed, m.sign, m.sigma, m.subspace, m.fitness, u, c, m.partition_seed)
        for m, u, c in zip(counted(made), utilities, coefficients, strict=True)
    ]
    commit = built_commit(
        1, made.seeds.alpha, tuple(changed), False, made.seeds.num_subspaces, made.seeds.partition_seed, made.seeds.step
    )
    return members[slot], commit


@pytest.mark.parametrize("slot", [0, 3, 6])
@pytest.mark.parametrize(
    "es",
    [
        {},
        {"mirrored": True},
        {"subspaces": 4},
        {"subspaces": 4, "mirrored": True},
        {"optimiser": {"kind": "momentum", "beta1": 0.5}},
        {"optimiser": {"kind": "adam", "beta1": 0.5}},
        {"optimiser": {"kind": "adam", "beta1": 0.5}, "subspaces": 4, "mirrored": True},
    ],
    ids=str,
)
def test_a_one_hot_utility_moves_theta_along_the_noise_that_was_evaluated(
    tmp_path: Path, es: dict[str, Any], slot: int
) -> None:
    """Around a theta of zeros with powers of two for scalars nothing rounds, so the bits must agree."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in small_checkpoint.SHAPES.items()}
    config = configured(small_checkpoint.make(tmp_path / "zeros", zeros), sigma=2.0**-8, alpha=2.0**-5, **es)
    arena = arena_of(config)
    member, commit = one_hot(config, slot)
    evaluated = {name: arena.perturbed(name, member, "float32") for name in arena.trained}
    arena.apply([commit])
    num_subspaces, contents = config.es.subspaces, arena.contents()
    for name, shift in evaluated.items():
        assert np.count_nonzero(shift) == pytest.approx(shift.size / num_subspaces, abs=8 * num_subspaces)
        moved, direction = arena.tensor(name), shift / np.float32(member.sigma)
        weight = num_subspaces / 8
        if config.es.optimiser.kind == "none":
            assert moved.tobytes() == (direction * np.float32(2.0**-5 * weight)).tobytes()
        elif config.es.optimiser.kind == "momentum":
            assert moved.tobytes() == (direction * np.float32(2.0**-5 * weight * 0.5)).tobytes()
        else:  # the first step of Adam goes by alpha, whatever the size of g
            assert contents[f"{name}#m"].tobytes() == (direction * np.float32(weight * 0.5)).tobytes()
            assert np.array_equal(np.sign(moved), np.sign(direction))
            assert np.allclose(np.abs(moved[direction != 0]), 2.0**-5, rtol=1e-3)


def test_subspaces_of_one_cohort_have_equal_shares_and_together_cover_everything(model: Path) -> None:
    config = configured(model, subspaces=4)
    members = [method_of(config).member_of(EvalId(3, slot), 4) for slot in range(8)]
    assert [m.subspace for m in members] == [0, 1, 2, 3] * 2
    assert {(m.partition_seed, m.num_subspaces, m.sigma) for m in members} == {(members[0].partition_seed, 4, 2e-2)}
    assert method_of(config).member_of(EvalId(0, 0), 4).partition_seed == members[0].partition_seed
    assert method_of(config).member_of(EvalId(4, 0), 5).partition_seed != members[0].partition_seed
    pairs = [method_of(configured(model, subspaces=4, mirrored=True)).member_of(EvalId(3, s), 4) for s in range(8)]
    assert [m.subspace for m in pairs] == [0, 0, 1, 1, 2, 2, 3, 3]
    arena = arena_of(config)
    name = "model.embed_tokens.weight"
    changed = [arena.perturbed(name, m, "float32") != arena.tensor(name) for m in members[:4]]
    assert (np.sum(changed, axis=0) <= 1).all()  # an element whose noise rounds away changes in none
    assert np.mean(np.any(changed, axis=0)) > 0.999
    assert all(abs(part.mean() - 0.25) < 0.003 for part in changed)  # the last group is short


# --- controls and null commits ------------------------------------------------------------------------------------


def cohort_of(config: Config, update: int, values: list[float]) -> Cohort:
    ids = [EvalId(update - 1, slot) for slot in range(len(values))]
    results = [Result(i, value, (), 0, 0.0, 0.0, 0.0) for i, value in zip(ids, values, strict=True)]
    method = method_of(config)
    return [(method.assign(update - 1, result.eval_id.slot, update), result) for result in results]


def test_a_random_walk_does_not_look_at_the_fitness(model: Path) -> None:
    config = configured(model, control="random-walk", baseline="centre")
    flat = method_of(config).commit(1, cohort_of(config, 1, [0.5] * 8))
    other = method_of(config).commit(1, cohort_of(config, 1, [float(slot) for slot in range(8)]))
    assert not flat.null
    utilities = [member.utility for member in counted(flat)]
    assert utilities == [member.utility for member in counted(other)]
    assert [member.fitness for member in counted(other)] == [float(slot) for slot in range(8)]
    assert np.mean(utilities) == pytest.approx(0, abs=1e-12)
    assert np.std(utilities) == pytest.approx(1, abs=1e-6)
    next_one = method_of(config).commit(2, cohort_of(config, 2, [0.5] * 8))
    assert utilities != [member.utility for member in counted(next_one)]


@pytest.mark.parametrize("kind", ["none", "adam"])
@pytest.mark.parametrize("ends", ["sigma", "alpha"])
def test_an_update_with_zero_sigma_or_alpha_is_null(model: Path, kind: str, ends: str) -> None:
    schedule = {"kind": "cosine", "start": 1e-2, "end": 0.0}
    config = configured(model, **{ends: schedule}, optimiser={"kind": kind})
    arena = arena_of(config)
    for update in range(1, NUM_UPDATES + 1):
        commit = method_of(config).commit(update, cohort_of(config, update, [float(s) for s in range(8)]))
        before, report = arena.digest(), arena.apply([commit])
        assert commit.null == (update == NUM_UPDATES) == (report.digest == before)


def test_a_null_update_leaves_the_optimisers_state_alone(model: Path) -> None:
    config = configured(model, optimiser={"kind": "momentum"})
    arena = arena_of(config)
    arena.apply([method_of(config).commit(1, cohort_of(config, 1, [float(s) for s in range(8)]))])
    digest = arena.digest()
    null = method_of(config).commit(2, cohort_of(config, 2, [0.25] * 8))
    assert null.null
    assert arena.apply([null]).digest == digest


def test_a_batch_that_is_flat_says_nothing_even_where_means_would_round(model: Path) -> None:
    """The mean of three times 0.1 is not 0.1 in floats."""
    config = configured(model, baseline="batch")
    cohort = cohort_of(config, 2, [0.1] * 3) + cohort_of(config, 3, [0.7] * 5)
    assert method_of(config).commit(3, cohort).null


def test_a_missing_centre_is_named(model: Path) -> None:
    config = configured(model, baseline="centre")
    with pytest.raises(VerifyError, match=r"update 1 needs the fitness of the centre at versions \[0\]"):
        method_of(config).commit(1, cohort_of(config, 1, [float(s) for s in range(8)]))


def test_scalars_of_adam_follow_the_published_formula() -> None:
    step = optimiser.step("adam", alpha=1e-3, update=3, beta1=0.9, beta2=0.999, epsilon=1e-8)
    assert step is not None
    g = 0.25
    m, v = 0.1 * g, 0.001 * g * g
    expected = 1e-3 * (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + 1e-8)
    assert step.rate * m / (np.sqrt(v) + step.epsilon) == pytest.approx(expected, rel=1e-6)
    assert (step.decay_m, step.gain_m) == (float(np.float32(0.9)), float(np.float32(0.1)))


PINNED = {
    (False, "zscore"): 0x2EB4884F2E99E2D9,
    (False, "centred_ranks"): 0xCDBF21CBC7CCC79C,
    (True, "zscore"): 0xE60AEA1DB76E276C,
    (True, "centred_ranks"): 0x280AF16A0FE4923,
}


@pytest.mark.parametrize(("mirrored", "kind"), PINNED)
def test_runs_without_these_methods_keep_the_bits_that_they_always_had(
    tmp_path: Path, mirrored: bool, kind: str
) -> None:
    shapes = small_checkpoint.SHAPES
    theta = {name: (noise(1, name, 0, int(np.prod(shape))) / 4096).astype(np.float32) for name, shape in shapes.items()}
    model = small_checkpoint.make(tmp_path / "m", {name: theta[name].reshape(shape) for name, shape in shapes.items()})
    config = Config.model_validate(
        {
            "run": {"name": "pin", "num_updates": 3, "seed": 11},
            "model": {"path": str(model)},
            "task": {"env": "sudoku"},
            "es": {
                "population": 6,
                "mirrored": mirrored,
                "shaping": kind,
                "sigma": {"kind": "cosine", "start": 1e-2, "end": 1e-3},
                "alpha": {"kind": "linear", "start": 5e-3, "end": 1e-3},
            },
        }
    )
    arena = Arena.from_pretrained(model)
    for update in (1, 2, 3):
        values = [(slot * 7919 + update * 104729) % 101 / 101 for slot in range(6)]
        digest = arena.apply([method_of(config).commit(update, cohort_of(config, update, values))]).digest
    assert arena.base_digest == 0x6E04BEC2AB4F2400
    assert digest == PINNED[mirrored, kind]
