"""The interface that every environment implements.

An environment plays one episode at a time and writes the prompts: an observation is everything that the model sees in a
turn or, if the environment sets `history`, everything that is new in the turn. `terminated` (the task is over) is
distinct from `truncated` (a limit of the task was reached). Reaching a task's own limits is an outcome and is scored;
an exception from an environment is a fault and is never scored as reward 0.
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
    """PNG or JPEG files, shown before the content; only for vision-language models."""

    @property
    def readable(self) -> str:
        """The message as text, for people and logs; `[image, 34 kB]` stands for an image."""
        shown = [f"[image, {max(1, round(len(image) / 1000))} kB]" for image in self.images]
        return "\n".join([*shown, self.content])


@dataclass(frozen=True)
class Observation:
    """The prompt of one turn."""

    messages: tuple[Message, ...]
    choices: tuple[str, ...] | None = None
    """The possible answers, of any length; None for free text. The model ranks them by their log-probability after the
    prompt (sampling.choice_score), and with a temperature the answer is drawn among them."""


@dataclass(frozen=True)
class StepResult:
    observation: Observation | None
    """None when the episode is over."""
    reward: float
    """Reward of this step, finite; an episode's reward is the sum over its steps."""
    terminated: bool
    truncated: bool
    success: bool = False
    invalid: bool = False
    """Whether the action was refused."""
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def is_reward(value: object) -> bool:
    """Whether a value is a valid reward of a step: a finite number, also of numpy, from -MAX_REWARD to MAX_REWARD."""
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= MAX_REWARD
    except OverflowError:
        return False


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a task that are known without playing it; kept in the run's manifest of evaluation tasks."""

    id: str
    """The task's name in its data, independent of the run's split and seed, for example `goal 17`."""
    horizon: int | None = None
    """The smallest number of turns that can succeed (H*); None if unknown."""
    reachable: bool = True
    """Whether the task can be solved at all. The share of such tasks is the highest possible success rate."""


class Env(ABC):
    """Plays one episode at a time; `reset` starts a new one. Options are keyword arguments of the constructor."""

    num_tasks: int
    """Number of tasks. Tasks are 0..num_tasks-1, and the same in every process that uses the same options."""
    instant: bool = False
    """Whether creating the environment, and each of its calls, takes microseconds and never waits. It then runs in the
    worker's event loop, without a time limit and without a thread, which would cost more than the call."""
    history: int | None = 0
    """Number of past turns (observation and answer) that precede an observation in the prompt; None for all. System
    messages at the start of the first observation always stay. If the prompt is too long, the oldest turns are dropped
    first."""
    forgets: bool = True
    """Whether a history that is too long loses its oldest turns. If not, the episode ends (`context`) when no answer
    fits after the prompt."""
    max_prompt_tokens: int | None = None
    """If the environment forgets, the prompt length above which turns are dropped; by default, the longest that leaves
    room for an answer."""
    shows_images: bool = False
    """Whether messages carry images, which the engine and the model must support."""
    strip_thinking: bool = False
    """Whether `<think>...</think>` is removed from answers before `step` and from the history."""

    @abstractmethod
    def reset(self, task: int) -> Observation:
        """Start task `task`. Errors: EnvError when it is outside 0..num_tasks-1."""

    @abstractmethod
    def step(self, text: str) -> StepResult:
        """Take the model's answer. Errors: EnvError when no episode is running."""

    def facts(self, task: int) -> TaskFacts:
        """Facts about one task; may be called at any time. Errors: EnvError when it is outside 0..num_tasks-1."""
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        return TaskFacts(str(task))

    def close(self) -> None:
        """Release the environment's resources."""
