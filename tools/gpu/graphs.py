"""A CUDA graph that reads live weights sees every member that is written in place, and its addresses stay valid.

On a CPU the computation is run again in place of a replay.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from findings import Findings, arguments, begin
from model import base_on, bits, member

from hpc_es.params.arena import Arena
from hpc_es.params.regions import Region
from hpc_es.params.weights import Spec, write

LAYERS = 3


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    width = 512 if findings.on_gpu else 32
    with tempfile.TemporaryDirectory() as scratch:
        arena = matrices(Path(scratch), width)
        for residence in ("host", "device"):
            with findings.step(f"base {residence}"):
                replayed(findings, arena, residence, width)


def matrices(folder: Path, width: int) -> Arena:
    generator, names = np.random.default_rng(0), [f"layers.{layer}.weight" for layer in range(LAYERS)]
    (folder / "config.json").write_text("{}", encoding="utf-8")
    specs = [Spec(name, "F32", (width, width)) for name in names]
    write(folder / "model.safetensors", specs, lambda _: generator.standard_normal((width, width), np.float32) / 8)
    return Arena.from_pretrained(folder)


def replayed(findings: Findings, arena: Arena, residence: str, width: int) -> None:
    weights = [torch.empty(width, width, dtype=torch.bfloat16, device=findings.device) for _ in arena.names]
    regions = [Region(name, 0, 1, width * width, width * width) for name in arena.names]
    flat = [weight.view(-1) for weight in weights]
    base = base_on(findings.device, residence, arena, list(zip(regions, flat, strict=True)))
    tokens = torch.randn(64, width, device=findings.device).bfloat16()

    def compute() -> torch.Tensor:
        hidden = tokens
        for weight in weights:
            hidden = torch.tanh(hidden @ weight)
        return hidden

    addresses = [weight.data_ptr() for weight in weights]
    base.write(None)
    replay, out = recorded(findings, compute)

    def outcome(seed: int | None) -> bytes:
        base.write(None if seed is None else member(seed))
        replay()
        return bits(out)

    centre, one, other = outcome(None), outcome(1), outcome(2)
    close = torch.allclose(out.float(), compute().float(), rtol=0, atol=2e-2)
    what = f"base {residence}: a graph"
    findings.check(f"{what} sees each member", len({centre, one, other}) == 3)
    findings.check(f"{what} computes what is computed without it", close)
    findings.check(f"{what} returns to the same bits", (outcome(None), outcome(1)) == (centre, one))
    findings.check(f"{what}: no weight moves", addresses == [weight.data_ptr() for weight in weights])


def recorded(findings: Findings, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """What computes again, and where it leaves the outcome."""
    if not findings.on_gpu:
        out = compute()
        return lambda: out.copy_(compute()), out
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()  # makes what cuBLAS needs, which cannot be captured
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph.replay, out


if __name__ == "__main__":
    main()
