"""Tiny models of many families in vLLM, one after the other in this one process; run as a script.

Says in a line of JSON for each: in which way members are written, or why the family is refused; the log-probabilities
of one member, and those that transformers computes from a checkpoint of that member; whether the centre came back to
the same bits; the digest that was proven; the trained tensors that noise does not reach. Models that see images are
shown one.
"""

import asyncio
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}  # before vLLM is imported

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_families import write_family
from tiny_qwen import NUM_IMAGE_TOKENS, SEEING, write_tiny_qwen
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.engine.vllm import VllmEngine
from hpc_es.engine.vllm_launch import arguments, environment
from hpc_es.errors import HpcEsError
from hpc_es.params.arena import Arena
from hpc_es.params.weights import read_config
from hpc_es.records import Member

MEMBER = Member(seed=7, sign=-1, sigma=0.05)
PROMPT = [1, *range(3, 40)]
BFLOAT16 = ("qwen3_next", "qwen3_5")
"""vLLM's CPU kernels know no other type for their linear attention."""


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 80, 3), np.uint8))


class InThisProcess(VllmEngine):
    """The front of an LLM whose one worker is this process."""

    def _cores(self) -> list[int]:
        return []

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._llm.collective_rpc(method, args=args))

    async def _forget_prefixes(self) -> None:
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()

    async def logits(self, prompt: Any) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        (output,) = self._llm.generate(prompt, params, use_tqdm=False)
        by_token = output.outputs[0].logprobs[0]
        return [by_token[token].logprob for token in sorted(by_token)]


async def examine(family: str, folder: Path) -> dict[str, Any]:
    dtype = "bfloat16" if family.startswith(BFLOAT16) else "float32"
    written = (write_tiny_qwen if family in SEEING else write_family)(family, folder / family)
    model = ModelConfig(path=str(written), dtype=dtype)
    settings = EngineConfig(max_model_len=128, max_concurrent=2, kv_cache_mib=16, prefix_cache=False)
    os.environ.update(environment(settings, 1, folder))
    try:
        arena = Arena.from_pretrained(model.path, shared=True)
        llm = LLM(**arguments(model, settings, VllmEngine.extension, arena))
        engine = InThisProcess(llm, arena, settings, folder)
        await engine._attach(model, 1)
        prompt = prompt_of(model)
        await engine.perturb(None)
        centre = await engine.logits(prompt)
        await engine.perturb(MEMBER)
        ours = await engine.logits(prompt)
        await engine.probe()
        proven = engine.digest == arena.base_digest
        await engine.perturb(None)
        return {
            "weights": engine.info.facts["weights"],
            "proven": proven,
            "returned": await engine.logits(prompt) == centre,
            "ours": ours,
            "theirs": expected(model, arena, folder / "member"),
            "ignored": (await engine._rpc("es_ignored", arena.trained))[0] if family == "qwen3_5" else [],
            "untrained": sorted(set(arena.names).difference(arena.trained)),
        }
    except HpcEsError as error:
        return {"refused": str(error)}
    except Exception:  # vLLM's own: a family that it cannot run here
        return {"failed": traceback.format_exc()[-2000:]}


def image_tokens(model: ModelConfig) -> list[int]:
    """The tokens before, in the place of, and behind an image; none for a model of text."""
    described = read_config(Path(model.path))
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    return [described[name] for name in names if name in described]


def prompt_of(model: ModelConfig) -> dict[str, Any]:
    tokens = image_tokens(model)
    shown = {"multi_modal_data": {"image": picture()}} if tokens else {}
    return {"prompt_token_ids": PROMPT + tokens, **shown}


def expected(model: ModelConfig, arena: Arena, folder: Path) -> list[float]:
    """Log-probabilities of a checkpoint that holds the member, computed by transformers."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((Path(model.path) / "config.json").read_text())
    tensors = {name: torch.from_numpy(arena.perturbed(name, MEMBER, "float32")) for name in arena.names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokens, auto, shown = PROMPT, AutoModelForCausalLM, dict[str, Any]()
    if around := image_tokens(model):
        start, image, end = around
        tokens, auto = [*PROMPT, start, *[image] * NUM_IMAGE_TOKENS, end], AutoModelForImageTextToText
        shown = dict(AutoImageProcessor.from_pretrained(model.path)(images=[picture()], return_tensors="pt"))
        shown["mm_token_type_ids"] = (torch.tensor([tokens]) == image).int()
    with torch.inference_mode():
        reference = auto.from_pretrained(folder, attn_implementation="eager").float().eval()
        return reference(torch.tensor([tokens]), **shown).logits[0, -1].log_softmax(-1).tolist()


if __name__ == "__main__":
    # Once is enough, and it looks into every module, where it would stumble over numba's.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    # vLLM would look at each family's class in a process of its own, which takes longer than the family here.
    registry._run_in_subprocess = lambda look: look()
    for name in sys.argv[2:]:
        said = asyncio.run(examine(name, Path(sys.argv[1])))
        gc.collect()
        cleanup_dist_env_and_memory()
        print(json.dumps({"family": name, **said}), flush=True)
