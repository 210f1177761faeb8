"""The prompt of a turn: what an environment shows now, behind what its task keeps of the turns before.

Invariant: no message is ever cut. What is too long loses whole turns, the oldest first and for good; the system
messages that the first observation opens with stay in front.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile

from hpc_es.envs.base import Env, Message, Observation
from hpc_es.errors import EnvError

Encode = Callable[[Sequence[Message]], list[int]]
"""Messages -> token ids of the prompt that they make."""

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_END_OF_THOUGHT = "</think>"


class History:
    """Of one episode. `room`: tokens of a prompt behind which a whole answer fits.

    Errors: EnvError for an environment whose `history` or `max_prompt_tokens` is no count.
    """

    def __init__(self, env: Env, encode: Encode, room: int) -> None:
        for name, least in (("history", 0), ("max_prompt_tokens", 1)):
            value = getattr(env, name)
            if value is not None and not (type(value) is int and value >= least):
                raise EnvError(f"{type(env).__name__}.{name} is {value!r}; it must be None or an int from {least}")
        self._encode = encode
        self._limit = room if env.max_prompt_tokens is None else min(env.max_prompt_tokens, room)
        self._turns: deque[tuple[Message, ...]] = deque(maxlen=env.history)
        self._front: tuple[Message, ...] | None = () if env.history == 0 else None
        self._now: tuple[Message, ...] = ()

    def prompt(self, observation: Observation) -> list[int]:
        """Token ids of what the model sees now; more than the limit only where the observation alone is."""
        self._now = observation.messages
        if self._front is None:
            self._front = tuple(takewhile(lambda message: message.role == "system", self._now))
            self._now = self._now[len(self._front) :]
        while True:
            past = [message for turn in self._turns for message in turn]
            tokens = self._encode((*self._front, *past, *self._now))
            if len(tokens) <= self._limit or not self._turns:
                return tokens
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
