"""The optimiser's state is part of the digest, of checkpoints, of replay and of every worker."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import small_checkpoint
from builders import es

from hpc_es.config.schema import Config
from hpc_es.errors import ModelError, StoreError
from hpc_es.methods.es.optimiser import STATE, Kind
from hpc_es.noise import reference, tensor_id
from hpc_es.params import Arena, check_memory, checkpoint, combine, num_bytes
from hpc_es.params.export import export
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import replay, verify
from hpc_es.records import Commit, Episode, Member, Result
from hpc_es.store import first_schema
from hpc_es.store import records as journal
from hpc_es.store.history import History
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION

KINDS: list[Kind] = ["momentum", "adam"]
NUM_UPDATES = 4


def configured(model: Path, kind: Kind) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "state", "num_updates": NUM_UPDATES, "seed": 5},
            "model": {"path": str(model), "exclude": ["*norm*"]},
            "task": {"env": "sudoku"},
            "es": {"population": 4, "subspaces": 2, "optimiser": {"kind": kind}},
        }
    )


def assignments(config: Config, version: int) -> list[journal.Assignment]:
    return [es(config).assign(version, slot, version + 1) for slot in range(4)]


def result_of(assignment: journal.Assignment, digest: int = 0) -> Result:
    value = float(np.sin(10 * assignment.version + assignment.eval_id.slot))
    episodes = tuple(Episode(t, value, False, 1, 0, 9, 2, 0.1, 0.1, "terminated") for t in assignment.tasks)
    return Result(assignment.eval_id, value, episodes, digest, 0.0, 0.0, 0.0)


def commits(config: Config) -> list[Commit]:
    made = []
    for version in range(NUM_UPDATES):
        cohort = [(a, result_of(a)) for a in assignments(config, version)]
        made.append(es(config).commit(version + 1, cohort))
    return made


def arena_of(config: Config, *, shared: bool = False) -> Arena:
    model, kind = config.model, config.es.optimiser.kind
    return Arena.from_pretrained(model.path, model.include, model.exclude, shared=shared, optimiser=kind)


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    return configured(small_checkpoint.make(tmp_path / "model"), request.param)


def state_of(arena: Arena) -> dict[str, np.ndarray]:
    return {name: values for name, values in arena.contents().items() if "#" in name}


def test_the_state_begins_at_zero_with_the_base_models_digest(config: Config) -> None:
    arena = arena_of(config)
    kept = STATE[config.es.optimiser.kind]
    assert set(state_of(arena)) == {f"{name}#{letter}" for name in arena.trained for letter in kept}
    assert not any(values.any() for values in state_of(arena).values())
    assert arena.base_digest == arena.digest() == Arena.from_pretrained(config.model.path).digest()
    assert arena.num_parameters == Arena.from_pretrained(config.model.path).num_parameters


def test_the_digest_counts_the_state_under_its_own_names(config: Config) -> None:
    arena = arena_of(config)
    report = arena.apply(commits(config))
    expected = sum(reference.digest(v.ravel(), tensor_id(name)) for name, v in arena.contents().items()) % 2**64
    assert report.digest == arena.digest() == expected != arena.theta_digest()


def test_the_digest_differs_when_only_the_state_differs(config: Config) -> None:
    arena = arena_of(config)
    digest = arena.apply(commits(config)).digest
    for values in state_of(arena).values():
        values.view(np.uint32).flat[-1] ^= np.uint32(1)
        stream = arena.stream(Member(3, 1, 1e-3), "bfloat16")
        assert len(list(stream)) == len(arena.names)
        assert arena.digest() == stream.digest != digest  # also what a worker proves with every result
        values.view(np.uint32).flat[-1] ^= np.uint32(1)
    assert arena.digest() == digest


def test_many_commits_at_once_give_the_state_of_one_by_one(config: Config) -> None:
    at_once, one_by_one = arena_of(config), arena_of(config)
    report = at_once.apply(commits(config))
    assert report.digests == tuple(one_by_one.apply([commit]).digest for commit in commits(config))
    assert at_once.memory.tobytes() == one_by_one.memory.tobytes()
    assert all(values.any() for values in state_of(at_once).values())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_state(config: Config, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_es.params.arena.CHUNK", 1024)
    whole, owner = arena_of(config), arena_of(config, shared=True)
    assert owner.memory_path is not None
    model, facts = config.model, {"version": 0, "base_digest": owner.base_digest, "optimiser": owner.optimiser}
    others = [
        Arena.attach(owner.memory_path, model.path, model.include, model.exclude, **facts)  # type: ignore[arg-type]
        for _ in range(num_ranks - 1)
    ]
    made = commits(config)
    reports = [arena.apply(made, rank=r, num_ranks=num_ranks) for r, arena in enumerate([owner, *others])]
    assert combine(reports).digests == whole.apply(made).digests
    assert others[-1].digest() == whole.digest()


def test_a_checkpoint_keeps_the_state(config: Config, tmp_path: Path) -> None:
    run, arena, made = RunPaths(tmp_path / "run"), arena_of(config), commits(config)
    (tmp_path / "run").mkdir()
    arena.apply(made[:2])
    folder = checkpoint.write(run, arena)
    again = arena_of(config)
    again.reload(folder)
    assert again.memory.tobytes() == arena.memory.tobytes()
    assert again.apply(made[2:]).digests == arena.apply(made[2:]).digests
    again.reload(None)
    assert (again.version, again.digest()) == (0, again.base_digest)
    assert not any(values.any() for values in state_of(again).values())
    with pytest.raises(StoreError, match="differ from the model"):  # theta alone is not this version
        Arena.from_pretrained(config.model.path).reload(folder)


def test_commits_of_another_optimiser_are_refused_and_change_nothing(config: Config) -> None:
    plain = Arena.from_pretrained(config.model.path)
    with pytest.raises(StoreError, match=rf"es\.optimiser\.kind={config.es.optimiser.kind}"):
        plain.apply(commits(config))
    assert (plain.version, plain.digest()) == (0, plain.base_digest)
    without = configured(Path(config.model.path), "none")
    with pytest.raises(StoreError, match=r"es\.optimiser\.kind=none"):
        arena_of(config).apply(commits(without))


def test_replay_and_verify_rebuild_the_state_from_the_journal(config: Config, tmp_path: Path) -> None:
    arena, run = arena_of(config), RunPaths(tmp_path / "run")
    run.root.mkdir()
    text = config.model_dump_json()
    writer = JournalWriter.create(
        run,
        lambda generation, sealed: journal.Started(0.0, SCHEMA_VERSION, "r", 1, 0, text, arena.base_digest, {}, "host"),
    )
    digests = [arena.digest()]
    for commit in commits(config):
        planned = assignments(config, arena.version)
        writer.append(journal.Planned(0.5, arena.version, tuple(planned)))
        for assignment in planned:
            writer.append(journal.Reported(1.0, "w", result_of(assignment, digests[-1]), 0.5, 0.9, 1))
        writer.append(journal.Committed(1.0, commit))
        report = arena.apply([commit])
        digests.append(report.digest)
        writer.append(journal.Digested(1.0, commit.version, report.digest, report.update_norm, 0.0))
        if commit.version == 2:
            checkpoint.write(run, arena)
    writer.sync()
    writer.close()
    assert verify(run.root).problems == []
    for version, digest in enumerate(digests):
        assert replay(run.root, version).digest() == digest
    assert list(History.read(run.root).commits.values()) == commits(config)


def test_an_exported_folder_can_be_checked_without_the_state(config: Config, tmp_path: Path) -> None:
    arena = arena_of(config)
    digest = arena.apply(commits(config)).digest
    manifest = export(arena, Path(config.model.path), tmp_path / "out")
    assert manifest.digest == digest
    assert manifest.theta_digest == Arena.from_pretrained(tmp_path / "out").base_digest != digest


def test_the_state_counts_in_the_memory_that_a_node_must_have(config: Config) -> None:
    kind, path = config.es.optimiser.kind, config.model.path
    each = num_bytes(path, optimiser=kind)
    assert each == (1 + len(STATE[kind])) * num_bytes(path)
    scoped = num_bytes(path, ("*norm*",), optimiser=kind)
    assert num_bytes(path) < scoped < each
    assert arena_of(config).num_bytes == num_bytes(path, ("*",), ("*norm*",), kind)
    with pytest.raises(ModelError, match=f"state of {kind}"):
        check_memory(path, 2, limit=2 * each - 1, optimiser=kind)


def test_the_record_of_a_step_survives_the_wire_and_old_records_have_none(config: Config) -> None:
    commit = commits(config)[0]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(commit), type=Commit) == commit
    old = {"type": "Committed", "time": 1.0, "commit": {"version": 1, "alpha": 0.5, "members": [], "null": True}}
    (read,) = first_schema.decode(memoryview(msgspec.msgpack.encode([old])))
    assert isinstance(read, journal.Committed)
    assert read.commit.seeds.step is None
