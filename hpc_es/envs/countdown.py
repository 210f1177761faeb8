"""Countdown in one turn: reach the target with all the numbers, each used once, with + - * / and parentheses.

Reward as in ES at Scale (Qiu et al., 2025): 0.1 for an answer in the right format, and 1 for a right answer.
Invariant: every task has a solution, and its numbers and target alone decide its split, so no held-out task ever
appears in training, whatever the seeds.
"""

import ast
import operator
import random
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, validate_call

from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.errors import ConfigError, EnvError
from hpc_es.seeds import derive

EVAL_SHARE = 4
"""One task in EVAL_SHARE is held out."""
FORMAT_REWARD = 0.1
MAX_CHARACTERS = 200
"""Most characters of an expression; no right one is longer."""
MAX_DRAWS = 10_000

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_FORMAT = re.compile(r"\s*(?:<think>)?.*?</think>\s*<answer>[^<]*</answer>\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Countdown(Env):
    instant = True

    @validate_call
    def __init__(
        self,
        *,
        numbers: Annotated[int, Field(ge=2, le=6)] | None = None,
        max_number: Annotated[int, Field(ge=2, le=999)] = 99,
        max_target: Annotated[int, Field(ge=2, le=9999)] = 100,
        split: Literal["train", "eval"] = "train",
        num_tasks: Annotated[int, Field(ge=1)] = 4096,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        """Tasks are generated from these options.

        numbers: how many numbers a task has; by default 3 or 4.
        max_number: largest number.
        max_target: largest target.
        num_tasks: number of tasks; they may repeat.
        seed: seed of the tasks.
        """
        self.num_tasks = num_tasks
        self._counts = (3, 4) if numbers is None else (numbers,)
        self._max_number, self._max_target, self._split, self._seed = max_number, max_target, split, seed
        self._running = False
        puzzle(seed, split, 0, self._counts, max_number, max_target)  # refuse impossible options before a run starts

    def reset(self, task: int) -> Observation:
        self._numbers, self._target = self._puzzle(task)
        self._running = True
        listed = f"{', '.join(map(str, self._numbers[:-1]))} and {self._numbers[-1]}"
        text = (
            f"Use the numbers {listed}, each of them exactly once, with the operations +, -, *, / and parentheses, to "
            f"make {self._target}. Think inside <think> </think>, then give the expression alone inside <answer> "
            "</answer>, for example <answer>(1 + 2) * 3</answer>."
        )
        return Observation((Message("user", text),))

    def step(self, text: str) -> StepResult:
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        self._running = False
        answers = _ANSWER.findall(text)
        worth = value(answers[-1], self._numbers) if answers else None
        right = worth == self._target
        reward = FORMAT_REWARD * bool(_FORMAT.fullmatch(text)) + right
        return StepResult(None, reward, terminated=True, truncated=False, success=right, invalid=worth is None)

    def facts(self, task: int) -> TaskFacts:
        """`3 4 7 -> 25`"""
        numbers, target = self._puzzle(task)
        return TaskFacts(f"{' '.join(map(str, numbers))} -> {target}", horizon=1)

    def _puzzle(self, task: int) -> tuple[tuple[int, ...], int]:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        return puzzle(self._seed, self._split, task, self._counts, self._max_number, self._max_target)


def value(expression: str, numbers: tuple[int, ...]) -> Fraction | None:
    """Value of an expression; None if it is invalid, divides by zero or does not use each number exactly once.

    Only the left side of an equation counts.
    """
    text = expression.split("=")[0].strip()
    if len(text) > MAX_CHARACTERS or not re.fullmatch(r"[0-9+\-*/() \n]+", text):
        return None
    try:
        tree = ast.parse(text.replace("\n", " "), mode="eval").body
        used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return _evaluate(tree) if used == Counter(numbers) else None
    except (SyntaxError, ZeroDivisionError, ValueError, MemoryError, RecursionError):
        return None


def _evaluate(node: ast.AST) -> Fraction:
    """Exact value of a syntax tree. Errors: ValueError for anything but numbers and the four operations."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result: Fraction = _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        return result
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError(f"{type(node).__name__} is not an operation of this game")


@lru_cache(maxsize=2**14)
def puzzle(
    seed: int, split: str, task: int, counts: tuple[int, ...], max_number: int, max_target: int
) -> tuple[tuple[int, ...], int]:
    """(numbers, target) of a task. Errors: ConfigError when such tasks are too rare."""
    rng = random.Random(derive(seed, "countdown", split, task))
    for _ in range(MAX_DRAWS):
        numbers = tuple(rng.randint(1, max_number) for _ in range(rng.choice(counts)))
        target = _combine(numbers, rng)
        if target is None or target.denominator != 1 or not 1 < target <= max_target or target in numbers:
            continue
        named = ",".join(map(str, sorted(numbers)))
        if (derive(0, "split", named, int(target)) % EVAL_SHARE == 0) == (split == "eval"):
            return numbers, int(target)
    raise ConfigError(
        f"hardly any {counts} numbers up to {max_number} give a target up to {max_target}; raise max_target or lower "
        "max_number"
    )


def _combine(numbers: tuple[int, ...], rng: random.Random) -> Fraction | None:
    """The value of a random expression of all the numbers."""
    left = [Fraction(number) for number in numbers]
    while len(left) > 1:
        one, other = (left.pop(rng.randrange(len(left))) for _ in range(2))
        operation = rng.choice(list(_OPERATIONS.values()))
        if operation is operator.truediv and not other:
            return None
        left.append(operation(one, other))
    return left[0]
