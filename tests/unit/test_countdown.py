"""Countdown: solvable tasks, disjoint splits, the reward of ES at Scale, and answers that try to cheat. Conciseness."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_es import envs
from hpc_es.envs.base import TaskFacts
from hpc_es.envs.conciseness import QUESTIONS
from hpc_es.envs.countdown import puzzle, value
from hpc_es.errors import ConfigError, EnvError


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value that all the numbers can make."""
    if len(numbers) == 1:
        return {numbers[0]}
    found = set()
    for one, other in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[one], numbers[other]
        rest = tuple(n for place, n in enumerate(numbers) if place not in (one, other))
        for made in {a + b, a - b, a * b} | ({a / b} if b else set()):
            found |= reachable((*rest, made))
    return found


@pytest.mark.parametrize("task", range(12))
def test_every_task_has_a_solution(task: int) -> None:
    numbers, target = puzzle(0, "train", task, (3, 4), 99, 100)
    assert Fraction(target) in reachable(tuple(map(Fraction, numbers)))
    assert 1 < target <= 100


def test_splits_are_disjoint_whatever_the_seeds() -> None:
    def seen(split: str, seed: int) -> set[tuple[tuple[int, ...], int]]:
        drawn = (puzzle(seed, split, task, (2, 3), 9, 30) for task in range(500))
        return {(tuple(sorted(numbers)), target) for numbers, target in drawn}

    assert not (seen("train", 0) | seen("train", 1)) & (seen("eval", 0) | seen("eval", 2))
    assert seen("train", 0) == seen("train", 0) != seen("train", 1)


def answer(text: str):
    """Result of an answer to the numbers 2, 3, 4 and the target 14."""
    env = envs.make("countdown", numbers=3)
    env.reset(0)
    env._numbers, env._target = (2, 3, 4), 14
    return env.step(text)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>3 * 4 is 12</think> <answer>2 + 3 * 4</answer>", 1.1),
        ("3 * 4 is 12</think>\n<answer>(3*4) + 2 = 14</answer>\n", 1.1),
        ("<answer>2 + 3 * 4</answer>", 1.0),
        ("<think></think><answer>2 * 3 * 4</answer>", 0.1),
        ("<think></think><answer>4 * 4 - 2</answer>", 0.1),
        ("<think></think><answer>3 * 4 + 2 + 2 - 2</answer>", 0.1),
        ("<think></think><answer>14</answer>", 0.1),
        ("<think></think><answer>2 + 3 * 4</answer> done", 1.0),
        ("2 + 3 * 4", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_earns_a_tenth_for_its_format_and_one_for_being_right(text: str, reward: float) -> None:
    result = answer(text)
    assert result.reward == pytest.approx(reward)
    assert result.success == (reward >= 1)


@pytest.mark.parametrize(
    "text",
    [
        "2**3+4",
        "2//3*4",
        "-2+3*4",
        "2,3,4",
        "02+3*4",
        "2+3*4.0",
        "(" * 100 + "2",
        "2/(3-3)",
        "2 3 4",
        "len(2)",
        "²+3+4",
    ],
)
def test_only_the_numbers_and_the_four_operations_make_an_expression(text: str) -> None:
    assert value(text, (2, 3, 4)) is None


@given(st.text("0123456789+-*/() =\n", max_size=60))
def test_no_expression_raises(text: str) -> None:
    found = value(text, (1, 2))
    assert found is None or found in reachable((Fraction(1), Fraction(2)))


def test_targets_that_cannot_be_made_are_a_mistake_in_the_options() -> None:
    with pytest.raises(ConfigError, match="raise max_target"):
        envs.make("countdown", numbers=2, max_number=2, max_target=2)  # 1 + 1 alone, which is held out


@pytest.mark.parametrize(
    ("said", "reward", "success"),
    [(" 12\n", 0, True), ("The answer is 12.", -15, False), ("", -2, False), ("13", 0, False)],
)
def test_conciseness_rewards_the_length_and_nothing_else(said: str, reward: float, success: bool) -> None:
    env = envs.make("conciseness")
    env.reset(0)
    result = env.step(said)
    assert (result.reward, result.success, result.terminated) == (reward, success, True)


def test_the_questions_of_the_splits_differ_and_none_is_asked_twice() -> None:
    asked = [question for split in QUESTIONS.values() for question, _ in split]
    assert len(asked) == len(set(asked))


def test_tasks_are_named_by_their_numbers_and_target() -> None:
    countdown, conciseness = envs.make("countdown", num_tasks=3), envs.make("conciseness", split="eval")
    numbers, target = puzzle(0, "train", 2, (3, 4), 99, 100)
    assert countdown.facts(2) == TaskFacts(f"{' '.join(map(str, numbers))} -> {target}", horizon=1)
    assert conciseness.facts(0) == TaskFacts("What is the capital of Portugal?", horizon=1)
    for env in (countdown, conciseness):
        with pytest.raises(EnvError, match=f"tasks are 0..{env.num_tasks - 1}"):
            env.facts(env.num_tasks)
