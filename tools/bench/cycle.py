"""Time from a perturbation to the first token on the real vLLM engine, and its parts.

    python tools/bench/cycle.py [MODEL_FOLDER] [--dtype float32] [--rounds 5] [--prompt 64] [--threads T] [--json]

The clock starts with the order to perturb and stops with the first token of one greedy request. In between are the
write of all live weights, the reset of the prefix cache and the prefill of `--prompt` tokens. Ours writes the member
through the direct map, or through the model's own load_weights (engine.direct_map: false).

usual: in the same vLLM process, for each parameter a seeded torch.Generator, randn, add_ in place; and, since theta has
to be restored, the same subtracted after the first token. limit: the larger of a copy of as many bytes as a
perturbation moves and of the kernel alone within the cache, and the same prefill after it.
All ways take turns on one engine, and medians count.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

from harness import Row, arguments, show

from hpc_es.config.schema import EngineConfig, ModelConfig, SamplingConfig
from hpc_es.engine.vllm import VllmEngine
from hpc_es.records import Member

SIGMA = 1e-3
MAX_OF_LIMIT = 1.5
WAYS = {True: "direct map", False: "load_weights"}
Seconds = dict[str, list[float]]


class CycleEngine(VllmEngine):
    extension = "cycle_extension.CycleExtension"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="number of prompt tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    show("cycle", asyncio.run(measure(options)), as_json=options.json)


async def measure(options: argparse.Namespace) -> list[Row]:
    model = ModelConfig(path=str(options.model), dtype=options.dtype)
    config = EngineConfig(kind="vllm", max_model_len=options.prompt + 16, max_concurrent=1)
    engine = await CycleEngine.start(model, config, threads=options.threads)
    try:
        has_map = all(await engine._rpc("bench_ways"))
        seconds: Seconds = defaultdict(list)
        for number in range(options.rounds + 1):
            if number == 1:
                seconds.clear()  # the first round warms up
            for direct in [True, False] if has_map else [False]:
                await engine._rpc("bench_write", direct)
                await ours(engine, number, options.prompt, WAYS[direct], seconds)
            await usual(engine, number, options.prompt, seconds)
            seconds["limit"] += [max(await engine._rpc("bench_limit", options.threads))]
    finally:
        await engine.close()
    return rows({what: statistics.median(taken) for what, taken in seconds.items()}, options.prompt)


async def ours(engine: VllmEngine, number: int, num_tokens: int, way: str, seconds: Seconds) -> None:
    began = time.perf_counter()
    await engine.perturb(Member(number, 1, SIGMA))
    written = time.perf_counter()
    await first_token(engine, num_tokens)
    ended = time.perf_counter()
    await engine._forget_prefixes()
    seconds["reset"].append(time.perf_counter() - ended)
    seconds[way].append(ended - began)
    seconds[f"perturb, {way}"].append(written - began)
    seconds[f"prefill, {way}"].append(ended - written)


async def usual(engine: VllmEngine, number: int, num_tokens: int, seconds: Seconds) -> None:
    began = time.perf_counter()
    await engine._rpc("bench_usual", number, SIGMA)
    added = time.perf_counter()
    await engine._forget_prefixes()
    await first_token(engine, num_tokens)
    await engine._rpc("bench_usual", number, -SIGMA)
    seconds["usual"].append(time.perf_counter() - began)
    seconds["perturb, usual"].append(added - began)


async def first_token(engine: VllmEngine, num_tokens: int) -> None:
    greedy = SamplingConfig(temperature=0.0, max_tokens=1)
    await engine.generate([5 + place % 64 for place in range(num_tokens)], greedy, seed=0)


def rows(median: dict[str, float], num_tokens: int) -> list[Row]:
    made = []
    for way in WAYS.values():
        if way not in median:
            continue
        goal = MAX_OF_LIMIT if way == WAYS[True] else None
        limit, perturb, prefill = median["limit"], median[f"perturb, {way}"], median[f"prefill, {way}"]
        note = "usual: randn added and subtracted in place; limit: memory bandwidth or kernel alone, and the prefill"
        made.append(
            Row(f"perturb -> first token, {way}", "s", median[way], median["usual"], limit + prefill, note=note)
        )
        made.append(
            Row("  of that: perturb and reset", "s", perturb, median["perturb, usual"], limit, max_of_limit=goal)
        )
        made.append(Row(f"  of that: prefill of {num_tokens} tokens", "s", prefill))
    made.append(Row("  of that: cache reset", "ms", 1e3 * median["reset"]))
    return made


if __name__ == "__main__":
    main()
