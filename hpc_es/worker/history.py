"""Builds the prompt of a turn: the messages of earlier turns, as far as the task keeps them, and the new observation.

Invariant: no message is ever cut. From a prompt that is too long, whole turns are removed for good, the oldest first;
the system messages at the start of the first observation stay at the front.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence, Sized
from itertools import takewhile
from typing import Generic, TypeVar

from hpc_es.envs.base import Env, Message, Observation
from hpc_es.errors import EnvError

PromptT = TypeVar("PromptT", bound=Sized)
"""Token ids, whose number is the length of the prompt, or messages for an engine that makes the tokens itself."""

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_END_OF_THOUGHT = "</think>"


class History(Generic[PromptT]):
    """The history of one episode.

    `encode` turns messages into a prompt. `room`: maximum number of tokens of a prompt that leaves room for a whole
    answer; None if tokens cannot be counted: then only the number of turns limits the history.

    Errors: EnvError for an environment whose `history` or `max_prompt_tokens` is not a valid number.
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
        """The prompt for a new observation. It exceeds the limit only if the observation alone does."""
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
        """Add the answer to the last observation; this ends the turn."""
        self._turns.append((*self._now, Message("assistant", answer)))


def without_thoughts(answer: str) -> str:
    """An answer without its thinking, also if the thinking was cut off, or began in the prompt (as in some templates).

    `<think>a</think> b`, `a</think> b` and `b <think>a` are all `b`.
    """
    left = _THOUGHT.sub("", answer)
    return left.rpartition(_END_OF_THOUGHT)[2].strip()
