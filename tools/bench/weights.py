"""The model that noise.py and update.py measure on, and the usual way of adding noise to it in PyTorch.

The weights come from a given model folder, or are random in the shapes of SmolLM2-135M.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from harness import Clock

from hpc_es.noise import kernels, threads
from hpc_es.params import Arena
from hpc_es.params.weights import Spec, write


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    parser.add_argument("model", nargs="?", type=Path, help="model folder of Hugging Face; default: random weights")
    parser.add_argument(
        "--layers", type=int, default=4, help="number of layers of the random model; the real one has 30"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU seconds divided by threads instead of wall-clock time"
    )


def prepare(options: argparse.Namespace) -> Arena:
    """Load the weights into an arena, and size the thread pools, ours and torch's, as the options say."""
    torch.set_num_threads(options.threads)
    threads.start(options.threads)
    if not kernels().__name__.endswith("cpu"):  # type: ignore[attr-defined]
        sys.exit("numba is not installed: only the slow reference would run")
    with tempfile.TemporaryDirectory() as scratch:
        arena = Arena.from_pretrained(options.model or random_model(Path(scratch), options.layers))
    print(f"{arena.num_parameters:,} parameters, {options.threads} threads, torch {torch.__version__}\n")
    return arena


def clock_of(options: argparse.Namespace) -> Clock:
    return (lambda: time.process_time() / options.threads) if options.cpu_time else time.perf_counter


def random_model(folder: Path, num_layers: int = 30) -> Path:
    """Write a folder with random weights in the shapes of the first layers of SmolLM2-135M."""
    shapes = dict(_shapes(num_layers))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": True}), encoding="utf-8"
    )
    generator = np.random.default_rng(0)

    def elements(name: str) -> np.ndarray:
        return (0.02 * generator.standard_normal(shapes[name], np.float32)).astype(np.float16)

    write(folder / "model.safetensors", [Spec(name, "F16", shape) for name, shape in shapes.items()], elements)
    return folder


def live_model(arena: Arena, dtype: str) -> dict[str, torch.Tensor]:
    """Copy the arena's tensors as a model holds them. `dtype` is torch's name."""
    return {name: torch.from_numpy(arena.tensor(name)).to(getattr(torch, dtype)) for name in arena.names}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """View a tensor's memory as numpy; bfloat16 becomes uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def usual_perturb(model: dict[str, torch.Tensor], seed: int, sigma: float) -> None:
    """Perturb per tensor: seed a torch.Generator, draw randn of its shape in the model's dtype, add_."""
    for tensor in model.values():
        generator = torch.Generator().manual_seed(seed)
        tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype), alpha=sigma)


def usual_update(model: dict[str, torch.Tensor], seeds: Sequence[int], coefficients: Sequence[float]) -> None:
    """Update per tensor: sum all members' noise in an fp32 buffer, then add_."""
    for tensor in model.values():
        total = torch.zeros(tensor.shape, dtype=torch.float32)
        for seed, coefficient in zip(seeds, coefficients, strict=True):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            total.add_(noise, alpha=4096 * coefficient)
        tensor.add_(total)


def _shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, keys = 576, 1536, 192
    yield "model.embed_tokens.weight", (49152, hidden)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield prefix + f"self_attn.{name}_proj.weight", (rows, hidden)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
