"""A model behind any server with OpenAI's chat API, as a frozen baseline.

Invariants: it is a generator only, because its weights are not accessible. An answer is the text that the server sent;
everything else (refused, unreachable, unreadable) is an error and never an empty text. The key is sent in requests and
is written nowhere.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import openai

from hpc_es.config.schema import EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine.base import Chat, Completion, EngineInfo, Generator, Prompt
from hpc_es.errors import ConfigError, ContextFull, EngineError, EnvError
from hpc_es.quoting import quote

log = logging.getLogger(__name__)

MAX_RETRIES = 30
"""Of one request that was refused for now (429, 5xx) or did not come through: with the client's pauses of up to 8 s, or
what the server asks for, some four minutes, in which a server can be started anew."""
START_RETRIES = 2
CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 10.0
MAX_QUOTE = 300
"""Characters of a server's words that are quoted."""

_HELLO = Chat(({"role": "user", "content": "1 + 1 ="},), {})
_CONTEXT = re.compile(
    r"context[ _](length|size|window)|(prompt|input) is too long|maximum number of tokens|reduce the length", re.I
)
_FILLS_IN = ("vllm", "sglang")
"""Servers (`owned_by`) that take what a request leaves out from the checkpoint's generation_config.json, which can name
penalties and limits that engines of ours do not know: to them everything is said."""
_UNTOUCHED: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class Endpoint(Generator):
    """See the base class."""

    tokenizer = None

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        assert engine.url is not None, "the schema sees to it"
        self._url, self._model, self._engine = engine.url, model.path, engine
        self._key = _key(engine.api_key_env)
        self._client = openai.AsyncOpenAI(
            base_url=self._url,
            api_key=self._key or "none",
            timeout=openai.Timeout(engine.request_timeout, connect=CONNECT_TIMEOUT_S),
            max_retries=START_RETRIES,
        )
        # without a key, the header is left out
        self._options: Any = {} if self._key else {"headers": {"Authorization": openai.Omit()}}
        self._slots = asyncio.Semaphore(engine.max_concurrent)
        self._served: list[_Card] = []
        self._fingerprint = ""
        self._way_to_choose = 0
        self._digest = int.from_bytes(hashlib.blake2b(f"{self._url}\0{self._model}".encode(), digest_size=8).digest())

    @classmethod
    async def start(cls, model: ModelConfig, engine: EngineConfig) -> "Endpoint":
        """Ask the server for its models, and the model for a few tokens.

        Errors: EngineError when the server does not answer within seconds, refuses the key, or has no such model;
        ConfigError for a key that cannot be sent.
        """
        self = cls(model, engine)
        try:
            self._served = await self._list()
            await self._greet()
        except BaseException:
            await self.close()
            raise
        self._client.max_retries = MAX_RETRIES  # it has answered once, so it may come back later
        return self

    async def _greet(self) -> None:
        """Check that the model answers. Errors: EngineError."""
        try:
            async with asyncio.timeout(self._engine.request_timeout):
                answer = await self._ask(_HELLO, self._body(_HELLO, SamplingConfig(max_tokens=16), seed=0))
        except TimeoutError:
            raise EngineError(
                f"{self._model} at {self._url} did not answer within engine.request_timeout="
                f"{self._engine.request_timeout:g} s"
            ) from None
        _completion(answer, self._url)
        whole = msgspec.convert(answer, _Answer)
        self._fingerprint = whole.system_fingerprint or ""
        if whole.usage is None:
            log.warning("%s does not count tokens: episodes will show 0", self._url)
        if self._served and self._model not in self._names:
            log.warning("%s answers for %s, but lists only %s", self._url, self._model, _few(self._names))

    @property
    def info(self) -> EngineInfo:
        card = next((card.known() for card in self._served if card.id == self._model), "")
        facts = {
            "engine": "endpoint",
            "openai": openai.__version__,
            "url": self._url,
            "model": self._model,
            "listed": _few(self._names),
            "card": card,
            "fingerprint": self._fingerprint,
            "choices": "constrained generation, not ranked by log-probability",
        }
        return EngineInfo(self._digest, {name: fact for name, fact in facts.items() if fact})

    async def close(self) -> None:
        await self._client.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        if not isinstance(prompt, Chat):
            raise EngineError("engine.kind=endpoint takes messages, not token ids")
        chat, body = prompt, self._body(prompt, sampling, seed)
        async with self._slots:
            if choices is not None:
                return await self._choose(chat, body, choices)
            try:
                return _completion(await self._ask(chat, body), self._url)
            except ContextFull:  # ask again without max_tokens, so that the answer gets the room that is left
                return _completion(await self._ask(chat, {**body, "max_tokens": None}), self._url)

    async def _choose(self, chat: Chat, body: Mapping[str, Any], choices: Sequence[str]) -> Completion:
        """Answer with one of the choices, if the server can restrict the model to them.

        A way that the server does not understand is not tried again.
        """
        if not choices or not all(choices) or len(set(choices)) < len(choices):
            raise EnvError(f"choices {list(choices)!r} must be texts, at least one, none empty and none twice")
        longest = max(len(choice.encode(errors="replace")) for choice in choices) + 1  # a token is a byte at least
        plain = {**body, "stop": None, "presence_penalty": 0.0, "max_tokens": max(body["max_tokens"], longest)}
        ways = (
            {"structured_outputs": {"choice": list(choices)}},
            {"guided_choice": list(choices)},  # vLLM before 0.12, which passes over the other
        )
        found = "these fields have no effect"
        for number in range(self._way_to_choose, len(ways)):
            try:
                completion = _completion(await self._ask(chat, {**plain, **ways[number]}), self._url)
            except _Refused as error:
                found = str(error)
            else:
                if completion.text in choices or completion.truncated:
                    return completion
            self._way_to_choose = max(self._way_to_choose, number + 1)
        raise ConfigError(
            f"{self._url} does not keep {self._model} to given choices, neither by structured_outputs nor by "
            f"guided_choice ({found}), and no chat endpoint ranks them: play this task with free text (its `free` mode)"
        )

    def _body(self, chat: Chat, sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        """The fields of a request beside model and messages; a field with None is left out."""
        untouched = _UNTOUCHED if any(card.owned_by in _FILLS_IN for card in self._served) else {}
        return {
            **untouched,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or untouched.get("top_k"),
            "presence_penalty": sampling.presence_penalty,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": seed % 2**63,
            "chat_template_kwargs": dict(chat.options) or None,
        }

    async def _ask(self, chat: Chat, body: Mapping[str, Any]) -> object:
        """The body of the server's response, unchecked. Errors: as in `generate`; _Refused for a wrong request."""
        said = {"model": self._model, "messages": list(chat.messages), **body, **self._engine.extra}
        said = {key: value for key, value in said.items() if value is not None}
        try:
            return await self._client.post("/chat/completions", body=said, cast_to=object, options=self._options)
        except openai.OpenAIError as error:
            raise self._explained(error) from error
        except UnicodeEncodeError as error:
            raise EnvError(f"a message or a choice cannot be sent: {error}") from error
        except ValueError as error:
            raise EngineError(f"{self._url} sent invalid JSON: {error}") from error

    async def _list(self) -> list["_Card"]:
        """The models that the server lists; empty if it has no list. Errors: EngineError when it cannot be
        reached, or refuses the key."""
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                listed = await self._client.get("/models", cast_to=object, options=self._options)
                return msgspec.convert(listed, _Listed).data
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.APIConnectionError) as error:
            raise self._explained(error) from error
        except TimeoutError:
            raise EngineError(
                f"{self._url}, asked for its models, did not answer within {LIST_TIMEOUT_S:g} s"
            ) from None
        except (openai.OpenAIError, ValueError):
            return []  # many servers have no list; a missing model is noticed at the first request

    @property
    def _names(self) -> list[str]:
        return [card.id for card in self._served]

    def _explained(self, error: openai.OpenAIError) -> EngineError:
        """The error for a failed request."""
        url, model, tries = self._url, self._model, self._client.max_retries + 1
        said = _said(error).replace(self._key or "\0", "(the key)")
        if isinstance(error, openai.APIConnectionError):
            cause = error.__cause__ or error
            words = f"{type(cause).__name__} {cause}".strip()
            limit = f"engine.request_timeout={self._engine.request_timeout:g} s"
            return EngineError(f"{url} was not reached or did not answer, {tries} times in a row ({words}; {limit})")
        if not isinstance(error, openai.APIStatusError):
            return EngineError(f"{url} gave no answer of {model}: {said}")
        status = f"HTTP {error.status_code}: {said}"
        if error.status_code in (401, 403):
            name = self._engine.api_key_env
            held = "holds the key that was sent" if self._key else "is not set, so no key was sent"
            return EngineError(f"{url} refuses access to {model} ({status}); the environment variable {name} {held}")
        if error.status_code in (404, 405):
            has = f"it has {_few(self._names)}" if self._served else "is that its base URL, as in http://host:8000/v1?"
            return EngineError(f"{url} has no model {model} that chats ({status}); {has}")
        if error.status_code in (408, 409, 429) or error.status_code >= 500:
            return EngineError(f"{url} refused a request for {model} {tries} times in a row, at last with {status}")
        if _CONTEXT.search(f"{error.code} {error.type} {said}"):
            return ContextFull(f"{url}: the conversation does not fit into the context of {model} ({status})")
        return _Refused(f"{url} refuses a request for {model} ({status}); engine.extra can leave fields of it out")


