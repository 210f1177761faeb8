"""Tiny models of many families in vLLM, one after the other in this one process; run as a script.

Says in a line of JSON for each: in which way members are written, or why the family is refused; the log-probabilities
of one member, and those that transformers computes from a checkpoint of that member; the digest that was proven.
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

import torch
from safetensors.torch import save_file
from tiny_families import write_family
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.engine.vllm import VllmEngine
from hpc_es.engine.vllm_launch import arguments, environment
from hpc_es.errors import HpcEsError
from hpc_es.es.records import Member
from hpc_es.params.arena import Arena

MEMBER = Member(seed=7, sign=-1, sigma=0.05)
PROMPT = [1, *range(3, 40)]


class InThisProcess(VllmEngine):
    """The front of an LLM whose one worker is this process."""

    def _cores(self) -> list[int]:
        return []

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._llm.collective_rpc(method, args=args))

    async def _forget_prefixes(self) -> None:
        self._llm.reset_prefix_cache()

    async def logits(self, prompt: Any) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        (output,) = self._llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        by_token = output.outputs[0].logprobs[0]
        return [by_token[token].logprob for token in sorted(by_token)]


async def examine(family: str, folder: Path) -> dict[str, Any]:
    dtype = "bfloat16" if family == "qwen3_next" else "float32"  # vLLM's CPU kernels know no other for it
    model = ModelConfig(path=str(write_family(family, folder / family)), dtype=dtype)
    settings = EngineConfig(max_model_len=128, max_concurrent=2, kv_cache_mib=16, prefix_cache=False)
    os.environ.update(environment(settings, 1, folder))
    try:
        arena = Arena.from_pretrained(model.path, shared=True)
        llm = LLM(**arguments(model, settings, VllmEngine.extension, arena))
        engine = InThisProcess(llm, arena, settings, folder)
        await engine._attach(model, 1)
        await engine.perturb(MEMBER)
        ours = await engine.logits(PROMPT)
        await engine.probe()
        return {
            "weights": engine.info.facts["weights"],
            "proven": engine.digest == arena.base_digest,
            "ours": ours,
            "theirs": expected(model, arena, folder / "member"),
        }
    except HpcEsError as error:
        return {"refused": str(error)}
    except Exception:  # vLLM's own: a family that it cannot run here
        return {"failed": traceback.format_exc()[-2000:]}


def expected(model: ModelConfig, arena: Arena, folder: Path) -> list[float]:
    """Of a checkpoint that holds the member, in transformers."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((Path(model.path) / "config.json").read_text())
    tensors = {name: torch.from_numpy(arena.perturbed(name, MEMBER, "float32")) for name in arena.names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
        logits = reference(torch.tensor([PROMPT])).logits[0, -1]
        return logits.log_softmax(-1).tolist()


if __name__ == "__main__":
    # Once is enough, and it looks into every module, where it would stumble over numba's.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    for name in sys.argv[2:]:
        said = asyncio.run(examine(name, Path(sys.argv[1])))
        gc.collect()
        cleanup_dist_env_and_memory()
        print(json.dumps({"family": name, **said}), flush=True)
