"""theta on a sample is theta; distances beside a random walk are those of the formula."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
from builders import Counted, built_commit, counted
from msgspec.structs import replace
from staged_run import ALPHA, Staged, stage, sync, tail

from hpc_es.analysis.figures.drift import plot_drift, plot_magnitudes
from hpc_es.analysis.statistics.drift import gradient_variance, magnitudes, share_within, walk
from hpc_es.analysis.statistics.sample import Sample, estimate_norm, sample
from hpc_es.errors import NothingToShow
from hpc_es.methods.es import optimiser
from hpc_es.methods.es.shaping import coefficients, fp32, zscore
from hpc_es.params import Arena
from hpc_es.records import Commit, EvalId
from hpc_es.store import Run

pytestmark = pytest.mark.filterwarnings("error")
ALL = 10**6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model")


def replayed(root: Path, model: Path, kind: optimiser.Kind = "none", num_subspaces: int = 1) -> tuple[Run, Arena]:
    """A run that was made with this model, and theta at its end."""
    arena = Arena.from_pretrained(model, optimiser=kind)

    def finish(commit: Commit) -> tuple[Commit, float]:
        step = optimiser.step(kind, alpha=1e-3, update=commit.version, beta1=0.9, beta2=0.99, epsilon=1e-8)
        terms = tuple(
            replace(term, subspace=place % num_subspaces, partition_seed=commit.version)
            for place, term in enumerate(commit.seeds.terms)
        )
        body = replace(commit.seeds, step=step, num_subspaces=num_subspaces, terms=terms)
        commit = replace(commit, body=body)
        return commit, arena.apply([commit]).update_norm

    es = {"subspaces": num_subspaces, "optimiser": {"kind": kind}}
    return stage(root, Staged(composition=sync(4), model=str(model), finish=finish, es=es)), arena


def distance(arena: Arena, model: Path) -> float:
    start = Arena.from_pretrained(model)
    changes = [arena.tensor(name).astype(float) - start.tensor(name) for name in arena.names]
    return math.sqrt(sum(float((change**2).sum()) for change in changes))


@pytest.mark.parametrize(("kind", "num_subspaces"), [("none", 1), ("none", 4), ("momentum", 1), ("adam", 2)])
def test_a_sample_of_everything_is_theta(tmp_path: Path, model: Path, kind: optimiser.Kind, num_subspaces: int) -> None:
    run, arena = replayed(tmp_path / "run", model, kind, num_subspaces)
    found = sample(run, num_pieces=ALL)
    assert found.num_sampled == found.num_parameters == sum(math.prod(s) for s in small_checkpoint.SHAPES.values())
    assert found.norms == pytest.approx(run.updates["update_norm"].to_numpy(float), rel=1e-9)
    assert found.distances[-1] == pytest.approx(distance(arena, model), rel=1e-9)
    assert not found.norm_errors.any()


def bfloat16(values: Any) -> Any:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("store", [lambda values: values.astype(np.float16), bfloat16])
def test_a_part_of_theta_is_an_estimate_with_its_error(tmp_path: Path, store: Callable[[Any], Any]) -> None:
    tensors = {name: store(values) for name, values in small_checkpoint.values().items()}
    model = small_checkpoint.make(tmp_path / "model", tensors)
    run, arena = replayed(tmp_path / "run", model)
    found = sample(run, num_pieces=3)
    assert 0 < found.num_sampled < found.num_parameters
    off = np.abs(found.norms - run.updates["update_norm"].to_numpy(float)) / found.norm_errors
    assert off.max() < 4
    assert abs(found.distances[-1] - distance(arena, model)) < 4 * found.distance_errors[-1]


def test_the_error_of_an_estimated_norm_is_its_scatter() -> None:
    generator = np.random.default_rng(0)
    population = generator.standard_normal(20_000)
    truth = float(np.linalg.norm(population))
    found = [estimate_norm(generator.choice(population, 2_000, replace=False), 20_000) for _ in range(400)]
    norms, errors = np.array(found).T
    assert norms.mean() == pytest.approx(truth, rel=0.002)
    assert norms.std() == pytest.approx(errors.mean(), rel=0.15)
    assert estimate_norm(np.zeros(5), 10) == (0.0, 0.0)


def test_another_base_model_is_recognised_by_its_norms(tmp_path: Path, model: Path) -> None:
    shapes = {**small_checkpoint.SHAPES, "model.extra.weight": (400, 40)}
    other = small_checkpoint.make(tmp_path / "other", small_checkpoint.values(shapes))
    run, _ = replayed(tmp_path / "run", model)
    with pytest.raises(NothingToShow, match="it began from another model; give the path of that one with --model"):
        sample(run, other)


def test_without_the_base_model_nothing_is_shown_and_it_says_why(tmp_path: Path) -> None:
    run = stage(tmp_path / "run", Staged(composition=sync(4)))
    with pytest.raises(NothingToShow, match=r"the base model cannot be read .*give its path with --model"):
        plot_drift(run)


# --- the walk ----------------------------------------------------------------------------------------------------


def commit(version: int, fitness: list[float], *, alpha: float = ALPHA, pairs: bool = False, groups: int = 1) -> Commit:
    """A commit of z-scored members; with `pairs`, two and two share their noise."""
    utilities = zscore(fitness)
    signs = [-1 if pairs and place % 2 else 1 for place in range(len(fitness))]
    scaled = coefficients(alpha * groups, utilities, signs)
    members = tuple(
        Counted(EvalId(version - 1, k), k // 2 if pairs else k, signs[k], 1e-3, k % groups, fitness[k], u, c)
        for k, (u, c) in enumerate(zip(utilities, scaled, strict=True))
    )
    return built_commit(version, alpha, members, num_subspaces=groups)


def test_a_walk_of_seventy_updates_has_the_shares_of_webarena() -> None:
    """Agentic ESOpt's settings: alpha 2.5e-4, N 8, 70 updates give 82.4, 95.7 and 99.3 % (a random walk)."""
    commits = tuple(commit(version, list(range(8)), alpha=2.5e-4) for version in range(1, 71))
    deviation = float(walk(commits).distances[-1])
    assert deviation == pytest.approx(2.5e-4 * math.sqrt(70 / 8), rel=1e-4)
    shares = [share_within(threshold, deviation) for threshold in (1e-3, 1.5e-3, 2e-3)]
    assert [round(100 * share, 1) for share in shares] == [82.4, 95.7, 99.3]