class _Refused(EngineError):
    """The server understood the request and refused it."""


class _Card(msgspec.Struct):
    """The part that is read of a server's description of one of its models."""

    id: str
    owned_by: str | None = None
    root: str | None = None
    max_model_len: int | None = None

    def known(self) -> str:
        facts = {"owned_by": self.owned_by, "root": self.root, "max_model_len": self.max_model_len}
        return ", ".join(f"{name}={fact}" for name, fact in facts.items() if fact is not None)


class _Listed(msgspec.Struct):
    data: list[_Card]


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Tokens of one answer: what is no such number would spoil sums, or fit into no table."""


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Answer(msgspec.Struct):
    """The part that is read of a chat completion; servers differ in the rest."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None
    system_fingerprint: str | None = None


def _completion(answer: object, url: str) -> Completion:
    """The completion in a response. Errors: EngineError for a response that is none, or that was broken off."""
    try:
        said = msgspec.convert(answer, _Answer)
    except msgspec.ValidationError as error:
        shown = answer if isinstance(answer, str) else json.dumps(answer)
        raise EngineError(f"{url} sent no chat completion ({error}): {quote(shown, MAX_QUOTE)}") from None
    (choice, *_), usage = said.choices, said.usage or _Usage()
    if choice.finish_reason in ("abort", "error"):
        raise EngineError(f"{url} broke an answer off: finish_reason={choice.finish_reason}")
    # JSON can contain lone surrogates, which cannot be written to files.
    text = (choice.message.content or "").encode(errors="replace").decode()
    tokens_in, tokens_out = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return Completion(text, tokens_in, tokens_out, truncated=choice.finish_reason == "length")


def _key(variable: str) -> str | None:
    """The key in an environment variable. Errors: ConfigError for a key that cannot be sent in a header."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise ConfigError(f"the environment variable {variable} holds what cannot be a key: blanks, or beyond ASCII")
    return key or None


def _said(error: openai.OpenAIError) -> str:
    """The server's message, shortened."""
    body = getattr(error, "body", None)
    words = body.get("message") if isinstance(body, Mapping) else None
    return quote(str(words or getattr(error, "message", None) or error), MAX_QUOTE)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
