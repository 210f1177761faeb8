"""What the checks work on: shapes of a Llama, tiny or with 1.2 billion parameters, members, commits, and bases."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Size(NamedTuple):
    hidden: int
    inner: int
    keys: int
    vocabulary: int
    layers: int


BILLION = Size(2048, 8192, 512, 128_256, 16)
"""Llama 3.2 1B."""
SMALL = Size(512, 2048, 256, 4096, 4)
TINY = Size(32, 32, 16, 40, 1)


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """By canonical name, in canonical order."""
    return dict(sorted(_shapes(size)))


def _shapes(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (size.vocabulary, size.hidden)
    yield "model.norm.weight", (size.hidden,)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (size.hidden,)
        for name, rows in (("q", size.hidden), ("k", size.keys), ("v", size.keys), ("o", size.hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, size.hidden)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (size.inner, size.hidden)
        yield f"{prefix}mlp.down_proj.weight", (size.hidden, size.inner)


def write_model(folder: Path, size: Size, device: torch.device) -> Path:
    """A checkpoint of random bfloat16 weights, which the device draws."""
    from hpc_es.params.weights import Spec, write

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": True}), encoding="utf-8"
    )
    specs = [Spec(name, "BF16", shape) for name, shape in shapes(size).items()]
    generator = torch.Generator(device).manual_seed(0)

    def elements(name: str) -> np.ndarray:
        drawn = torch.randn(shapes(size)[name], generator=generator, device=device) / 50
        return drawn.bfloat16().view(torch.uint16).cpu().numpy()

    write(folder / "model.safetensors", specs, elements)
    return folder


def members_of(version: int, count: int) -> tuple[list[int], list[float]]:
    """Seeds and coefficients of an update, as large as those of a run."""
    seeds = [2**63 + 1000 * version + slot for slot in range(count)]
    utilities = np.linspace(-1.5, 1.7, count)
    return seeds, [float(np.float32(5e-4 * utility / count / 4096)) for utility in utilities]


# --- with the arena, which needs msgspec ------------------------------------------------------------------------------


def commit(version: int, count: int, step: object = None):  # type: ignore[no-untyped-def]
    from hpc_es.records import Commit, Consumed, EvalId, Seeds, Term

    seeds, coefficients = members_of(version, count)
    pairs = zip(seeds, coefficients, strict=True)
    terms = tuple(Term(seed, 1, 1e-3, 0, 0.0, coefficient) for seed, coefficient in pairs)
    consumed = tuple(Consumed(EvalId(version - 1, slot), 0.0) for slot in range(count))
    return Commit(version, consumed, Seeds(5e-4, terms, step=step))


def member(seed: int = 2**63 + 5, sign: int = -1):  # type: ignore[no-untyped-def]
    from hpc_es.records import Member

    return Member(seed, sign, 1e-2)


def base_on(  # type: ignore[no-untyped-def]
    device: torch.device, residence: str, arena, targets: Sequence, rank: int = 0, num_ranks: int = 1
):
    """As a worker makes it on a GPU; on a CPU the same class, without what asks CUDA for memory."""
    from hpc_es.params.device import DeviceBase, device_base
    from hpc_es.params.streamed import Ring, StreamedBase

    if device.type == "cuda":
        return device_base(arena, targets, rank, num_ranks, residence)
    kind = DeviceBase if residence == "device" else StreamedBase
    return kind(arena, targets, device, rank, num_ranks, ring=Ring(device, 3 * 4 * 2**12))


def on_host(values: torch.Tensor) -> np.ndarray:
    """A copy, also of what is there already."""
    return values.detach().cpu().numpy().copy()


def bits(values: torch.Tensor) -> bytes:
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
