"""The history in prompts: whole turns only, and without thoughts if a task strips them."""

import asyncio

import pytest
from builders import built_assignment
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.config.schema import Config
from hpc_es.engine.base import Completion
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import EnvError
from hpc_es.records import EvalId
from hpc_es.worker.history import History, without_thoughts
from hpc_es.worker.rollout import Player

RULES = Message("system", "rules")


def encode(messages) -> list[int]:
    """Encode messages with one token per character and one per message."""
    return [ord(letter) for message in messages for letter in f"{message.role[0]}{message.content}"]


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


class Asks(Env):
    """Shows a number a turn, and its rules in the first one."""

    num_tasks = 1
    instant = True

    def __init__(self, history: object = 0, max_prompt_tokens: object = None, strip_thinking: bool = False) -> None:
        self.history, self.max_prompt_tokens, self.strip_thinking = history, max_prompt_tokens, strip_thinking
        self.heard: list[str] = []

    def reset(self, task: int) -> Observation:
        return Observation((RULES, Message("user", "0")))

    def step(self, text: str) -> StepResult:
        self.heard.append(text)
        done = len(self.heard) == 4
        return StepResult(None if done else ask(len(self.heard)), 0.0, done, False)


def ask(turn: int) -> Observation:
    return Observation((Message("user", f"{turn}"),))


def prompts(env: Env, room: int, turns: int = 4) -> list[str]:
    """The prompts of an episode that is answered with letters."""
    history, shown = History(env, encode, room), [env.reset(0), *map(ask, range(1, turns))]
    found = []
    for observation, answer in zip(shown, "abcdefghijkl", strict=False):
        found.append(text(history.prompt(observation)))
        history.add(answer)
    return found


@pytest.mark.parametrize(
    ("history", "last"),
    [(0, "u3"), (1, "srulesu2acu3"), (2, "srulesu1abu2acu3"), (None, "srulesu0aau1abu2acu3")],
)
def test_the_last_turns_stand_before_an_observation_and_the_rules_before_them(history, last):
    first, *_, found = prompts(Asks(history), room=1000)
    assert (first, found) == ("srulesu0", last)


def test_a_history_that_is_too_long_loses_whole_turns_the_oldest_first():
    assert prompts(Asks(None), room=14)[-1] == "srulesu2acu3"
    assert prompts(Asks(None, max_prompt_tokens=14), room=1000)[-1] == "srulesu2acu3"
    assert prompts(Asks(None, max_prompt_tokens=1000), room=14)[-1] == "srulesu2acu3"


def test_an_observation_that_is_too_long_by_itself_is_shown_all_the_same():
    assert prompts(Asks(None), room=3)[-1] == "srulesu3"


@given(
    st.lists(st.lists(st.text("xyz", max_size=9), min_size=1, max_size=3), min_size=1, max_size=9),
    st.integers(1, 80),
    st.sampled_from([1, 3, None]),
)
def test_a_prompt_is_the_newest_whole_turns_that_fit(turns, room, keeps):
    history = History(Asks(keeps), encode, room)
    past: list[str] = []
    for number, contents in enumerate(turns):
        messages = tuple(Message("user", content) for content in contents)
        prompt, now = text(history.prompt(Observation(messages))), text(encode(messages))
        candidates = ["".join(past[n:]) + now for n in range(max(0, number - (keeps or number)), number + 1)]
        assert prompt in candidates
        assert len(prompt) <= room or prompt == now
        history.add(f"{number}")
        past.append(now + text(encode([Message("assistant", f"{number}")])))


@pytest.mark.parametrize("wrong", [{"history": -1}, {"history": "all"}, {"history": True}, {"max_prompt_tokens": 0}])
def test_a_history_that_is_not_a_count_is_a_fault_of_the_environment(wrong):
    (name,) = wrong
    with pytest.raises(EnvError, match=rf"Asks\.{name} is"):
        History(Asks(**wrong), encode, 100)


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("set 1 2 3", "set 1 2 3"),
        ("<think>row 1\n</think>\n set 1 2 3", "set 1 2 3"),
        ("<think>a</think>b<think>c</think> d", "b d"),
        ("I began in the prompt.</think>set 1 2 3", "set 1 2 3"),
        ("set 1 2 3 <think>or else", "set 1 2 3"),
        ("<think>never done", ""),
        ("", ""),
    ],
)
def test_thoughts_are_taken_out_of_answers(answer, left):
    assert without_thoughts(answer) == left


class Thinks:
    """An engine that thinks aloud and keeps what it was asked."""

    class tokenizer:
        chat_template = None
        encode = staticmethod(lambda text: [ord(letter) for letter in text])

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def generate(self, prompt, sampling, *, seed, choices=None) -> Completion:
        self.asked.append(text(prompt))
        return Completion(f"<think>hm</think>{len(self.asked)}", len(prompt), 5, truncated=False)


def play(env: Env) -> Thinks:
    config = Config.model_validate(
        {
            "run": {"name": "history", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": "none:None", "chat": False},
        }
    )
    engine = Thinks()
    assignment = built_assignment(EvalId(0, 0), 1, "train", None, (0,), sampling_seed=1)
    asyncio.run(Player(config, engine, lambda kind: env).play(assignment))
    return engine


def test_the_loop_keeps_history_and_takes_thoughts_out_where_the_task_says_so():
    env = Asks(history=1, strip_thinking=True)
    assert play(env).asked[-1] == "rules\n2\n3\n3"
    assert env.heard == ["1", "2", "3", "4"]
    env = Asks(history=1)
    assert play(env).asked[-1] == "rules\n2\n<think>hm</think>3\n3"
    assert env.heard[0] == "<think>hm</think>1"
