"""Present one of our engines to lm-eval as a model.

Invariant: lm-eval decides on prompts and scores; the engine only generates and scores tokens. Tokenisation is that of
lm-eval's own wrapper of transformers, and a prompt that leaves no room for the answer loses its beginning, as there.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
from lm_eval.api.model import TemplateLM

from hpc_es.config.schema import SamplingConfig
from hpc_es.engine.base import Engine
from hpc_es.errors import EngineError
from hpc_es.recorded.retention.tasks import SEED

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

T = TypeVar("T")
SECONDS_BETWEEN_WORDS = 30.0
"""Seconds between two messages of progress."""


class EngineModel(TemplateLM):
    """A model for lm-eval. `run` runs a coroutine in the engine's event loop; `max_length` is the most tokens of prompt
    and answer together."""

    def __init__(
        self,
        engine: Engine,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        *,
        max_length: int,
        chat_options: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.tokenizer: Any = engine.tokenizer
        self.num_shortened = 0
        """Number of prompts so far whose beginning was cut off."""
        self._engine, self._run, self._say = engine, run, say
        self._max_length, self._chat_options = max_length, chat_options

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Apply the chat template; a system message that it refuses is put before the first user message."""
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_options,
        }
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, **options))
        except jinja2.TemplateError:
            if chat_history[0]["role"] != "system":
                raise
            system, user, *others = chat_history
            merged = {**user, "content": f"{system['content']}\n{user['content']}"}
            return str(self.tokenizer.apply_chat_template([merged, *others], **options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template has already written the first token
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Generate answers greedily, as all our tasks require."""
        return self._all([self._answer(*request.args) for request in requests])

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scored

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (sum of log-probabilities, False). The second value would say whether the answer is the greedy one,
        which none of our scores uses."""
        by_prompt = [list(group) for _, group in itertools.groupby(requests, key=lambda request: request[1])]
        scored = self._all([self._score(group[0][1], [tuple(each[2]) for each in group]) for group in by_prompt])
        return [(sum(each), False) for scores in scored for each in scores]

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no retention task scores whole texts")

    async def _answer(self, context: str, settings: dict[str, Any]) -> str:
        room = settings["max_gen_toks"]
        prompt = self._fitting(self.tok_encode(context), room)
        sampling = SamplingConfig(temperature=0, max_tokens=room, stop=tuple(settings["until"]))
        return (await self._engine.generate(prompt, sampling, seed=SEED)).text

    async def _score(self, prompt: list[int], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        room = 1 + max(map(len, answers))
        return await self._engine.log_probabilities(self._fitting(prompt, room), answers)

    def _fitting(self, prompt: list[int], room: int) -> list[int]:
        kept = self._max_length - room
        if kept < 1:
            raise EngineError(f"an answer of {room} tokens leaves no room within --max-length {self._max_length}")
        self.num_shortened += len(prompt) > kept
        return prompt[-kept:]

    def _all(self, requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run all requests concurrently; return answers in their order. The first error cancels the rest."""
        done, said = 0, time.monotonic()

        async def counted(request: Coroutine[Any, Any, T]) -> T:
            nonlocal done, said
            answer = await request
            done += 1
            if time.monotonic() - said > SECONDS_BETWEEN_WORDS:
                said = time.monotonic()
                self._say(f"  {done} of {len(requests)} prompts")
            return answer

        async def side_by_side() -> list[T]:
            running = [asyncio.ensure_future(counted(request)) for request in requests]
            try:
                return await asyncio.gather(*running)
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)

        answers: list[T] = self._run(side_by_side())
        return answers
