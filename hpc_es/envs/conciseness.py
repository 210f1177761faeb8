"""Conciseness in one turn: answer a question with exactly as many characters as its short answer has.

As in ES at Scale (Qiu et al., 2025), the reward is -|length - target length| in characters, whatever the answer says;
success is to give the short answer. Questions and answers were written for this package. Invariant: the splits have no
question in common.
"""

from typing import Literal

from pydantic import validate_call

from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.errors import EnvError

QUESTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("What is 7 + 5?", "12"),
        ("What is the capital of Norway?", "Oslo"),
        ("How many legs does a spider have?", "8"),
        ("Is the number 21 prime?", "No"),
        ("What colour do blue and yellow paint make?", "Green"),
        ("Which planet is closest to the sun?", "Mercury"),
        ("What is the opposite of hot?", "Cold"),
        ("How many days does a leap year have?", "366"),
        ("What gas do plants take from the air?", "Carbon dioxide"),
        ("Who wrote Hamlet?", "Shakespeare"),
        ("What is 9 times 6?", "54"),
        ("Can a whale breathe under water?", "No"),
        ("What is the chemical symbol of gold?", "Au"),
        ("Which ocean lies between Europe and America?", "The Atlantic"),
        ("What do bees make?", "Honey"),
        ("How many sides does a hexagon have?", "6"),
        ("What is the plural of mouse?", "Mice"),
        ("What is frozen water called?", "Ice"),
        ("In which country is Kyoto?", "Japan"),
        ("What is half of 90?", "45"),
        ("Is Mount Everest higher than Mont Blanc?", "Yes"),
        ("Which month comes after April?", "May"),
        ("What is the square root of 81?", "9"),
        ("Which animal says meow?", "A cat"),
    ),
    "eval": (
        ("What is the capital of Portugal?", "Lisbon"),
        ("What is 8 + 9?", "17"),
        ("Is a tomato a mineral?", "No"),
        ("How many strings does a violin have?", "4"),
        ("What is the opposite of early?", "Late"),
        ("What do cows drink?", "Water"),
        ("Which planet has the brightest rings?", "Saturn"),
        ("In which country is the city of Lyon?", "France"),
    ),
}


class Conciseness(Env):
    instant = True

    @validate_call
    def __init__(self, *, split: Literal["train", "eval"] = "train") -> None:
        self._questions = QUESTIONS[split]
        self.num_tasks = len(self._questions)
        self._short: str | None = None

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        question, self._short = self._questions[task]
        return Observation((Message("user", question),))

    def step(self, text: str) -> StepResult:
        if self._short is None:
            raise EnvError("no episode is running; call reset first")
        short, self._short = self._short, None
        said = text.strip()
        success = said.removesuffix(".").casefold() == short.casefold()
        return StepResult(None, -abs(len(said) - len(short)), terminated=True, truncated=False, success=success)

    def facts(self, task: int) -> TaskFacts:
        super().facts(task)
        return TaskFacts(self._questions[task][0], horizon=1)
