"""A run with es.rank: members, commits, arenas, and what becomes of the tensors that are no matrices."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import small_checkpoint
from builders import es

from hpc_es.config import Config, config_digest, settle
from hpc_es.errors import ConfigError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.noise import noise
from hpc_es.params import Arena, checkpoint, combine
from hpc_es.params.layout import matrix_of
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Commit, Episode, Member, Result, Seeds
from hpc_es.transport import messages

RANK, NUM_UPDATES = 3, 3
SHAPES = small_checkpoint.SHAPES | {"model.layers.0.mlp.experts.down_proj": (3, 8, 5), "conv.weight": (4, 1, 4)}
MATRICES = {name for name, shape in SHAPES.items() if len(shape) == 2} | {"model.layers.0.mlp.experts.down_proj"}


def settings(model: Path, **es: Any) -> dict[str, Any]:
    return {
        "run": {"name": "low", "num_updates": NUM_UPDATES, "seed": 5},
        "model": {"path": str(model)},
        "task": {"env": "sudoku"},
        "es": {"population": 6, "rank": RANK, "lag_weight": {"kind": "inverse"}, **es},
    }


def configured(model: Path, **es: Any) -> Config:
    return Config.model_validate(settings(model, **es))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model", small_checkpoint.values(SHAPES))


def result_of(assignment: Assignment) -> Result:
    value = float(np.sin(10 * assignment.version + assignment.eval_id.slot))
    episodes = tuple(Episode(t, value, False, 1, 0, 9, 2, 0.1, 0.1, "terminated") for t in assignment.tasks)
    return Result(assignment.eval_id, value, episodes, 0, 0.0, 0.0, 0.0)


def commits(config: Config) -> list[Commit]:
    method = es(config)
    plans = [[method.assign(version, slot, version + 1) for slot in range(6)] for version in range(NUM_UPDATES)]
    return [method.commit(number, [(a, result_of(a)) for a in plan]) for number, plan in enumerate(plans, 1)]


def arena_of(config: Config, **options: Any) -> Arena:
    return Arena.from_pretrained(config.model.path, optimiser=config.es.optimiser.kind, **options)


@pytest.mark.parametrize("mirrored", [False, True])
def test_members_and_commits_carry_the_rank_and_scale_by_it(model: Path, mirrored: bool) -> None:
    low, full = (commits(configured(model, rank=rank, mirrored=mirrored))[0].seeds for rank in (RANK, 0))
    member = es(configured(model, mirrored=mirrored)).assign(0, 1, 1).member
    assert member is not None
    assert (member.rank, member.sign, low.rank, full.rank) == (RANK, -1 if mirrored else 1, RANK, 0)
    for term, other in zip(low.terms, full.terms, strict=True):
        assert (term.seed, term.sign, term.sigma) == (other.seed, other.sign, other.sigma)
        assert term.coefficient * 4096 * RANK**0.5 == pytest.approx(other.coefficient, rel=1e-6)


def test_records_without_a_rank_are_of_full_rank() -> None:
    old = msgspec.msgpack.encode({"seed": 1, "sign": 1, "sigma": 0.5})
    assert msgspec.msgpack.decode(old, type=Member).rank == 0
    old = msgspec.msgpack.encode({"type": "seeds", "alpha": 1.0, "terms": []})
    assert msgspec.msgpack.decode(old, type=Seeds).rank == 0


def test_a_commit_crosses_the_wire_with_its_rank(model: Path) -> None:
    for commit in commits(configured(model)):
        assert messages.decode_commit(messages.encode_commit(commit)).seeds.rank == RANK


def test_a_forged_rank_is_found(model: Path) -> None:
    config = configured(model)
    method, (commit, *_) = es(config), commits(config)
    cohort = [(a, result_of(a)) for a in (method.assign(0, slot, 1) for slot in range(6))]
    assert method.faults_in_commit(commit, cohort, {}) == []
    forged = msgspec.structs.replace(commit, body=msgspec.structs.replace(commit.seeds, rank=1))
    assert method.faults_in_commit(forged, cohort, {}) == [f"rank is 1, computed {RANK}"]


def test_a_member_moves_matrices_and_experts_by_low_rank_and_nothing_else(model: Path) -> None:
    arena = arena_of(configured(model))
    member = Member(7, -1, 0.5, rank=RANK)
    for name, shape in SHAPES.items():
        theta, moved = arena.tensor(name), arena.perturbed(name, member, "float32")
        if name not in MATRICES:
            assert moved.tobytes() == theta.tobytes(), name
            continue
        shift = (moved - theta).reshape(-1, *shape[-2:])
        m, n = shape[-2:]
        a = noise(7, f"{name}#A", 0, len(shift) * m * RANK).reshape(-1, m, RANK) / 4096
        b = noise(7, f"{name}#B", 0, len(shift) * n * RANK).reshape(-1, n, RANK) / 4096
        np.testing.assert_allclose(shift, -0.5 * a @ b.transpose(0, 2, 1) / RANK**0.5, atol=1e-5)


def test_names_and_shapes_decide_what_is_a_matrix() -> None:
    assert {name for name, shape in SHAPES.items() if matrix_of(name, shape)} == MATRICES
    experts = matrix_of("layers.0.mlp.experts.gate_up_proj", (4, 6, 8))
    assert experts is not None
    assert experts[:2] == (6, 8)


@pytest.mark.parametrize("kind", ["none", "momentum", "adam"])
def test_updates_are_the_same_at_once_one_by_one_and_over_ranks(
    model: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, optimiser={"kind": kind})
    at_once, one_by_one, owner = (arena_of(config, shared=shared) for shared in (False, False, True))
    made = commits(config)
    report = at_once.apply(made)
    assert report.digests == tuple(one_by_one.apply([commit]).digest for commit in made)
    monkeypatch.setattr("hpc_es.params.arena.CHUNK", 256)
    assert owner.memory_path is not None
    other = Arena.attach(owner.memory_path, model, version=0, base_digest=owner.base_digest, optimiser=kind)
    reports = [arena.apply(made, rank=rank, num_ranks=2) for rank, arena in enumerate([owner, other])]
    assert combine(reports).digests == report.digests
    before = arena_of(config)
    moved = {name for name in SHAPES if not np.array_equal(before.tensor(name), at_once.tensor(name))}
    assert moved == MATRICES


def test_a_checkpoint_and_the_commits_after_it_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    config, paths = configured(model, optimiser={"kind": "adam"}), RunPaths(tmp_path / "run")
    paths.root.mkdir()
    whole, part, made = arena_of(config), arena_of(config), commits(config)
    digest = whole.apply(made).digest
    part.apply(made[:2])
    folder = checkpoint.write(paths, part)
    again = arena_of(config)
    again.reload(folder)
    assert again.apply(made[2:]).digest == digest


def test_low_rank_in_subspaces_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"es\.rank=2 cannot be combined with es\.subspaces=2"):
        settle(settings(Path("m"), rank=2, subspaces=2), origin="here")


@pytest.mark.parametrize("rank", [-1, 17])
def test_ranks_from_1_to_16_are_allowed(model: Path, rank: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        settle(settings(model, rank=rank), origin="here")


def test_a_run_of_full_rank_has_the_digest_that_it_had_before_there_were_ranks() -> None:
    full, low = (configured(Path("m"), rank=rank) for rank in (0, 1))
    assert config_digest(full) == "8ae0752b3c5279cc"
    assert config_digest(low) != config_digest(full)
