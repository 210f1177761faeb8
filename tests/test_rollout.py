"""Episodes of one evaluation: what is an outcome, what is a fault, and what the faults lead to."""

import asyncio

import pytest
import scripted

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.errors import EngineError, EnvError
from hpc_es.es.records import Assignment, EvalId
from hpc_es.worker import rollout
from hpc_es.worker.rollout import Player


def make_config(env: str, **task) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "rollout", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": f"scripted:{env}", "chat": False, **task},
            "engine": {"kind": "transformers", "max_concurrent": 4, "max_model_len": 500},
        }
    )


def play(env: str, tasks=(5, 3, 8), engine=None, **task):
    config = make_config(env, **task)
    player = Player(config, engine or scripted.Echo(), lambda kind: envs.make_for(config, kind))
    assignment = Assignment(EvalId(0, 0), 1, "train", None, tuple(tasks), sampling_seed=11)
    return asyncio.run(player.play(assignment))


def test_episodes_come_in_the_order_of_their_tasks_with_what_happened():
    episodes = play("Steps")
    assert [episode.task for episode in episodes] == [5, 3, 8]
    assert [episode.reward for episode in episodes] == [5.0, 3.0, 8.0]
    first = episodes[0]
    assert (first.turns, first.success, first.ended, first.retries) == (3, True, "terminated", 0)
    assert (first.tokens_in, first.tokens_out) == (3 * len("task 5 turn 0"), 3)


def test_no_more_episodes_run_at_once_than_allowed():
    engine = scripted.Echo()
    play("Steps", tasks=range(20), engine=engine)
    assert 2 <= engine.most <= 4


def test_every_turn_of_every_episode_has_its_own_seed_and_the_same_one_next_time():
    first, second = scripted.Echo(), scripted.Echo()
    play("Steps", tasks=range(8), engine=first)
    play("Steps", tasks=range(8), engine=second)
    assert len(set(first.seeds)) == 24
    assert sorted(first.seeds) == sorted(second.seeds)


def test_an_environment_that_raises_once_is_played_again():
    scripted.FAULTS["raises"] = 1
    episodes = play("Raises", tasks=(4,))
    assert (episodes[0].reward, episodes[0].retries) == (4.0, 1)


def test_an_environment_that_raises_twice_voids_the_evaluation_and_is_quoted():
    with pytest.raises(EnvError, match=r"scripted:AlwaysRaises: reset\(5\) raised OSError: no such sandbox"):
        play("AlwaysRaises")


def test_a_reward_of_nan_is_a_fault_and_not_a_number():
    with pytest.raises(EnvError, match="rewarded with nan"):
        play("NanReward")


def test_an_environment_that_never_returns_is_left_behind_after_its_time():
    with pytest.raises(EnvError, match=r"did not return within task.step_timeout=0.05 s"):
        play("NeverReturns", tasks=(1,), step_timeout=0.05)


def test_a_worker_gives_up_when_too_many_calls_never_returned(monkeypatch):
    monkeypatch.setattr(rollout, "MAX_STUCK_CALLS", 2)
    with pytest.raises(EngineError, match="must start afresh"):
        play("NeverReturns", tasks=(1,), step_timeout=0.05)


def test_a_prompt_that_outgrows_the_context_ends_the_episode_with_the_reward_so_far():
    (episode,) = play("TooLong", tasks=(1,))
    assert (episode.ended, episode.reward, episode.turns) == ("context", 0.25, 1)


def test_nothing_is_in_flight_after_an_evaluation_failed():
    engine = scripted.Echo()
    scripted.FAULTS["raises"] = 1000
    with pytest.raises(EnvError):
        play("Raises", tasks=range(12), engine=engine)
    assert engine.in_flight == 0
    scripted.FAULTS.clear()