def test_the_length_of_an_update_is_the_same_whatever_the_fitness() -> None:
    for fitness in ([0.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0], [5.0, -5.0, 0.1, 0.0]):
        assert gradient_variance(commit(1, fitness)) == pytest.approx(0.99998 * ALPHA**2 / 4, rel=1e-6)
    assert gradient_variance(commit(1, [1.0, 2.0, 3.0, 4.0], groups=2)) == pytest.approx(
        0.99998 * 2 * ALPHA**2 / 4, rel=1e-6
    )


def test_members_that_share_their_noise_are_dealt_utilities_together() -> None:
    """Against all 24 ways to deal four utilities out to two mirrored pairs."""
    fitness = [0.3, 0.1, 0.8, 0.9]
    paired, utilities = commit(1, fitness, pairs=True), zscore(fitness)
    squares = [(ALPHA / 4) ** 2 * ((u[0] - u[1]) ** 2 + (u[2] - u[3]) ** 2) for u in itertools.permutations(utilities)]
    assert gradient_variance(paired) == pytest.approx(0.99998 * sum(squares) / len(squares), rel=1e-5)


def test_a_null_commit_makes_no_step() -> None:
    null = built_commit(2, ALPHA, counted(commit(2, [1.0, 2.0])), null=True)
    found = walk((commit(1, [1.0, 2.0]), null))
    assert found.steps[1] == 0
    assert found.distances[1] == found.distances[0] > 0


def test_a_walk_with_momentum_is_that_of_its_recursion() -> None:
    beta, alpha = 0.9, 0.01

    def stepped(version: int) -> Commit:
        plain = commit(version, [1.0, 2.0, 3.0, 5.0], alpha=1.0)
        step = optimiser.step("momentum", alpha=alpha, update=version, beta1=beta, beta2=0.999, epsilon=1e-8)
        return replace(plain, body=replace(plain.seeds, step=step))

    commits = tuple(map(stepped, range(1, 31)))
    gradient = math.sqrt(gradient_variance(commits[0]))
    expected = alpha * gradient * (1 - beta) * math.sqrt((1 - beta**60) / (1 - beta**2))
    assert walk(commits).steps[-1] == pytest.approx(expected, rel=0.02)


def test_magnitudes_have_sigma_among_their_thresholds(tmp_path: Path, model: Path) -> None:
    run, _ = replayed(tmp_path / "run", model)
    found = magnitudes(run)
    assert found["threshold"].tolist() == [1e-4, 5e-4, 1e-3, 1.5e-3, 2e-3]  # sigma is 1e-3
    assert found["sigmas"].tolist() == pytest.approx([0.1, 0.5, 1, 1.5, 2])
    assert found["share"][2] == (np.abs(sample(run).changes) <= 1e-3).mean()
    assert found["walk"][2] == pytest.approx(share_within(1e-3, ALPHA * math.sqrt(8 / 4)), rel=1e-3)


def test_figures_of_movement(tmp_path: Path, model: Path) -> None:
    run, _ = replayed(tmp_path / "run", model)
    left, middle, right = plot_drift(run).axes
    found: Sample = sample(run)
    assert np.array_equal(left.lines[0].get_ydata(), found.norms)
    assert np.array_equal(middle.lines[0].get_ydata(), found.distances)
    ratio = found.distances / (math.sqrt(found.num_parameters) * walk(found.commits).distances)
    assert np.asarray(right.lines[1].get_ydata(), float) == pytest.approx(ratio)
    assert len(plot_magnitudes({"a": run, "b": run}).axes) == 2
    other = stage(tmp_path / "other", Staged(composition=sync(4)))
    for figure in (plot_drift({"a": run, "b": other}), plot_magnitudes({"a": run, "b": other})):
        assert figure.get_suptitle() == "not shown, since base model or journal is missing: b"


def test_fp32_is_what_a_coefficient_is_rounded_to() -> None:
    """The weights that `gradient_variance` recovers are those of the schedule, up to this rounding."""
    assert counted(commit(1, [0.0, 1.0]))[0].coefficient == fp32(-ALPHA / 2 / 4096 / (1 + 2e-8))


def test_tails_are_replayed_too(tmp_path: Path, model: Path) -> None:
    arena = Arena.from_pretrained(model)
    counts = {0: 2, 1: 1, 2: 1}
    staged = Staged(
        staleness={"mode": "tail", "counts": {str(lag): count for lag, count in counts.items()}},
        composition=tail(counts),
        model=str(model),
        finish=lambda made: (made, arena.apply([made]).update_norm),
    )
    assert sample(stage(tmp_path / "run", staged)).distances[-1] == pytest.approx(distance(arena, model), rel=1e-9)
