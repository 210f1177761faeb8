"""Episodes of one evaluation: what is an outcome, what is a fault, and what the faults lead to."""

import asyncio
import time
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import scripted
from builders import built_assignment

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.envs.base import Message, Observation, StepResult
from hpc_es.errors import EngineError, EnvError, ModelError
from hpc_es.records import EvalId
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
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, tuple(tasks), sampling_seed=11)
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


def test_a_model_without_a_chat_template_is_refused_before_the_first_episode():
    with pytest.raises(ModelError, match=r"no chat template: set task\.chat=false"):
        Player(make_config("Steps", chat=True), scripted.Echo(), lambda kind: scripted.Steps())


def test_the_chat_template_gets_its_options():
    class Templated(scripted.Letters):
        chat_template = "..."
        given: dict[str, object] = {}  # noqa: RUF012

        def apply_chat_template(self, chat, add_generation_prompt, return_dict, **options):
            self.given.update(options)
            assert chat[0] == {"role": "user", "content": chat[0]["content"]}
            assert (add_generation_prompt, return_dict) == (True, True)
            return {"input_ids": self.encode(chat[0]["content"])}

    engine = scripted.Echo()
    engine.tokenizer = Templated()
    play("Steps", engine=engine, chat=True, chat_options={"enable_thinking": False})
    assert engine.tokenizer.given == {"enable_thinking": False}


def test_an_environment_that_raises_once_is_played_again():
    scripted.FAULTS["raises"] = 1
    episodes = play("Raises", tasks=(4,))
    assert (episodes[0].reward, episodes[0].retries) == (4.0, 1)


def test_an_environment_that_raises_twice_voids_the_evaluation_and_is_quoted():
    with pytest.raises(EnvError, match=r"scripted:AlwaysRaises: reset\(5\) raised OSError: no such sandbox"):
        play("AlwaysRaises")


def test_an_instant_environment_is_played_without_a_thread_and_its_faults_are_named_all_the_same():
    scripted.FAULTS["raises"] = 1
    scripted.Instant.threads.clear()
    with_threads, without = play("Steps"), play("Instant")
    assert scripted.Instant.threads == {"MainThread"}
    assert [episode.reward for episode in without] == [episode.reward for episode in with_threads]
    assert sum(episode.retries for episode in without) == 1
    scripted.FAULTS["raises"] = 1000
    with pytest.raises(EnvError, match=r"scripted:Instant: step 1 of task 4 raised ValueError: the tool server"):
        play("Instant", tasks=(4,))
    scripted.FAULTS.clear()


@pytest.mark.parametrize("fault", [None, OSError("no such sandbox")])
def test_the_first_environment_is_made_alone_and_the_others_at_the_same_time(fault: OSError | None):
    num_making, most, is_first = 0, {True: 0, False: 0}, True

    def make(kind: str) -> scripted.Steps:
        nonlocal num_making, is_first
        num_making, was_first = num_making + 1, is_first
        time.sleep(0.2)
        most[was_first] = max(most[was_first], num_making)
        num_making, is_first = num_making - 1, False
        if fault is not None:
            raise fault
        return scripted.Steps()

    player = Player(make_config("Steps"), scripted.Echo(), make)
    with pytest.raises(EnvError, match="no such sandbox") if fault else nullcontext():
        asyncio.run(player.play(built_assignment(EvalId(0, 0), 1, "train", None, tuple(range(4)), sampling_seed=11)))
    assert most[True] == 1 < most[False]


def test_a_reward_of_nan_is_a_fault_and_not_a_number():
    with pytest.raises(EnvError, match="rewarded with nan"):
        play("NanReward")


def message(content: object) -> Observation:
    return Observation((Message("user", content),))  # type: ignore[arg-type]


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail(error: BaseException):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        ("reward", float("inf"), "rewarded with inf"),
        ("reward", np.float32("inf"), "rewarded with"),
        ("reward", 1e200, "rewarded with 1e\\+200"),
        ("reward", 10**400, "must be a finite number"),
        ("reward", "1.0", "rewarded with '1.0'"),
        ("reward", lambda: None, "rewarded with None"),
        ("step", lambda: None, "step returned NoneType"),
        ("step", (None, 1.0, True, False), "step returned tuple"),
        ("step", fail(SystemExit(1)), "raised SystemExit: 1"),
        ("step", fail(KeyboardInterrupt()), "raised KeyboardInterrupt"),
        ("step", fail(Silent()), "raised Silent: .*cannot be shown"),
        ("reset", "hello", "shows str"),
        ("reset", Observation(("hello",)), "not Message objects with text"),
        ("reset", message(None), "not Message objects with text"),
        ("reset", message(""), "no tokens"),
        ("reset", Observation(()), "no tokens"),
        ("reset", Observation((Message("user", "x"),), choices=(1,)), "not texts"),
        ("close", fail(OSError("busy")), r"close after task 1 raised OSError: busy"),
    ],
)
def test_whatever_breaks_the_contract_is_a_fault_that_is_named(monkeypatch, place, given, words):
    monkeypatch.setattr(scripted, "ODD", {place: given})
    with pytest.raises(EnvError, match=words):
        play("Odd", tasks=(1,))


