"""One engine goes to any version of a recorded run, in any order, and plays there what the run would have played."""

import asyncio
import shutil
from pathlib import Path

import pytest
from builders import built_assignment
from msgspec.structs import replace
from solo_run import make_run

from hpc_es.errors import ConfigError, DigestMismatch, StoreError
from hpc_es.params import checkpoint
from hpc_es.paths import RunPaths
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.records import EvalId, Result
from hpc_es.seeds import eval_sampling_seed


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
