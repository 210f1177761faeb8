"""verify believes nothing that it can compute again; replay gives back any version, bit for bit."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
from builders import Counted, built_commit, counted, es
from msgspec.structs import replace

from hpc_es.config.schema import Config
from hpc_es.envs.manifest import write_tasks
from hpc_es.errors import ConfigError, JournalDamaged, ModelError, VerifyError
from hpc_es.methods.evaluation import plan_evaluation
from hpc_es.params import Arena, checkpoint
from hpc_es.paths import RunPaths
from hpc_es.recorded.evaluate import started
from hpc_es.recorded.verify import AuditedHistory, check, replay, verify
from hpc_es.records import Commit, Episode, EvalId, Result
from hpc_es.store import records as journal
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter
from hpc_es.store.later import EvalJournal
from hpc_es.store.records import SCHEMA_VERSION

NUM_UPDATES = 5
Records = list[journal.AnyRecord]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = small_checkpoint.make(tmp_path / "model")
    values = {
        "run": {"name": "made-up", "num_updates": NUM_UPDATES, "seed": 7},
        "model": {"path": str(model), "exclude": ["*norm*"]},
        "task": {"env": "sudoku"},
        "es": {
            "population": 4,
            "tasks_per_member": 1,
            "mirrored": True,
            "sigma": {"kind": "linear", "start": 1e-2, "end": 1e-3},
            "alpha": {"kind": "cosine", "start": 5e-2, "end": 0.0},
        },
    }
    return Config.model_validate(values)


def made_up_run(config: Config, arena: Arena) -> Records:
    """The records of a head: cohorts of one centre evaluation and four members, one of them void and replaced."""
    start = journal.Started(0.0, SCHEMA_VERSION, "r", 1, 0, config.model_dump_json(), arena.base_digest, {}, "host")
    records: Records = [start]
    for version in range(NUM_UPDATES):
        assignments = [es(config, num_tasks=1).assign(version, slot, version + 1) for slot in range(4)]
        (centre,) = plan_evaluation(config, 1, 1, version)
        records.append(journal.Planned(1.0, version, (*assignments, centre)))
        records.append(journal.Voided(1.0, assignments[1].eval_id, "failed"))
        assignments[1] = es(config).replacement(assignments[1])
        records.append(journal.Planned(1.0, version, (assignments[1],)))
        digest, cohort = arena.digest(), []
        for assignment in (*assignments, centre):
            fitness = float(np.sin(100 * version + assignment.eval_id.slot)) if version != 2 else 0.25
            episodes = tuple(Episode(t, fitness, False, 1, 0, 9, 2, 0.1, 0.1, "terminated") for t in assignment.tasks)
            result = Result(assignment.eval_id, fitness, episodes, digest, 0.0, 0.0, 0.0)
            records.append(journal.Reported(1.0, "w0", result, 0.5, 0.9, 1))
            if assignment.member is not None:
                cohort.append((assignment, result))
        commit = es(config).commit(version + 1, cohort)
        records.append(journal.Committed(1.0, commit))
        report = arena.apply([commit])
        records.append(journal.Digested(1.0, commit.version, report.digest, report.update_norm, 0.0))
    return [*records, journal.Stopped(2.0, "done", True)]


def base(config: Config) -> Arena:
    return Arena.from_pretrained(config.model.path, config.model.include, config.model.exclude)


def write(root: Path, records: Sequence[journal.AnyRecord]) -> None:
    root.mkdir()
    start = records[0]
    assert isinstance(start, journal.Started)
    writer = JournalWriter.create(RunPaths(root), lambda generation, sealed: start)
    for record in records[1:]:
        writer.append(record)
    writer.sync()
    writer.close()


def test_an_honest_run_has_no_problems(config: Config) -> None:
    lines: list[str] = []
    report = check(AuditedHistory(made_up_run(config, base(config))), base(config), say=lines.append)
    assert report.ok, report.problems
    assert [line.version for line in report.versions] == list(range(NUM_UPDATES + 1))
    assert all(line.ok and line.digest == line.recorded for line in report.versions)
    assert [line.null for line in report.versions] == [False, False, False, True, False, True]
    assert report.versions[3].digest == report.versions[2].digest
    assert report.versions[1].update_norm > 0
    assert (report.num_counted, report.num_results) == (20, 25)
    assert lines == ["rebuilt theta_5 of 5"]


def test_a_run_that_stopped_between_commit_and_digest_has_no_problems(config: Config) -> None:
    records = [r for r in made_up_run(config, base(config)) if not (isinstance(r, journal.Digested) and r.version == 5)]
    report = check(AuditedHistory(records), base(config))
    assert report.ok, report.problems
    assert report.versions[-1].recorded is None


def of_commit(change: Callable[[Commit], Commit]) -> Callable[[Records], Records]:
    """Change the commit of update 2 and nothing else."""

    def apply(records: Records) -> Records:
        return [
            replace(r, commit=change(r.commit)) if isinstance(r, journal.Committed) and r.commit.version == 2 else r
            for r in records
        ]

    return apply


def with_members(commit: Commit, members: Sequence[Counted]) -> Commit:
    body = commit.seeds
    settings = (commit.null, body.num_subspaces, body.partition_seed, body.step)
    return built_commit(commit.version, body.alpha, members, *settings)


def of_body(**changes: Any) -> Callable[[Records], Records]:
    return of_commit(lambda commit: replace(commit, body=replace(commit.seeds, **changes)))


def of_member(change: Callable[[Counted], Counted], slot: int = 0) -> Callable[[Records], Records]:
    def apply(commit: Commit) -> Commit:
        members = list(counted(commit))
        members[slot] = change(members[slot])
        return with_members(commit, members)

    return of_commit(apply)


def of_results(change: Callable[[Result], Result], purpose: str = "train") -> Callable[[Records], Records]:
    """Change the result of evaluation 1.0, or of another one of version 1."""

    def apply(records: Records) -> Records:
        return [
            replace(r, result=change(r.result))
            if isinstance(r, journal.Reported) and r.result.eval_id == EvalId(1, 0, 0, purpose)
            else r
            for r in records
        ]

    return apply


def of_episodes(change: Callable[[Episode], Episode], purpose: str = "train") -> Callable[[Records], Records]:
    return of_results(lambda result: replace(result, episodes=tuple(map(change, result.episodes))), purpose)


def with_digest(records: Records) -> Records:
    return [
        replace(r, digest=r.digest ^ 1) if isinstance(r, journal.Digested) and r.version == 2 else r for r in records
    ]


def with_base(records: Records) -> Records:
    return [replace(r, base_digest=5) if isinstance(r, journal.Started) else r for r in records]


def without_plan(records: Records) -> Records:
    return [r for r in records if not (isinstance(r, journal.Planned) and r.version == 1)]


def without_update(records: Records) -> Records:
    return [r for r in records if not (isinstance(r, journal.Committed) and r.commit.version == 2)]


def reported_again(records: Records) -> Records:
    return [*records, next(r for r in records if isinstance(r, journal.Reported))]


def next_float(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(1)))


FORGERIES = {
    "a digest": (with_digest, "the run recorded"),
    "the base": (with_base, "the base model has digest"),
    "a coefficient by one bit": (of_member(lambda m: m._replace(coefficient=next_float(m.coefficient))), "coefficient"),
    "a utility": (of_member(lambda m: m._replace(utility=m.utility + 1e-9)), "utility"),
    "a fitness": (of_member(lambda m: m._replace(fitness=m.fitness + 0.1)), "was reported"),
    "a seed": (of_member(lambda m: m._replace(seed=m.seed + 1)), "not that which was evaluated"),
    "a sign": (of_member(lambda m: m._replace(sign=-m.sign)), "not that which was evaluated"),
    "a subspace": (of_body(num_subspaces=2), "num_subspaces is 2, computed 1"),
    "alpha": (of_body(alpha=7.0), "alpha"),
    "null": (of_commit(lambda c: replace(c, null=True)), "null is True, computed False"),
    "the order": (of_commit(lambda c: with_members(c, counted(c)[::-1])), "not sorted"),
    "the size": (of_commit(lambda c: with_members(c, counted(c)[:3])), "3 members"),
    "a member twice": (of_commit(lambda c: with_members(c, (counted(c)[0], *counted(c)[:3]))), "already counted"),
    "an old member": (
        of_member(lambda m: m._replace(eval_id=EvalId(0, 0))),
        "members by lag {0: 3, 1: 1}, the schedule states {0: 4}",
    ),
    "a void member": (of_member(lambda m: m._replace(eval_id=EvalId(1, 1)), slot=1), "void"),
    "a plan": (without_plan, "never planned"),
    "an update": (without_update, "commit 3 follows commit 1: an update is missing"),
    "a result twice": (reported_again, "reported twice"),
    "a result's digest": (of_results(lambda r: replace(r, digest=r.digest + 1)), "saw digest"),
    "an episode's reward": (of_episodes(lambda e: replace(e, reward=e.reward + 0.5)), "the mean of"),
    "an episode's task": (of_episodes(lambda e: replace(e, task=7)), "episodes are of tasks 7; the assignment has 0"),
    "an episode's turns": (of_episodes(lambda e: replace(e, turns=2**40)), "turns is 1099511627776"),
    "a reward of the centre": (
        of_episodes(lambda e: replace(e, reward=0.9), purpose="eval"),
        "evaluation 1.eval0: its result",
    ),
    "no episodes": (of_results(lambda r: replace(r, episodes=())), "its episodes are of tasks none"),
    "an episode too many": (of_results(lambda r: replace(r, episodes=2 * r.episodes)), "episodes are of tasks 0, 0"),
    "seconds": (of_results(lambda r: replace(r, seconds_rollout=float("nan"))), "seconds_rollout is nan"),
    "a digest that is none": (of_results(lambda r: replace(r, digest=-1)), "digest is -1"),
    "an evaluation nobody planned": (
        of_results(lambda r: replace(r, eval_id=EvalId(r.eval_id.version, 77))),
        "speaks of evaluation 1.77, which was never planned",
    ),
    "a result's failure": (of_results(lambda r: replace(r, error="worker")), "no result was reported"),
}


@pytest.mark.parametrize(("forge", "problem"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_record_is_found(config: Config, forge: Callable[[Records], Records], problem: str) -> None:
    report = check(AuditedHistory(forge(made_up_run(config, base(config)))), base(config))
    assert not report.ok
    assert any(problem in text for text in report.problems), report.problems


def test_a_member_that_the_run_seed_does_not_give_is_found(config: Config) -> None:
    records = made_up_run(config, base(config))
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 8})})
    records[0] = replace(records[0], config_json=other.model_dump_json())
    report = check(AuditedHistory(records), base(config))
    assert any("does not follow from the run seed" in text for text in report.problems)


def test_a_journal_without_records_is_refused() -> None:
    with pytest.raises(VerifyError, match="no records"):
        AuditedHistory([])


@pytest.mark.parametrize("per_pass", [1, 2, 32])
def test_every_version_gets_its_digest_however_many_are_applied_at_once(
    config: Config, per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_es.recorded.verify.COMMITS_PER_PASS", per_pass)
    assert check(AuditedHistory(made_up_run(config, base(config))), base(config)).ok


def test_verify_and_replay_read_a_run_folder(config: Config, tmp_path: Path) -> None:
    records = made_up_run(config, base(config))
    write(tmp_path / "run", records)
    assert verify(tmp_path / "run").ok
    digests = {r.version: r.digest for r in records if isinstance(r, journal.Digested)}
    for version in (1, 3, 5):
        arena = replay(tmp_path / "run", version)
        assert (arena.version, arena.digest()) == (version, digests[version])
    assert replay(tmp_path / "run").version == NUM_UPDATES
    assert replay(tmp_path / "run", 0).digest() == base(config).base_digest
    with pytest.raises(ConfigError, match="it has 0 to 5"):
        replay(tmp_path / "run", 6)


def test_replay_starts_at_the_nearest_checkpoint(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, arena = made_up_run(config, base(config)), base(config)
    write(tmp_path / "run", records)
    commits = [r.commit for r in records if isinstance(r, journal.Committed)]
    arena.apply(commits[:2])
    checkpoint.write(RunPaths(tmp_path / "run"), arena)
    applied: list[int] = []
    apply = Arena.apply

    def watched(self: Arena, commits: Sequence[Commit]) -> object:
        applied.extend(commit.version for commit in commits)
        return apply(self, commits)

    monkeypatch.setattr(Arena, "apply", watched)
    replayed = replay(tmp_path / "run", 4)
    assert applied == [3, 4]
    arena.reload(None)
    apply(arena, commits[:4])
    assert replayed.digest() == arena.digest()


def test_replay_refuses_another_base_model(config: Config, tmp_path: Path) -> None:
    write(tmp_path / "run", made_up_run(config, base(config)))
    other = small_checkpoint.make(tmp_path / "other", small_checkpoint.values(seed=1))
    with pytest.raises(VerifyError, match="use the model it began with"):
        replay(tmp_path / "run", 1, model=other)
    with pytest.raises(ModelError):
        replay(tmp_path / "run", 1, model=tmp_path / "nowhere")


def test_damaged_checkpoints_and_those_newer_than_the_journal_are_problems(config: Config, tmp_path: Path) -> None:
    records, arena, paths = made_up_run(config, base(config)), base(config), RunPaths(tmp_path / "run")
    commits = [r.commit for r in records if isinstance(r, journal.Committed)]
    last = next(n for n, r in enumerate(records) if isinstance(r, journal.Committed) and r.commit.version == 4)
    write(paths.root, records[:last])
    arena.apply(commits[:3])
    checkpoint.write(paths, arena)
    assert verify(paths.root).ok
    arena.apply(commits[3:5])
    checkpoint.write(paths, arena)
    (paths.checkpoint(3) / checkpoint.THETA).write_bytes(b"")
    with pytest.raises(JournalDamaged, match=r"at version 3, but there is .*v00000005: its end is lost. Restore"):
        verify(paths.root)
    shutil.rmtree(paths.checkpoint(5))
    (damaged,) = verify(paths.root).problems
    assert "v00000003 is damaged" in damaged


def test_a_journal_without_records_is_told_from_a_run_that_never_began(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(VerifyError, match="has no journal: nothing has run here"):
        verify(tmp_path)
    paths.segment(1).write_bytes(b"hi\n")
    with pytest.raises(VerifyError, match=r"no valid record in journal.1.hpcj \(3 bytes\)"):
        verify(tmp_path)
    paths.segment(1).unlink()
    paths.checkpoint(2).mkdir(parents=True)
    paths.hdf5.touch()
    with pytest.raises(JournalDamaged, match=r"no journal, although it has .*run.h5, .*v00000002: restore"):
        verify(tmp_path)


def test_tables_that_are_damaged_or_of_another_run_are_problems(config: Config, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write(paths.root, made_up_run(config, base(config)))
    whole = rebuild(paths.root).read_bytes()
    assert verify(paths.root).ok
    paths.hdf5.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    (problem,) = verify(paths.root).problems
    assert "run.h5 is damaged" in problem
    assert "remove it, and `hpc-es run" in problem
    paths.hdf5.write_bytes(whole[:-10])  # as a head leaves it that is killed in the middle of a write
    with pytest.warns(UserWarning, match="left in the middle of a write"):
        assert verify(paths.root).ok


def test_a_later_evaluation_of_another_run_on_the_same_base_is_a_problem(config: Config, tmp_path: Path) -> None:
    """This also holds if it saw only theta_0, which both runs have."""
    paths = RunPaths(tmp_path / "run")
    write(paths.root, made_up_run(config, base(config)))
    first = started(config, base(config).base_digest)
    EvalJournal.open(paths, "own", first).close()
    moved = {**json.loads(first.config_json), "eval": {"num_tasks": 3}}
    EvalJournal.open(paths, "other-tasks", replace(first, config_json=json.dumps(moved))).close()
    assert verify(paths.root).ok
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 8})})
    EvalJournal.open(paths, "foreign", started(other, base(config).base_digest)).close()
    (problem,) = verify(paths.root).problems
    assert "evaluation of another run: run.seed: 7 -> 8" in problem


def test_a_segment_among_the_evaluations_and_edited_tasks_are_problems(config: Config, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write(paths.root, made_up_run(config, base(config)))
    paths.evals.mkdir()
    shutil.copy(paths.segment(1), paths.later_eval("segment"))
    write_tasks(paths.tasks, config)
    paths.tasks.write_text(paths.tasks.read_text().replace('"reachable": true', '"reachable": false', 1))
    edited, misplaced = verify(paths.root).problems
    assert "tasks.json does not match its digest" in edited
    assert "is the journal of a run or of a model, not of an evaluation" in misplaced
