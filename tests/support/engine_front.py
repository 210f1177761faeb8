"""A front with two tensor-parallel ranks, which load weights anew for each member, run as a script: update, write a
member, say so, wait to be killed."""

import asyncio
import json
import re
import sys
from pathlib import Path

from engine_cases import MEMBER, PROMPT, commit, settings

from hpc_es.config.schema import ModelConfig
from hpc_es.engine.vllm import VllmEngine


async def main(path: str) -> None:
    model = ModelConfig(path=path, dtype="float32")
    engine = await VllmEngine.start(model, settings("vllm", tensor_parallel=2, direct_map=False), threads=1)
    await engine.update([commit(1)])
    await engine.perturb(MEMBER)
    await engine.probe()
    said = {
        "digest": engine.digest,
        "weights": engine.info.facts["weights"],
        "logits": await engine.logits(PROMPT),
        "processes": list(engine._processes),
        "scratch": str(engine._scratch),
        "queues": queues(list(engine._processes)),
        "shared_memory": next(engine._scratch.glob("vllm_dist_*")).name,
    }
    print(json.dumps(said), flush=True)
    await asyncio.Event().wait()


def queues(processes: list[int]) -> list[str]:
    """The shared memory of vLLM's queues between its processes."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes)
    return sorted(set(re.findall(r"/dev/shm/psm_\w+", maps)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
