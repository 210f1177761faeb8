"""What an environment is.

An environment plays one episode at a time and owns its prompt: an observation is all that the model sees in
this turn or, where the environment asks for `history`, all that is new in it. `terminated` (the task is over) is
kept apart from `truncated` (a limit of the task was reached). A task's own limits are outcomes and are scored;
anything an environment raises is a fault of the machinery and is never reward 0.
"""

import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_es.errors import EnvError
from hpc_es.records import MAX_REWARD


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str
    images: tuple[bytes, ...] = ()
    """PNG or JPEG files, shown in front of the content; for vision-language models alone."""

    @property
    def readable(self) -> str:
        """As text, for people and logs: `[image, 34 kB]` stands for an image."""
        shown = [f"[image, {max(1, round(len(image) / 1000))} kB]" for image in self.images]
        return "\n".join([*shown, self.content])


@dataclass(frozen=True)
class Observation:
    """The prompt of one turn."""

    messages: tuple[Message, ...]
    choices: tuple[str, ...] | None = None
    """When given, the answer is one of these, of any length: the model ranks them by their log-probability after the
    prompt (sampling.choice_score), and a temperature draws among them."""


@dataclass(frozen=True)
class StepResult:
    observation: Observation | None
    """None when the episode is over."""
    reward: float
    """Of this step; an episode's reward is the sum. Must be finite."""
    terminated: bool
    truncated: bool
    success: bool = False
    invalid: bool = False
    """The action was refused."""
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def is_reward(value: object) -> bool:
    """Whether this may be a step's reward: a finite number, numpy's too, of at most MAX_REWARD either way."""
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= MAX_REWARD
    except OverflowError:
        return False


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task before anybody plays it; kept in the run's manifest of evaluation tasks."""

    id: str
    """Its name in the task's own data, the same whatever split or seed the run has: `goal 17`."""
    horizon: int | None = None
    """The least number of turns that can succeed (H*), where the task knows it."""
    reachable: bool = True
    """Whether any play can succeed at all: the share of such tasks is the ceiling of a success rate."""


class Env(ABC):
    """One episode at a time; `reset` starts a new one. Options are keyword arguments of the constructor."""

    num_tasks: int
    """Tasks are 0..num_tasks-1, the same in every process that makes the environment with the same options."""
    instant: bool = False
    """Making it, and each of its calls, takes microseconds and waits for nothing: it is run in the worker's event loop,
    without a thread, which would cost more, and without a time limit."""
    history: int | None = 0
    """Past turns (observation and answer) that the loop puts before an observation, None: all. System messages that the
    first observation opens with always stay in front. What is too long loses whole turns, the oldest first."""
    forgets: bool = True
    """Off: a history that is too long loses nothing; the episode ends (`context`) when no answer fits behind it."""
    max_prompt_tokens: int | None = None
    """With a history that forgets: the length that makes it lose turns; default: what leaves room for an answer."""
    shows_images: bool = False
    """Messages carry images, which engine and model must be able to take."""
    strip_thinking: bool = False
    """`<think>...</think>` is taken out of answers, before `step` and before they become history."""

    @abstractmethod
    def reset(self, task: int) -> Observation:
        """Start task `task`. Errors: EnvError when it is outside 0..num_tasks-1."""

    @abstractmethod
    def step(self, text: str) -> StepResult:
        """Take the model's answer. Errors: EnvError when no episode is running."""

    def facts(self, task: int) -> TaskFacts:
        """Of one task; between episodes or within one. Errors: EnvError when it is outside 0..num_tasks-1."""
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        return TaskFacts(str(task))

    def close(self) -> None:
        """Free what the environment holds."""
