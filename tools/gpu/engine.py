"""vLLM on a tiny random Llama: with theta on the device and in host memory, members are written and taken back.

Each engine is started, probed, perturbed, updated and closed; in CUDA graphs once (engine.enforce_eager off).
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path

from findings import Findings, arguments, begin
from model import commit, member

os.environ.pop("TRITON_INTERPRET", None)  # a rehearsal's; vLLM has kernels of its own

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.engine.vllm import VllmEngine
from hpc_es.params.arena import Arena
from hpc_es.params.tiny_llama import write_tiny_llama

PROMPT = list(range(3, 90))
CASES = {"host": {"base": "host"}, "device, CUDA graphs": {"base": "device", "enforce_eager": False}}


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    dtype = "bfloat16" if findings.on_gpu else "float32"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_llama(Path(scratch) / "model")
        for name, settings in CASES.items() if findings.on_gpu else [("host", CASES["host"])]:
            with findings.step(f"base {name}"):
                asyncio.run(serve(findings, name, ModelConfig(path=str(folder), dtype=dtype), settings))


async def serve(findings: Findings, name: str, model: ModelConfig, settings: dict[str, object]) -> None:
    common = {"max_model_len": 256, "max_concurrent": 4, "kv_cache_mib": 64, **settings}
    began = time.monotonic()
    engine = await VllmEngine.start(model, EngineConfig.model_validate(common), threads=2)
    try:
        findings.fact(f"base {name}: engine", f"{time.monotonic() - began:.0f} s, {engine.info.facts}")
        centre = await engine.logits(PROMPT)
        await engine.perturb(member(1))
        moved = await engine.logits(PROMPT)
        findings.check(f"base {name}: a member changes the logits", moved != centre)
        await engine.perturb(None)
        findings.check(f"base {name}: the centre returns to the same bits", await engine.logits(PROMPT) == centre)
        arena, first = Arena.from_pretrained(model.path), commit(1, 3)
        await engine.update([first])
        await engine.perturb(member(2))
        digest = arena.apply([first]).digest
        findings.check(f"base {name}: the digest of an update", engine.digest == digest, f"{digest:016x}")
        await engine.probe()
        findings.check(f"base {name}: live parameters are the member's", True)
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
