"""The vLLM engine: an AsyncLLM whose workers write members into the live model (`vllm_extension.py`).

This process, the front, owns the arena in shared memory; each tensor-parallel rank maps it, updates its share, and
writes members from it. Invariant: nothing of one engine is shared by accident with another on the same node, and no
process of it outlives the front.
"""

import asyncio
import io
import logging
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
import transformers
import vllm
from PIL import Image
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from hpc_es.config.schema import EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine.base import Completion, Engine, EngineInfo, ImagePrompt, Prompt, SampledTokens, token_ids
from hpc_es.engine.gate import Gate, to_the_end
from hpc_es.engine.lifetime import Tie, is_running, process_start, remove, shared_memory
from hpc_es.engine.probe import prove_noise_reaches
from hpc_es.engine.requests import answer_room, choice_completion, choice_tokens, chosen, single_tokens
from hpc_es.engine.vllm_launch import arguments, environment, launch
from hpc_es.errors import ConfigError, ContextFull, EngineError, EnvError, ModelError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.params.arena import Arena
from hpc_es.params.rebuild import receive
from hpc_es.params.regions import Region, choose_counted
from hpc_es.quoting import quote_error
from hpc_es.records import Commit, Member

log = logging.getLogger(__name__)

_RPC_POLL_S = 1.0
_EXIT_TIMEOUT_S = 10.0