def test_the_words_of_an_environment_are_cut_and_can_be_sent(monkeypatch):
    monkeypatch.setattr(scripted, "ODD", {"step": fail(ValueError("\ud800" + "x" * 10_000_000))})
    with pytest.raises(EnvError) as caught:
        play("Odd", tasks=(1,))
    assert len(msgspec.msgpack.encode(str(caught.value))) < 2000


def test_rewards_that_add_up_beyond_the_bound_are_a_fault(monkeypatch):
    shown = Observation((Message("user", "task 1 turn 1"),))
    monkeypatch.setattr(scripted, "ODD", {"step": StepResult(shown, 6e99, False, False)})
    with pytest.raises(EnvError, match=r"the rewards of task 1 add up to more than 1e\+100"):
        play("Odd", tasks=(1,))


def test_a_reward_that_is_not_a_number_is_quoted_briefly(monkeypatch):
    monkeypatch.setattr(scripted, "ODD", {"reward": "\x1b[2J" * 1_000_000})
    with pytest.raises(EnvError, match="was rewarded with") as caught:
        play("Odd", tasks=(1,))
    assert len(str(caught.value)) < 500


def test_a_prompt_that_the_tokenizer_refuses_is_a_fault_of_the_environment(monkeypatch):
    engine = scripted.Echo()
    monkeypatch.setattr(engine, "tokenizer", object())
    with pytest.raises(EnvError, match="task 1 shows what cannot be put into tokens: AttributeError"):
        play("Steps", tasks=(1,), engine=engine)


@pytest.mark.parametrize("reward", [np.float32(0.5), np.float64(0.5), 0.5])
def test_rewards_of_any_kind_of_number_become_plain_ones(monkeypatch, reward):
    monkeypatch.setattr(scripted, "ODD", {"reward": reward})
    (episode,) = play("Odd", tasks=(1,))
    assert (type(episode.reward), episode.reward) == (float, 0.5)
    msgspec.msgpack.encode(episode)


def test_an_environment_that_never_returns_is_left_behind_after_its_time():
    with pytest.raises(EnvError, match=r"did not return within task.step_timeout=0.05 s"):
        play("NeverReturns", tasks=(1,), step_timeout=0.05)


def test_a_worker_gives_up_when_too_many_calls_never_returned(monkeypatch):
    monkeypatch.setattr(rollout, "MAX_STUCK_CALLS", 2)
    with pytest.raises(EngineError, match="must be restarted"):
        play("NeverReturns", tasks=(1,), step_timeout=0.05)


@pytest.mark.parametrize("env", ["TooLong", "LongChoices"])
def test_a_prompt_that_outgrows_the_context_ends_the_episode_with_the_reward_so_far(env):
    (episode,) = play(env, tasks=(1,))
    assert (episode.ended, episode.reward, episode.turns) == ("context", 0.25, 1)


def test_nothing_is_in_flight_after_an_evaluation_failed():
    engine = scripted.Echo()
    scripted.FAULTS["raises"] = 1000
    with pytest.raises(EnvError):
        play("Raises", tasks=range(12), engine=engine)
    assert engine.in_flight == 0
    scripted.FAULTS.clear()


def test_no_episode_waits_for_the_others():
    """Some episodes of a batch end before another one gets its second answer."""
    engine = scripted.Echo()
    slow, asked = "task 0 turn 0", []
    generate = engine.generate

    async def held_up(prompt, sampling, **others):
        text = "".join(map(chr, prompt))
        asked.append(text)
        while text == slow and "task 3 turn 2" not in asked:
            await asyncio.sleep(0.001)
        return await generate(prompt, sampling, **others)

    engine.generate = held_up
    episodes = play("Steps", tasks=(0, 1, 2, 3), engine=engine)
    assert [episode.turns for episode in episodes] == [3, 3, 3, 3]
    assert asked.index("task 3 turn 2") < asked.index("task 0 turn 1")
