"""The transformers engine: in this process, one sequence at a time. The fallback where vLLM is missing, and the
cross-check of it.

Invariant: a request's answer depends on its prompt, its settings, its seed and the member, and on nothing that ran
before or beside it. Everything that touches the model runs in one thread of its own, off the event loop.
"""

import asyncio
import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, DynamicCache

from hpc_es.config.schema import EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine.base import Completion, EngineInfo, Prompt, SampledTokens, token_ids
from hpc_es.engine.fingerprints import differing, fingerprints, poison
from hpc_es.engine.in_process import InProcessEngine, Live
from hpc_es.engine.probe import prove_noise_reaches
from hpc_es.engine.requests import answer_room, choice_completion, choice_tokens, chosen, end_tokens, single_tokens
from hpc_es.errors import EngineError, ModelError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.noise import threads as kernel_threads
from hpc_es.params.weights import read_config
from hpc_es.records import Member

T = TypeVar("T")

ANSWERS_AT_ONCE = 16
"""Choices in one batch: each has its own copy of the prompt's keys and values."""


class TransformersEngine(InProcessEngine["_Live"]):
    """See the base class."""

    def __init__(
        self, live: "_Live", thread: ThreadPoolExecutor, model: ModelConfig, engine: EngineConfig, traces: bool = False
    ) -> None:
        super().__init__(live, thread, model, engine, traces)
        self.tokenizer = live.tokenizer

    @classmethod
    async def start(
        cls, model: ModelConfig, engine: EngineConfig, *, threads: int, optimiser: Kind = "none", traces: bool = False
    ) -> "TransformersEngine":
        thread = ThreadPoolExecutor(1, "transformers-engine", initializer=_use_threads, initargs=(threads,))
        try:
            live = await asyncio.get_running_loop().run_in_executor(thread, _Live, model, optimiser)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        self = cls(live, thread, model, engine, traces)
        try:
            await prove_noise_reaches(self)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def info(self) -> EngineInfo:
        facts = {
            "engine": "transformers",
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "device": str(self._live.model.device),
            "dtype": self._config.dtype,
        }
        return EngineInfo(self._live.arena.base_digest, facts, self._live.arena.seconds_to_load)

    async def generate(
        self, prompt: Prompt, sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        prompt = token_ids(prompt, "transformers")
        room = answer_room(prompt, sampling.max_tokens, self._engine.max_model_len)
        if choices is not None:
            return await self._choose(prompt, sampling, seed, choices)
        draw = Draw(sampling, seed, room, None)
        tokens, log_probabilities = await self._request(self._live.answer, list(prompt), draw)
        text, stopped = self._live.text(tokens, sampling.stop)
        ended = stopped or tokens[-1] in self._live.ends
        sampled = SampledTokens(tuple(prompt), tuple(tokens), tuple(log_probabilities)) if self._traces else None
        return Completion(text, len(prompt), len(tokens), truncated=not ended, sampled=sampled)

    async def _choose(
        self, prompt: Sequence[int], sampling: SamplingConfig, seed: int, choices: Sequence[str]
    ) -> Completion:
        """Answer with one of the given choices."""
        offered = choice_tokens(self.tokenizer, choices, prompt, self._engine.max_model_len)
        if not (allowed := single_tokens(offered)):
            ranked = await self.log_probabilities(prompt, list(offered))
            return chosen(offered, ranked, prompt, sampling, seed, self._traces)
        draw = Draw(sampling, seed, 1, sorted(allowed))
        tokens, log_probabilities = await self._request(self._live.answer, list(prompt), draw)
        return choice_completion(offered, tuple(tokens), log_probabilities[0], prompt, self._traces)

    async def log_probabilities(self, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        return await self._request(self._live.log_probabilities_of, list(prompt), list(answers))

    async def logits(self, prompt: Sequence[int]) -> list[float]:
        answer_room(prompt, 1, self._engine.max_model_len)
        return await self._request(self._live.log_probabilities, list(prompt))

    async def _request(self, work: Callable[..., T], *args: Any) -> T:
        """A generation in the model's thread; a cancelled caller stops it at its next token."""
        stop = Event()
        with self._gate.request():
            return await self._run(work, *args, stop, on_cancel=stop.set)


@dataclass(frozen=True)
class Draw:
    """How to draw an answer of at most `room` tokens; `only`: the ids that may be drawn."""

    sampling: SamplingConfig
    seed: int
    room: int
    only: list[int] | None


class _Live(Live):
    """Arena and model; used from the engine's thread alone."""

    def __init__(self, config: ModelConfig, optimiser: Kind) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        try:  # first what fails within a moment where transformers does not know the model; arenas take minutes
            self.tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
            super().__init__(config, optimiser)
            model = _model_class(config.path).from_pretrained(config.path, dtype=self._dtype, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"transformers cannot load {config.path}: {error}") from error
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        self.ends = end_tokens(self.tokenizer, model.generation_config)
        self._by_name = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: tuple(parameter.shape) for name, parameter in self._by_name.items()}
        if missing := [name for name in self.arena.trained if shapes.get(name) != self.arena.shape(name)]:
            raise EngineError(
                f"transformers has no parameter {missing[0]} as it is in the checkpoint ({len(missing)} such); use vllm"
            )
        loaded = self._fingerprints()
        poison(model.named_parameters())
        self.write(None)
        if changed := differing(loaded, self._fingerprints()):
            raise EngineError(
                f"{changed[0]} is not what the checkpoint's tensor makes of it ({len(changed)} such); use vllm"
            )

    def write(self, member: Member | None) -> None:
        """Write a member, or the centre, into the model's own storage."""
        tensors = self.arena.stream(member, self._config.dtype)
        for name, array in tensors:
            if name in self._by_name:  # tensors that are not trained may be missing
                self._by_name[name].copy_(torch.from_numpy(array).view(self._dtype))
        self.digest = tensors.digest

    def differing(self, member: Member | None) -> list[str]:
        before = self._fingerprints()
        self.write(member)
        return differing(before, self._fingerprints())

    def _fingerprints(self) -> dict[str, int]:
        return fingerprints(self.model.named_parameters())

    @torch.inference_mode()
    def log_probabilities(self, prompt: list[int], stop: Event) -> list[float]:
        return cast(list[float], self._next(prompt, None).log_softmax(-1).tolist())

    @torch.inference_mode()
    def answer(self, prompt: list[int], draw: Draw, stop: Event) -> tuple[list[int], list[float]]:
        """New tokens, the one that ends the answer included, and the log-probabilities with which they were drawn."""
        generator = torch.Generator().manual_seed(draw.seed % 2**63)
        cache, fresh = DynamicCache(config=self.model.config), prompt
        answer, log_probabilities = list[int](), list[float]()
        while len(answer) < draw.room and not stop.is_set():
            logits = self._next(fresh, cache)
            if draw.only is not None:
                logits = torch.full_like(logits, -math.inf).index_copy_(0, torch.tensor(draw.only), logits[draw.only])
            token, log_probability = _next_token(logits, answer, draw.sampling, generator)
            fresh = [token]
            answer += fresh
            log_probabilities.append(log_probability)
            if fresh[0] in self.ends or (draw.sampling.stop and self.text(answer, draw.sampling.stop)[1]):
                break
        return answer, log_probabilities

    @torch.inference_mode()
    def log_probabilities_of(self, prompt: list[int], answers: list[tuple[int, ...]], stop: Event) -> list[list[float]]:
        """Log-probability of each token of each answer. The prompt is computed once; the answers are one batch."""
        cache = DynamicCache(config=self.model.config)
        first = self._next(prompt, cache).log_softmax(-1)
        found = [[float(first[answer[0]])] for answer in answers]
        for start in range(0, len(answers), ANSWERS_AT_ONCE):
            if stop.is_set():
                break
            batch = answers[start : start + ANSWERS_AT_ONCE]
            width = max(map(len, batch)) - 1
            if not width:
                continue
            # Padding stands behind the tokens that are scored, which therefore do not see it.
            rows = torch.tensor([[*answer[:-1], *[0] * (width + 1 - len(answer))] for answer in batch])
            shared = copy.deepcopy(cache)
            shared.reorder_cache(
                torch.zeros(len(batch), dtype=torch.long)
            )  # repeats the states of linear attention too
            logits = self.model(rows.to(self.model.device), past_key_values=shared, use_cache=True).logits
            scores = logits.float().log_softmax(-1).cpu()
            for row, answer in enumerate(batch):
                found[start + row] += [float(scores[row, at, token]) for at, token in enumerate(answer[1:])]
        return found

    def text(self, tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, bool]:
        """The answer up to its first stop string, and whether there was one."""
        text = cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        places = [place for place in (text.find(string) for string in stop) if place >= 0]
        return (text[: min(places)], True) if places else (text, False)

    def _next(self, tokens: list[int], cache: DynamicCache | None) -> torch.Tensor:
        """Logits (fp32, [vocabulary], on the CPU) after these tokens, which follow those in the cache."""
        ids = torch.tensor([tokens], device=self.model.device)
        output = self.model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
        return cast(torch.Tensor, output.logits[0, -1].float().cpu())


def _model_class(path: str) -> Any:
    """The class that has every tensor of the checkpoint: the language model of one that sees is only part of it."""
    return AutoModelForImageTextToText if "vision_config" in read_config(Path(path)) else AutoModelForCausalLM


def _use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    kernel_threads.start(threads)


def _next_token(
    logits: torch.Tensor, answer: list[int], sampling: SamplingConfig, generator: torch.Generator
) -> tuple[int, float]:
    """One token id and the log-probability with which it was drawn.

    Applied in vLLM's order: presence penalty, greedy or temperature, top-k, top-p.
    """
    if sampling.presence_penalty and answer:
        logits = logits.clone()
        logits[list(set(answer))] -= sampling.presence_penalty
    if sampling.temperature == 0:
        best = int(logits.argmax())
        return best, float(logits.log_softmax(-1)[best])
    ordered, ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    at = int(torch.multinomial(probabilities, 1, generator=generator))
    kept = ordered.masked_fill(probabilities == 0.0, -math.inf)
    return int(ids[at]), float(kept.log_softmax(-1)[at])
