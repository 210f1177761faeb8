"""The laboratory's engine: a language model small enough that a whole run takes seconds. Needs numpy and no torch.

Arena, noise and updates are the real ones; the live model is that of `hpc_es.params.lab_model`, in numpy. Invariant: a
request's answer depends on its prompt, its settings, its seed and the member, and on nothing that ran before or beside
it. Answers are computed in the event loop (some ten microseconds a token), passes over the arena in a thread.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from hpc_es.config.schema import EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine.base import Completion, EngineInfo, Prompt, SampledTokens, token_ids
from hpc_es.engine.in_process import InProcessEngine, Live
from hpc_es.engine.probe import prove_noise_reaches
from hpc_es.engine.requests import answer_room, choice_completion, choice_tokens, chosen, draw, single_tokens
from hpc_es.errors import ModelError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.noise import Array
from hpc_es.noise import threads as kernel_threads
from hpc_es.params import lab_model
from hpc_es.params.arena import CAST
from hpc_es.params.weights import read_config
from hpc_es.records import Member

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

END = 0
"""The token that ends an answer: NUL."""


class AsciiTokenizer:
    """One token per character; what is not ASCII becomes a question mark."""

    eos_token_id = END
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("ascii", "replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != END).decode("ascii")


class LabEngine(InProcessEngine["_Live"]):
    """See the base class."""

    tokenizer: "PreTrainedTokenizerBase"

    def __init__(
        self, live: "_Live", thread: ThreadPoolExecutor, model: ModelConfig, engine: EngineConfig, traces: bool = False
    ) -> None:
        super().__init__(live, thread, model, engine, traces)
        self.tokenizer = cast("PreTrainedTokenizerBase", AsciiTokenizer())

    @classmethod
    async def start(
        cls, model: ModelConfig, engine: EngineConfig, *, threads: int, optimiser: Kind = "none", traces: bool = False
    ) -> "LabEngine":
        kernel_threads.start(threads)
        thread = ThreadPoolExecutor(1, "lab-engine")
        try:
            live = await asyncio.get_running_loop().run_in_executor(thread, _Live, model, optimiser)
            self = cls(live, thread, model, engine, traces)
            await prove_noise_reaches(self)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return self

    @property
    def info(self) -> EngineInfo:
        facts = {"engine": "lab", "numpy": np.__version__, "device": "cpu", "dtype": self._config.dtype}
        return EngineInfo(self._live.arena.base_digest, facts, self._live.arena.seconds_to_load)

    async def generate(
        self, prompt: Prompt, sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        prompt = token_ids(prompt, "lab")
        room = answer_room(prompt, sampling.max_tokens, self._engine.max_model_len)
        generator = random.Random(seed)
        with self._gate.request():
            if choices is not None:
                offered = choice_tokens(self.tokenizer, choices, prompt, self._engine.max_model_len)
                if allowed := single_tokens(offered):
                    ids = sorted(allowed)
                    at, log_probability = draw(self._live.logits(prompt)[ids], sampling, generator)
                    return choice_completion(offered, (ids[at],), log_probability, prompt, self._traces)
                ranked = [self._live.log_probabilities_of(prompt, ids) for ids in offered]
                return chosen(offered, ranked, prompt, sampling, seed, self._traces)
            return await self._answer(list(prompt), room, sampling, generator)

    async def _answer(
        self, prompt: list[int], room: int, sampling: SamplingConfig, generator: random.Random
    ) -> Completion:
        answer, log_probabilities, text, ended = list[int](), list[float](), "", False
        while not ended and len(answer) < room:
            await self._breathe()
            logits = self._live.logits(prompt + answer)
            if sampling.presence_penalty and answer:
                logits[list(set(answer))] -= sampling.presence_penalty
            token, log_probability = draw(logits, sampling, generator)
            answer.append(token)
            log_probabilities.append(log_probability)
            text, stopped = _until_stop(cast(str, self.tokenizer.decode(answer)), sampling.stop)
            ended = stopped or answer[-1] == END
        sampled = SampledTokens(tuple(prompt), tuple(answer), tuple(log_probabilities)) if self._traces else None
        return Completion(text, len(prompt), len(answer), truncated=not ended, sampled=sampled)

    async def _breathe(self) -> None:
        """Let other tasks run between two tokens."""
        await asyncio.sleep(0)

    async def log_probabilities(self, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        with self._gate.request():
            return [self._live.log_probabilities_of(prompt, answer) for answer in answers]

    async def logits(self, prompt: Sequence[int]) -> list[float]:
        answer_room(prompt, 1, self._engine.max_model_len)
        with self._gate.request():
            return cast(list[float], _log_softmax(self._live.logits(prompt)).tolist())


class _Live(Live):
    """Arena and model; written in the engine's thread, with no request in flight."""

    def __init__(self, config: ModelConfig, optimiser: Kind) -> None:
        _check(config.path)
        super().__init__(config, optimiser)
        _check_shapes(config.path, {name: self.arena.shape(name) for name in self.arena.names})
        self._cast = {name: np.empty(self.arena.shape(name), CAST[config.dtype]) for name in self.arena.names}
        self.parameters = {name: np.full(self.arena.shape(name), np.nan, np.float32) for name in self.arena.names}

    def write(self, member: Member | None) -> None:
        """Write the member into the live parameters, rounded to model.dtype; computation is in float32."""
        self.digest = self.arena.perturb_into(self._cast, member)
        for name, values in self._cast.items():
            self.parameters[name][...] = _to_float32(values)

    def differing(self, member: Member | None) -> list[str]:
        before = {name: values.tobytes() for name, values in self.parameters.items()}
        self.write(member)
        return [name for name, values in self.parameters.items() if values.tobytes() != before[name]]

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits of the next token: float32, [VOCABULARY]."""
        recent = tokens[-lab_model.WINDOW :]
        places = range(lab_model.WINDOW - len(recent), lab_model.WINDOW)
        added = self.parameters[lab_model.EMBEDDING][places, recent].sum(axis=0)
        hidden = np.tanh(added / np.float32(math.sqrt(lab_model.WINDOW)) + self.parameters[lab_model.HIDDEN_BIAS])
        hidden /= np.float32(math.sqrt(hidden.size))
        # not BLAS: its order of addition depends on the number of threads
        read = np.einsum("vh,h->v", self.parameters[lab_model.READOUT], hidden)
        return cast(Array, read + self.parameters[lab_model.READOUT_BIAS])

    def log_probabilities_of(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probability of each token of an answer, given the prompt and the tokens before it."""
        tokens = [*prompt, *answer]
        return [float(_log_softmax(self.logits(tokens[:at]))[tokens[at]]) for at in range(len(prompt), len(tokens))]


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max()
    return cast(Array, shifted - np.log(np.exp(shifted).sum()))


def _until_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The answer up to its first stop string, and whether there was one."""
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _to_float32(values: Array) -> Array:
    """Convert to float32 without rounding; uint16 values are the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def _check(path: str) -> None:
    """Check the type of the model. Errors: ModelError when the folder contains another kind of model."""
    found = read_config(Path(path)).get("model_type")
    if found != lab_model.MODEL_TYPE:
        names = ", ".join(lab_model.LAB_MODELS)
        raise ModelError(
            f"engine.kind=lab computes models of the laboratory only, and {path} is of type {found}: "
            f"`hpc-es model get NAME` writes one ({names}); for language models set engine.kind to vllm or transformers"
        )


def _check_shapes(path: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check the shapes. Errors: ModelError when the tensors are not those of a laboratory model."""
    hidden = math.prod(shapes.get(lab_model.HIDDEN_BIAS, ()))
    for name, expected in lab_model.lab_shapes(hidden).items():
        if shapes.get(name) != expected:
            raise ModelError(
                f"{path}: {name} has the shape {shapes.get(name)} where {expected} is wanted for {hidden} hidden "
                "units: write the model again with `hpc-es model get`"
            )
