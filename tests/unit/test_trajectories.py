"""Which episodes are kept word by word, and that keeping them harms nothing."""

import asyncio
from collections import Counter

import pytest
import scripted
from builders import built_assignment
from hypothesis import given
from hypothesis import strategies as st
from test_rollout import make_config

from hpc_es import envs, methods
from hpc_es.methods.evaluation import plan_evaluation
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, EvalId
from hpc_es.worker.rollout import Player
from hpc_es.worker.trajectories import (
    MAX_CHARACTERS,
    TrajectoryFile,
    is_sampled,
    read_trajectories,
    shortened,
)


def assignment(slot: int, num_tasks: int, kind="train") -> Assignment:
    return built_assignment(EvalId(7, slot), 8, kind, None, tuple(range(num_tasks)), sampling_seed=11)


def config(wanted: int, members: int = 4):
    made = make_config("Steps")
    store, es = ({"trajectories": wanted}, {"population": members})
    return made.model_copy(update={"store": made.store.model_copy(update=store), "es": made.es.model_copy(update=es)})


@given(st.integers(0, 60), st.integers(2, 8), st.integers(1, 6))
def test_a_version_keeps_the_wanted_number_of_episodes_spread_over_members(wanted, members, num_tasks):
    settings = config(wanted, members)
    kept = [
        (slot, position)
        for slot in range(members)
        for position in range(num_tasks)
        if is_sampled(settings, assignment(slot, num_tasks), position)
    ]
    assert len(kept) == min(wanted, members * num_tasks)
    counts = Counter(slot for slot, _ in kept)
    assert max(counts.values(), default=0) - min((counts[slot] for slot in range(members)), default=0) <= 1


def test_of_the_evaluated_policy_the_first_tasks_are_kept_and_of_the_centre_on_the_members_batch_none():
    settings = config(2)
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"batch": 1, "repeats": 2})})
    evaluated = list(plan_evaluation(settings, methods.make(settings).eval_batch, 5, 7))
    assert [a.eval_id.slot for a in evaluated if is_sampled(settings, a, 0)] == [0, 1]
    assert not any(is_sampled(settings, assignment(0, 5, "centre"), position) for position in range(5))


def play(paths: RunPaths, env: str = "Steps", worker: str = "w0", slot: int = 1):
    settings = make_config(env)
    keep = TrajectoryFile(paths.trajectory_file(worker), worker).append
    player = Player(settings, scripted.Echo(), lambda kind: envs.make_for(settings, kind), keep)
    return asyncio.run(player.play(assignment(slot, 5)))


def test_an_episode_is_kept_verbatim_with_its_outcome(tmp_path):
    episodes = play(RunPaths(tmp_path))
    (found,) = read_trajectories(RunPaths(tmp_path))
    assert (found.eval_id, found.position, found.worker) == (EvalId(7, 1), 1, "w0")
    assert found.episode == episodes[1]
    assert [turn.messages[0].content for turn in found.turns] == [f"task 1 turn {turn}" for turn in range(3)]
    assert [turn.answer for turn in found.turns] == [turn.messages[0].content for turn in found.turns]
    assert [turn.reward for turn in found.turns] == [0.0, 0.0, 1.0]


def test_an_episode_that_was_played_again_is_kept_once(tmp_path):
    scripted.FAULTS["raises"] = 2
    play(RunPaths(tmp_path), "Raises")
    (found,) = read_trajectories(RunPaths(tmp_path))
    assert found.episode.turns == len(found.turns) == 3


def test_nothing_is_written_for_an_evaluation_without_a_sampled_episode(tmp_path):
    play(RunPaths(tmp_path), slot=9)
    assert not RunPaths(tmp_path).trajectories.exists()


def test_a_torn_line_costs_only_itself(tmp_path):
    paths = RunPaths(tmp_path)
    play(paths, worker="w0", slot=0)
    play(paths, worker="w0", slot=1)
    play(paths, worker="w1", slot=1)
    file = paths.trajectory_file("w0")
    file.write_bytes(file.read_bytes()[:-9])
    assert sorted((t.worker, t.eval_id.slot) for t in read_trajectories(paths)) == [("w0", 0), ("w1", 1)]


def test_an_evaluation_goes_through_when_its_trajectories_cannot_be_written(tmp_path, caplog):
    (tmp_path / "trajectories").write_text("a file in the way")
    assert len(play(RunPaths(tmp_path))) == 5
    assert "trajectories could not be written" in caplog.text


@pytest.mark.parametrize("text", ["short", "\ud800", "x" * 10**6])
def test_texts_are_cut_to_the_length_limit(text):
    short = shortened(text)
    short.encode()
    assert len(short) < MAX_CHARACTERS + 100
    assert (short == text) == (text == "short")
