"""Compare the fused noise kernels with the usual way of adding noise in PyTorch, on the tensors of SmolLM2-135M.

    python tools/bench/noise.py [MODEL_FOLDER] [--threads T] [--members N] [--dtypes float32 bfloat16]

Usual way, per tensor and member: seed a torch.Generator, draw randn of the tensor's shape in the model's dtype, add_.
perturb adds one member's noise to the model in place (and would need the same again to take it out). update sums N
members' noise into an fp32 buffer and adds that to the tensor.
Fused: perturb reads the fp32 arena and writes the model's tensors in their dtype. update applies N members to the arena
and takes its digest and the norm of the change in the same pass.
Both run on the same tensors and the same number of threads, in this process, one after the other. Times are
wall-clock: medians of three runs of the usual perturb, one of the usual update, and nine and five of the fused kernels
after one warm-up. "ratio" compares wall-clock times, "CPU ratio" CPU times, which other load on the machine disturbs
less; "cores" is CPU time divided by wall-clock time. "extra memory" is the peak of the process while the fused kernels
run, above what it held before (arena and model). Without a model folder, random weights of the same shapes are used.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpc_es.es.records import Member
from hpc_es.noise import kernels, threads
from hpc_es.params import Arena
from hpc_es.params.weights import Spec, write

SIGMA, ALPHA = 1e-3, 5e-4
GOAL = {"perturb": 8, "update": 15}
EXTRA_MEMORY_MIB = 256
WIDTHS = (10, 10, 8, 6, 11, 13, 13)


@dataclass(frozen=True)
class Timing:
    seconds: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face folder; default: random weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--members", type=int, default=16, help="members of the update, N")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    threads.start(options.threads)
    if not kernels().__name__.endswith("cpu"):  # type: ignore[attr-defined]
        sys.exit("numba is not installed: only the slow reference would run")

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or random_model(Path(scratch))
        arena = Arena.from_pretrained(folder)
    print(
        f"{options.model or 'random weights'}: {len(arena.names)} tensors, {arena.num_parameters:,} parameters; "
        f"{options.threads} threads; torch {torch.__version__}\n"
    )
    titles = ("usual", "fused", "ratio", "goal", "CPU ratio", "cores usual", "cores fused")
    print(" " * 22 + "".join(f"{title:>{width}}" for title, width in zip(titles, WIDTHS, strict=True)))
    extra = 0.0
    for dtype in options.dtypes:
        model = {name: torch.from_numpy(arena.tensor(name)).to(getattr(torch, dtype)) for name in arena.names}
        extra = max(extra, compare(arena, model, dtype, options.members))
    print(f"\nextra memory of the fused kernels: {extra:.0f} MiB (goal: at most {EXTRA_MEMORY_MIB})")


def compare(arena: Arena, model: dict[str, torch.Tensor], dtype: str, members: int) -> float:
    """Print both rows of one dtype; returns the extra memory of the fused kernels in MiB."""
    outs = {name: bits(tensor) for name, tensor in model.items()}
    seeds = [2**40 + seed for seed in range(members)]
    coefficients = [float(np.float32(ALPHA / members / 4096 * (seed % 5 - 2))) for seed in range(members)]
    before = reset_peak()
    fused = {
        "perturb": measure(lambda: arena.perturb_into(outs, Member(seeds[0], 1, SIGMA)), 9),
        "update": measure(lambda: arena.update(list(zip(seeds, coefficients, strict=True))), 5),
    }
    extra = peak_memory() - before
    usual = {
        "perturb": measure(lambda: usual_perturb(model, seeds[0]), 3),
        "update": measure(lambda: usual_update(model, seeds, coefficients), 1),
    }
    for what, goal in GOAL.items():
        title = f"{what}, {dtype}" if what == "perturb" else f"{what} N={members}, {dtype}"
        slow, fast = usual[what], fused[what]
        print(
            f"{title:22}{slow.seconds:9.2f}s{fast.seconds:9.3f}s{slow.seconds / fast.seconds:8.1f}{goal:6}"
            f"{slow.cpu / fast.cpu:11.1f}{slow.cpu / slow.seconds:13.2f}{fast.cpu / fast.seconds:13.2f}",
            flush=True,
        )
    return extra / 2**20


def usual_perturb(model: dict[str, torch.Tensor], seed: int) -> None:
    for tensor in model.values():
        generator = torch.Generator().manual_seed(seed)
        tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype), alpha=SIGMA)


def usual_update(model: dict[str, torch.Tensor], seeds: list[int], coefficients: list[float]) -> None:
    for tensor in model.values():
        total = torch.zeros(tensor.shape, dtype=torch.float32)
        for seed, coefficient in zip(seeds, coefficients, strict=True):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            total.add_(noise, alpha=4096 * coefficient)
        tensor.add_(total)


def measure(work: Callable[[], object], repeats: int) -> Timing:
    """Median of `repeats`; five and more get a warm-up first."""
    if repeats >= 5:
        work()
    timings = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        seconds = time.perf_counter() - wall
        timings.append(Timing(seconds, time.process_time() - cpu))
    return sorted(timings, key=lambda timing: timing.seconds)[(repeats - 1) // 2]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory; bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def random_model(folder: Path) -> Path:
    """A folder with random weights in the shapes of SmolLM2-135M."""
    shapes = dict(smollm2_shapes())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
    generator = np.random.default_rng(0)

    def elements(name: str) -> np.ndarray:
        return (0.02 * generator.standard_normal(shapes[name], np.float32)).astype(np.float16)

    write(folder / "model.safetensors", [Spec(name, "F16", shape) for name, shape in shapes.items()], elements)
    return folder


def smollm2_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, keys = 576, 1536, 192
    yield "model.embed_tokens.weight", (49152, hidden)
    for layer in range(30):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield prefix + f"self_attn.{name}_proj.weight", (rows, hidden)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def reset_peak() -> int:
    """Forget the process's peak; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def peak_memory() -> int:
    return memory("VmHWM")


def memory(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[field].split()[0])


if __name__ == "__main__":
    main()
