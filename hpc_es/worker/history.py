"""The prompt of a turn: what an environment shows now, behind what its task keeps of the turns before.

Invariant: no message is ever cut. What is too long loses whole turns, the oldest first and for good; the system
messages that the first observation opens with stay in front.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence, Sized
from itertools import takewhile
from typing import Generic, TypeVar

from hpc_es.envs.base import Env, Message, Observation
from hpc_es.errors import EnvError

PromptT = TypeVar("PromptT", bound=Sized)
"""Token ids, whose number is the prompt's length; or what an engine takes that makes tokens of its own."""

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_END_OF_THOUGHT = "</think>"


class History(Generic[PromptT]):
    """Of one episode. `encode`: messages -> the prompt that they make. `room`: tokens of a prompt behind which a whole
    answer fits; None where tokens cannot be counted: then turns alone limit the history.

    Errors: EnvError for an environment whose `history` or `max_prompt_tokens` is no count.
    """

    def __init__(self, env: Env, encode: Callable[[Sequence[Message]], PromptT], room: int | None) -> None:
        for name, least in (("history", 0), ("max_prompt_tokens", 1)):
            value = getattr(env, name)
            if value is not None and not (type(value) is int and value >= least):
                raise EnvError(f"{type(env).__name__}.{name} is {value!r}; it must be None or an int from {least}")
        self._encode = encode
        self._limit = min(room, env.max_prompt_tokens or room) if env.forgets and room is not None else None
        self._turns: deque[tuple[Message, ...]] = deque(maxlen=env.history)
        self._front: tuple[Message, ...] | None = () if env.history == 0 else None
        self._now: tuple[Message, ...] = ()

    def prompt(self, observation: Observation) -> PromptT:
        """What the model sees now; longer than the limit only where the observation alone is."""
        self._now = observation.messages
        if self._front is None:
            self._front = tuple(takewhile(lambda message: message.role == "system", self._now))
            self._now = self._now[len(self._front) :]
        while True:
            past = [message for turn in self._turns for message in turn]
            prompt = self._encode((*self._front, *past, *self._now))
            if self._limit is None or len(prompt) <= self._limit or not self._turns:
                return prompt
            self._turns.popleft()

    def add(self, answer: str) -> None:
        """The answer to what was shown last: a turn is over."""
        self._turns.append((*self._now, Message("assistant", answer)))


def without_thoughts(answer: str) -> str:
    """An answer without its thinking, also where that was cut off, or began in the prompt (as some templates have it).

    `<think>a</think> b`, `a</think> b` and `b <think>a` are all `b`.
    """
    left = _THOUGHT.sub("", answer)
    return left.rpartition(_END_OF_THOUGHT)[2].strip()
