"""One engine goes to any version of a recorded run, in any order, and plays there what the run would have played."""

import asyncio
import shutil
from pathlib import Path

import pytest
from builders import built_assignment, es
from msgspec.structs import replace

from hpc_es.config import Config, save
from hpc_es.errors import ConfigError, DigestMismatch, StoreError
from hpc_es.params import Arena, checkpoint
from hpc_es.params.lab_model import write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.records import Assignment, Episode, EvalId, Result
from hpc_es.results import fitness_of
from hpc_es.seeds import eval_sampling_seed
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION

NUM_UPDATES = 4


def make_run(folder: Path, optimiser: str = "none") -> Path:
    """Four updates of the laboratory's model, a checkpoint of theta_2, and a void evaluation that was replaced."""
    write_lab_model(folder / "model", 8)
    config = Config.model_validate(
        {
            "run": {"name": "run", "num_updates": NUM_UPDATES},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "task": {"env": "lab", "chat": False},
            "es": {
                "population": 4,
                "sigma": 0.5,
                "alpha": 0.5,
                "tasks_per_member": 3,
                "optimiser": {"kind": optimiser},
            },
            "sampling": {"max_tokens": 1},
            "engine": {"kind": "lab", "max_model_len": 64, "threads": 1},
        }
    )
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    save(config, paths.config)
    arena = Arena.from_pretrained(config.model.path, optimiser=config.es.optimiser.kind)
    start = journal.Started(0.0, SCHEMA_VERSION, "run", 1, 0, config.model_dump_json(), arena.base_digest, {}, "host")
    writer = JournalWriter.create(paths, lambda generation, sealed: start)
    for version in range(NUM_UPDATES):
        assignments = [es(config, 99).assign(version, slot, version + 1) for slot in range(4)]
        again = es(config).replacement(assignments[1])
        writer.append(journal.Planned(1.0, version, (*assignments, again)))
        writer.append(journal.Voided(1.0, assignments[1].eval_id, "a fault"))
        assignments[1] = again
        results = [made_up_result(assignment, arena.digest()) for assignment in assignments]
        for result in results:
            writer.append(journal.Reported(1.0, "w0", result, 0.5, 0.9, 1))
        cohort = list(zip(assignments, results, strict=True))
        commit = es(config).commit(version + 1, cohort)
        report = arena.apply([commit])
        writer.append(journal.Committed(1.0, commit))
        writer.append(journal.Digested(1.0, commit.version, report.digest, report.update_norm, 0.0))
        if commit.version == 2:
            checkpoint.write(paths, arena)
    writer.append(journal.Stopped(2.0, "done", True))
    writer.close()
    return paths.root


def made_up_result(assignment: Assignment, digest: int) -> Result:
    reward = 0.1 * assignment.eval_id.slot
    episodes = tuple(Episode(task, reward, False, 1, 0, 9, 2, 0.1, 0.1, "terminated") for task in assignment.tasks)
    return Result(assignment.eval_id, fitness_of(episodes), episodes, digest, 0.0, 0.0, 0.0)


async def visit(recorded: Recorded, versions: list[int]) -> list[tuple[int, float]]:
    """(digest, fitness) of the centre at each version."""
    found = []
    async with Solo.start(recorded) as solo:
        for version in versions:
            await solo.become(version, None)
            seed = eval_sampling_seed(recorded.config.run.seed)
            result = await solo.play(built_assignment(EvalId(version, 0), 0, "eval", None, tuple(range(9)), seed))
            assert [episode.task for episode in result.episodes] == list(range(9))
            found.append((result.digest, result.fitness))
    return found


@pytest.mark.parametrize("optimiser", ["none", "adam"])
def test_every_version_is_reached_from_every_other_with_the_runs_own_bits(tmp_path: Path, optimiser: str) -> None:
    recorded = Recorded.read(make_run(tmp_path, optimiser))
    upwards = asyncio.run(visit(recorded, [0, 1, 2, 3, 4]))
    assert [digest for digest, _ in upwards] == [recorded.digests[version] for version in range(5)]
    jumps = [4, 1, 1, 3, 0, 2, 4, 0]
    assert asyncio.run(visit(recorded, jumps)) == [upwards[version] for version in jumps]


def test_a_member_is_played_as_the_run_would_have_and_the_centre_comes_back(tmp_path: Path) -> None:
    recorded = Recorded.read(make_run(tmp_path))
    assignments = [a for eval_id, a in sorted(recorded.members.items()) if eval_id.version == 2]

    async def play() -> list[Result]:
        async with Solo.start(recorded) as solo:
            results = []
            for member in (assignments[0].member, None, assignments[2].member, assignments[0].member, None):
                await solo.become(2, member)
                results.append(await solo.play(replace(assignments[0], tasks=tuple(range(40)))))
            return results

    first, centre, other, again, back = [[e.reward for e in result.episodes] for result in asyncio.run(play())]
    assert first == again != other
    assert centre == back != first


def test_parameters_that_are_not_the_runs_are_not_played(tmp_path: Path) -> None:
    recorded = Recorded.read(make_run(tmp_path))
    recorded.digests[3] ^= 1
    with pytest.raises(DigestMismatch, match="theta_3 was rebuilt with digest"):
        asyncio.run(visit(recorded, [3]))


def test_the_record_has_members_that_count_and_their_results(tmp_path: Path) -> None:
    recorded = Recorded.read(make_run(tmp_path))
    assert sorted(recorded.members) == sorted(recorded.results)
    assert [str(eval_id) for eval_id in sorted(recorded.members)][:4] == ["0.0", "0.1r1", "0.2", "0.3"]
    assert recorded.version(None) == 4
    with pytest.raises(ConfigError, match="version 5 does not exist"):
        recorded.version(5)


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    root = make_run(tmp_path)
    RunPaths(root).segment(1).unlink()
    shutil.rmtree(RunPaths(root).checkpoints, ignore_errors=True)
    with pytest.raises(StoreError, match="it is not the folder of a run that has begun"):
        Recorded.read(root)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded.read(make_run(tmp_path))
    (recorded.paths.checkpoint(2) / checkpoint.THETA).write_bytes(b"")
    assert asyncio.run(visit(recorded, [3, 2]))[0][0] == recorded.digests[3]
    assert asyncio.run(visit(recorded, [2]))[0][0] == recorded.digests[2]
    assert "skipping it" in caplog.text
