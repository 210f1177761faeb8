"""The direct map on a device: a model with fused and sharded weights and vLLM's manner of loading is watched, and each
member written through the map leaves the bits that its own load_weights leaves.

The ranks of a tensor-parallel model all live on one device here.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from findings import Findings, arguments, begin
from model import SMALL, TINY, Size, base_on, bits, commit, member, write_model
from torch import nn

from hpc_es.engine.direct_map import Watch
from hpc_es.engine.loaded import LoadedBase
from hpc_es.params.arena import Arena
from hpc_es.params.base import Target
from hpc_es.params.regions import choose_counted

DTYPE = torch.bfloat16
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
COLUMNS = ("o_proj", "down_proj")


class Rank(nn.Module):
    """Of a Llama: q, k and v in one parameter, gate and up in one; rows and columns shared out among the ranks."""

    def __init__(self, arena: Arena, size: Size, rank: int, num_ranks: int, device: torch.device) -> None:
        super().__init__()
        self._rank, self._num_ranks = rank, num_ranks
        q, k, inner = size.hidden // num_ranks, size.keys // num_ranks, size.inner // num_ranks
        self._parts = {"qkv_proj": [0, q, q + k, q + 2 * k], "gate_up_proj": [0, inner, 2 * inner]}
        self.live = nn.ParameterDict()
        for name in arena.names:
            owner, _ = self._owner(name)
            shape = self._shard(name, torch.empty(arena.shape(name), device="meta")).shape
            if fused := next((part for part in self._parts if part in owner), None):
                shape = torch.Size((self._parts[fused][-1], shape[1]))
            if owner not in self.live:
                empty = torch.full(shape, torch.nan, dtype=DTYPE, device=device)
                self.live[owner] = nn.Parameter(empty, requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            owner, part = self._owner(name)
            live = self.live[owner].data
            if part is not None:
                fused = next(each for each in self._parts if each in owner)
                begin, end = self._parts[fused][part : part + 2]
                live = live.narrow(0, begin, end - begin)
            live.copy_(self._shard(name, tensor))

    def _owner(self, name: str) -> tuple[str, int | None]:
        for part, (fused, place) in FUSED.items():
            if part in name:
                return name.replace(part, fused).replace(".", "_"), place
        return name.replace(".", "_"), None

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "norm" in name:
            return tensor
        return tensor.chunk(self._num_ranks, 1 if any(part in name for part in COLUMNS) else 0)[self._rank]


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    size = SMALL if findings.on_gpu else TINY
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", size, findings.device)
        for num_ranks in (1, 2) if findings.on_gpu else (2,):
            for residence in ("host", "device"):
                with findings.step(f"{num_ranks} ranks, base {residence}"):
                    mapped(findings, Arena.from_pretrained(folder), size, num_ranks, residence)


def mapped(findings: Findings, arena: Arena, size: Size, num_ranks: int, residence: str) -> None:
    what, device = f"{num_ranks} ranks, base {residence}", findings.device
    ranks = [Rank(arena, size, rank, num_ranks, device) for rank in range(num_ranks)]
    loaders = [LoadedBase(arena, model, DTYPE, rank, num_ranks) for rank, model in enumerate(ranks)]
    addresses = [parameter.data_ptr() for model in ranks for parameter in model.parameters()]
    targets = list[list[Target]]()
    for model, loader in zip(ranks, loaders, strict=True):
        watch = Watch(model.parameters())
        loader.write(None, watch)
        findings.check(f"{what}: load_weights is seen", not watch.obstacle, watch.obstacle)
        targets.append(watch.targets)
    sizes = {name: arena.tensor(name).size for name in arena.names}
    counted = choose_counted([[region for region, _ in each] for each in targets], sizes)
    bases = [
        base_on(device, residence, arena, counts(each, chosen), rank, num_ranks)
        for rank, (each, chosen) in enumerate(zip(targets, counted, strict=True))
    ]
    for seed in (1, None):
        is_written(findings, what, arena, ranks, loaders, bases, member(seed) if seed else None)
    arena.version = 0
    update(findings, what, arena, bases, num_ranks)
    is_written(findings, f"{what}, updated", arena, ranks, loaders, bases, member(2))
    after = [parameter.data_ptr() for model in ranks for parameter in model.parameters()]
    findings.check(f"{what}: no parameter moves", addresses == after)


def counts(targets: list[Target], chosen: list[bool]) -> list[Target]:
    return [(replace(region, counts=each), run) for (region, run), each in zip(targets, chosen, strict=True)]


def is_written(
    findings: Findings, what: str, arena: Arena, ranks: list[Rank], loaders: list[Any], bases: list[Any], wanted: Any
) -> None:
    """Each by its own load_weights, then poisoned, then by the map."""
    expected = list[list[bytes]]()
    for model, loader in zip(ranks, loaders, strict=True):
        loader.write(wanted)
        expected.append([bits(parameter) for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    digest = sum(base.write(wanted) for base in bases) % 2**64
    right = [[bits(parameter) for parameter in model.parameters()] for model in ranks] == expected
    which = "the centre" if wanted is None else "a member"
    findings.check(f"{what}: {which} has the bits of load_weights", right)
    findings.check(f"{what}: the digest of {which}", digest == arena.digest(), f"{digest:016x}")


def update(findings: Findings, what: str, arena: Arena, bases: list[Any], num_ranks: int) -> None:
    """Ranks share one arena; what is kept on the device is then brought into it by the host's own update."""
    theirs, digest, first = arena.memory.copy(), 0, commit(1, 3)
    for base in bases:
        arena.version = 0
        digest = (digest + base.apply([first]).digest) % 2**64
    if "device" in what:
        findings.check(f"{what}: an update leaves the arena alone", bool((arena.memory == theirs).all()))
        arena.version = 0
        arena.apply([first])
    findings.check(f"{what}: the digest of an update", digest == arena.digest(), f"{digest:016x}")


if __name__ == "__main__":
    main()