class VllmEngine(Engine):
    """See the base class; one EngineCore process and one worker process per tensor-parallel rank."""

    extension = "hpc_es.engine.vllm_extension.WorkerExtension"

    def __init__(self, llm: AsyncLLM, arena: Arena, engine: EngineConfig, scratch: Path, traces: bool = False) -> None:
        self.tokenizer = llm.get_tokenizer()
        self._llm = llm
        self._arena = arena
        self._engine = engine
        self._scratch = scratch
        self._gate = Gate()
        self._slots = asyncio.Semaphore(engine.max_concurrent)
        self._member: Member | None = None
        self._processes: dict[int, str | None] = {}
        self._digest = arena.base_digest
        self._way = ""
        self._traces = traces

    @classmethod
    async def start(
        cls, model: ModelConfig, engine: EngineConfig, *, threads: int, optimiser: Kind = "none", traces: bool = False
    ) -> "VllmEngine":
        arena = await asyncio.to_thread(
            partial(Arena.from_pretrained, model.path, model.include, model.exclude, shared=True, optimiser=optimiser)
        )
        given = arguments(model, engine, cls.extension, arena, traces)
        scratch = Path(tempfile.mkdtemp(prefix="hpc_es-vllm-"))
        given["additional_config"] = {"hpc_es": Tie.to_this_process(scratch)}
        starting = asyncio.create_task(asyncio.to_thread(launch, given, environment(engine, threads, scratch)))
        try:
            llm = await asyncio.shield(starting)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                (await starting).shutdown()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self = cls(llm, arena, engine, scratch, traces)
        try:
            await self._attach(model, threads)
            await prove_noise_reaches(self)
        except BaseException:
            await self.close()
            raise
        return self

    async def _attach(self, model: ModelConfig, threads: int) -> None:
        arena = {
            "memory_path": str(self._arena.memory_path),
            "model_path": model.path,
            "include": list(model.include),
            "exclude": list(model.exclude),
            "version": self._arena.version,
            "base_digest": self._arena.base_digest,
            "optimiser": self._arena.optimiser,
        }
        ranks = await self._rpc("es_attach", arena, threads)
        self._processes = {pid: process_start(pid) for pid in [*self._cores(), *(rank["pid"] for rank in ranks)]}
        await self._refuse_ignored(ranks)
        if obstacle := await self._write_directly(ranks):
            await self._rpc("es_write_through_load_weights")
            level = logging.WARNING if self._engine.base == "device" else logging.INFO
            log.log(level, "members are written through load_weights, from theta on the host: %s", obstacle)
        self._way = f"load_weights: {obstacle}" if obstacle else "direct"

    async def _refuse_ignored(self, ranks: list[dict[str, Any]]) -> None:
        """Errors: EngineError for trained tensors that vLLM ignores: no answer would depend on them, and updates would
        make a random walk of them."""
        unseen = set[str].intersection(*(set(rank["unseen"]) for rank in ranks))
        if not unseen:
            return
        ignored = set[str].intersection(*map(set, await self._rpc("es_ignored", sorted(unseen))))
        if ignored:
            raise EngineError(
                f"vLLM computes nothing with {min(ignored)} of the checkpoint ({len(ignored)} such): noise on it would "
                "reach no answer. Name such tensors in model.exclude"
            )

    def _cores(self) -> list[int]:
        return [process.pid for process in self._llm.engine_core.resources.engine_manager.processes]

    async def _write_directly(self, ranks: list[dict[str, Any]]) -> str:
        """Have all ranks write members through the direct map; returns what stands against it."""
        if not self._engine.direct_map:
            return "engine.direct_map is off"
        if obstacles := [rank["obstacle"] for rank in ranks if rank["obstacle"]]:
            return str(obstacles[0])
        regions = [[Region(*region) for region in rank["regions"]] for rank in ranks]
        unheld = set(self._arena.names).difference(self._arena.trained, (r.name for rank in regions for r in rank))
        sizes = {name: math.prod(self._arena.shape(name)) for name in self._arena.names if name not in unheld}
        try:
            counted = choose_counted(regions, sizes)
        except ModelError as error:
            return str(error)
        answers = await self._rpc("es_write_directly", counted, self._engine.base, sorted(unheld))
        if obstacles := [answer["obstacle"] for answer in answers if answer["obstacle"]]:
            return str(obstacles[0])
        digest = sum(answer["share"] for answer in answers) % 2**64
        return "" if digest == self._digest else "the shares of the digest do not sum to the arena's"

    @property
    def info(self) -> EngineInfo:
        facts = {
            "engine": "vllm",
            "vllm": vllm.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "device": current_platform.get_device_name(),
            "dtype": str(self._llm.model_config.dtype).removeprefix("torch."),
            "tensor_parallel": str(self._engine.tensor_parallel),
            "weights": self._way,
        }
        return EngineInfo(self._arena.base_digest, facts, self._arena.seconds_to_load)

    @property
    def version(self) -> int:
        return self._arena.version

    @property
    def digest(self) -> int:
        return self._digest

    async def load(self, checkpoint: Path | None) -> None:
        with self._gate.change("load", writes=False):
            await to_the_end(self._load(checkpoint))

    async def _load(self, checkpoint: Path | None) -> None:
        await asyncio.to_thread(self._arena.reload, checkpoint)
        self._digest = await asyncio.to_thread(self._arena.digest)
        await self._rpc("es_reload")

    async def receive(self, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
        with self._gate.change("receive", writes=False):
            await to_the_end(self._receive(version, digest, buckets))

    async def _receive(self, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
        try:
            await asyncio.to_thread(receive, self._arena, version, digest, buckets)
        finally:
            self._digest = digest if self.version == version else self._arena.base_digest
            await self._rpc("es_reload")

    async def update(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        with self._gate.change("update", writes=False):
            await to_the_end(self._update(commits))

    async def _update(self, commits: Sequence[Commit]) -> None:
        shares = await self._rpc("es_update", self.version, msgspec.msgpack.encode(list(commits)))
        self._arena.version = commits[-1].version
        self._digest = sum(shares) % 2**64

    async def perturb(self, member: Member | None) -> None:
        with self._gate.change("perturb", writes=True):
            shares = await self._rpc("es_write", msgspec.msgpack.encode(member))
            self._digest, self._member = sum(shares) % 2**64, member
            await self._forget_prefixes()

    async def probe(self) -> None:
        if not self._gate.is_written:
            await self.perturb(None)
        with self._gate.change("probe", writes=True):
            differing = await self._rpc("es_probe", msgspec.msgpack.encode(self._member))
            await self._forget_prefixes()
        for rank, names in enumerate(differing):
            if names:
                raise EngineError(
                    f"live parameter {names[0]} of rank {rank} ({len(names)} such) differs from the arena"
                )

    async def generate(
        self, prompt: Prompt, sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        if choices is not None:
            return await self._choose(token_ids(prompt, "vllm"), sampling, seed, choices)
        limit = self._engine.max_model_len
        if isinstance(prompt, ImagePrompt):
            given = await self._expanded(prompt)
            num_prompt = len(given["prompt_token_ids"])
            if num_prompt >= limit:
                raise ContextFull(f"a prompt of {num_prompt} tokens, with its images, does not fit into {limit}")
            room = min(sampling.max_tokens, limit - num_prompt)
        else:
            tokens = token_ids(prompt, "vllm")
            room = answer_room(tokens, sampling.max_tokens, limit)
            given = {"prompt_token_ids": list(tokens)}
        params = _sampling_params(sampling, seed, room, logprobs=0 if self._traces else None)
        output = await self._request(given, params)
        (answer,) = output.outputs
        return Completion(
            answer.text,
            len(given["prompt_token_ids"]),
            len(answer.token_ids),
            truncated=answer.finish_reason == "length",
            sampled=_sampled(output) if self._traces else None,
        )

    async def _choose(
        self, prompt: Sequence[int], sampling: SamplingConfig, seed: int, choices: Sequence[str]
    ) -> Completion:
        """Answer with one of the given choices."""
        answer_room(prompt, 1, self._engine.max_model_len)
        offered = choice_tokens(self.tokenizer, choices, prompt, self._engine.max_model_len)
        if not (allowed := single_tokens(offered)):
            ranked = await self.log_probabilities(prompt, list(offered))
            return chosen(offered, ranked, prompt, sampling, seed, self._traces)
        params = _sampling_params(
            sampling, seed, 1, allowed_token_ids=allowed, stop=None, logprobs=0 if self._traces else None
        )
        output = await self._request({"prompt_token_ids": list(prompt)}, params)
        log_probability = _sampled(output).log_probabilities[0] if self._traces else 0.0
        return choice_completion(offered, tuple(output.outputs[0].token_ids), log_probability, prompt, self._traces)

    async def log_probabilities(self, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        # the first one leaves the prompt in the prefix cache for the others
        first = await self._log_probabilities_of(prompt, answers[0])
        others = await asyncio.gather(*(self._log_probabilities_of(prompt, answer) for answer in answers[1:]))
        return [first, *others]

    async def _log_probabilities_of(self, prompt: Sequence[int], answer: tuple[int, ...]) -> list[float]:
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            prompt_logprobs=0,
            skip_reading_prefix_cache=False,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        given = {"prompt_token_ids": [*prompt, *answer]}
        output = await self._request(given, params)
        if (output.num_cached_tokens or 0) >= len(prompt):  # what is not computed has no log-probabilities but garbage
            params.skip_reading_prefix_cache = True
            output = await self._request(given, params)
        rows = output.prompt_logprobs[-len(answer) :]
        return [row[token].logprob for row, token in zip(rows, answer, strict=True)]

    async def logits(self, prompt: Sequence[int]) -> list[float]:
        answer_room(prompt, 1, self._engine.max_model_len)
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=-1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._request({"prompt_token_ids": list(prompt)}, params)
        by_token = output.outputs[0].logprobs[0]
        return [by_token[token].logprob for token in sorted(by_token)]

    @property
    def takes_images(self) -> bool:
        if not self._llm.model_config.is_multimodal_model:
            return False
        return bool(self._llm.renderer.get_mm_processor().info.allowed_mm_limits.get("image"))

    async def _expanded(self, prompt: ImagePrompt) -> dict[str, Any]:
        """A prompt for `_request`, with as many tokens in the place of each image as the model makes of it."""
        try:
            opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in prompt.images]
        except Exception as error:  # damaged files make Pillow raise whatever their format's reader does
            raise EnvError(f"an image cannot be read: {error}; it must be a PNG or JPEG file") from error
        raw = {"prompt_token_ids": list(prompt.tokens), "multi_modal_data": {"image": opened}}
        try:
            (expanded,) = await self._llm.renderer.render_cmpl_async([raw])
        except Exception as error:  # vLLM's own, or what the model's processor raises
            raise EngineError(
                f"vLLM cannot put {len(opened)} image{'' if len(opened) == 1 else 's'} into the prompt: "
                f"{quote_error(error)}. Does the chat template of the model make a place for each?"
            ) from error
        return dict(expanded)

    async def _request(self, given: dict[str, Any], params: SamplingParams) -> Any:
        """Send one request to vLLM: token ids, or the result of its renderer. Returns the final RequestOutput."""
        with self._gate.request():
            async with self._slots:
                try:
                    async for output in self._llm.generate(given, params, uuid4().hex):
                        last = output
                except Exception as error:  # vLLM raises a dozen kinds; a dead engine is one of them
                    raise EngineError(f"vLLM failed a request: {quote_error(error)}") from error
        return last

    async def _forget_prefixes(self) -> None:
        """Drop cached prefixes and images, which hold activations of the weights before."""
        if not await self._llm.reset_prefix_cache():
            raise EngineError("vLLM refused to reset its prefix cache; a request must still hold blocks of it")
        if self.takes_images:
            await self._llm.reset_encoder_cache()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every rank; one answer per rank."""
        call = asyncio.ensure_future(self._llm.collective_rpc(method, args=args))
        try:
            while not (await asyncio.wait({call}, timeout=_RPC_POLL_S))[0]:
                if self._llm.errored:  # vLLM leaves calls to a dead engine unanswered
                    raise EngineError(f"vLLM's engine died during {method}; its log above has the cause")
        finally:
            call.cancel()
        if error := call.exception():  # a worker's exception arrives as a bare Exception with its text
            raise EngineError(f"{method} failed in vLLM's worker: {error}") from error
        return call.result()

    async def close(self) -> None:
        shared = set[Path]().union(*map(shared_memory, self._processes))
        # no request is left to be finished, and the 5 s that vLLM would give its processes they spend on leaving Python
        await asyncio.to_thread(partial(self._llm.shutdown, timeout=0))
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while self._left() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for pid in self._left():
            os.kill(pid, signal.SIGKILL)
        remove(shared)
        del self._arena
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _left(self) -> list[int]:
        return [pid for pid, started in self._processes.items() if is_running(pid, started)]


def _sampled(output: Any) -> SampledTokens:
    """The tokens of a RequestOutput that was asked for the log-probabilities of the sampled tokens."""
    (answer,) = output.outputs
    tokens = tuple(answer.token_ids)
    rows = zip(answer.logprobs, tokens, strict=True)
    return SampledTokens(tuple(output.prompt_token_ids), tokens, tuple(row[token].logprob for row, token in rows))


def _sampling_params(sampling: SamplingConfig, seed: int, room: int, **others: Any) -> SamplingParams:
    """`others` replace or extend the arguments here. Errors: ConfigError for a setting that vLLM refuses."""
    arguments = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "presence_penalty": sampling.presence_penalty,
        "max_tokens": room,
        "stop": list(sampling.stop),
        "seed": seed % 2**63,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    try:
        return SamplingParams(**arguments | others)
    except Exception as error:  # vLLM's validation errors have no base of Python's
        raise ConfigError(f"vLLM refuses a setting of `sampling`: {error}") from error
