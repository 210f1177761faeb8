"""The map that is drawn by watching a loader, the choice of the copies that count, and members written through it."""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Counted, built_commit
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.engine.direct_map import Watch
from hpc_es.errors import EngineError, ModelError
from hpc_es.params.arena import Arena
from hpc_es.params.base import HostBase, Target
from hpc_es.params.regions import Region, choose_counted
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.records import EvalId, Member, OptimiserStep

MEMBER = Member(seed=0x0123456789ABCDEF, sign=-1, sigma=0.02)


def watched(live: torch.Tensor, stored: torch.Tensor, view: torch.Tensor) -> Watch:
    """A watch that saw `view` of the tensor `w`, stored as given, go into `live`."""
    watch = Watch([live])
    with watch:
        for _ in watch.showing([("w", stored)]):
            live.copy_(view)
    return watch


def elements(region: Region) -> np.ndarray:
    """Which elements of its tensor a region holds, in order."""
    return (region.start + region.stride * np.arange(region.rows)[:, None] + np.arange(region.width)).reshape(-1)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def parts(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(lambda ends: tuple(sorted(ends)))


@given(parts(4), parts(6), parts(5), st.booleans())
def test_a_shard_along_any_axes_is_mapped_element_by_element(a: Any, b: Any, c: Any, inside: bool) -> None:
    stored = numbered(4, 6, 40)
    view = stored[slice(*a), slice(*b), 8 * c[0] : 8 * c[1]]
    shape = [size + 2 * inside for size in view.shape]
    live = torch.zeros(shape)[tuple(slice(1, -1) if inside else slice(None) for _ in shape)]
    watch = watched(live, stored, view)
    assert not watch.obstacle
    assert sum(region.size for region, _ in watch.targets) == view.numel()
    for region, run in watch.targets:
        assert run.numpy().tolist() == elements(region).tolist()  # numbered: each is its own index


def test_rows_of_a_fused_tensor_are_one_region_and_columns_are_one_of_many_rows() -> None:
    stored = numbered(32, 64)
    fused = torch.zeros(80, 64)
    assert [r for r, _ in watched(fused[16:48], stored, stored).targets] == [Region("w", 0, 1, 2048, 2048)]
    columns = torch.zeros(32, 16)
    assert [r for r, _ in watched(columns, stored, stored[:, 16:32]).targets] == [Region("w", 16, 32, 16, 64)]


@pytest.mark.parametrize(
    ("live", "view", "message"),
    [
        (torch.zeros(8, 16), lambda t: t * 1, "computed"),
        (torch.zeros(8, 16, dtype=torch.bfloat16), lambda t: t, "converted"),
        (torch.zeros(8, 16), lambda t: t[:1], "converted"),
        (torch.zeros(8, 12), lambda t: t[:, 4:], "cuts blocks"),
        (torch.zeros(16, 8), lambda t: t.T, "cuts blocks"),
    ],
)
def test_anything_but_a_plain_copy_of_whole_blocks_is_an_obstacle(live: torch.Tensor, view: Any, message: str) -> None:
    stored = numbered(8, 16)
    assert message in watched(live, stored, view(stored)).obstacle


def test_memory_that_is_written_again_holds_what_came_last_and_other_memory_is_nobodys() -> None:
    live, other = torch.zeros(16), torch.zeros(16)
    watch = Watch([live])
    with watch:
        for _, tensor in watch.showing([("w", numbered(16)), ("w", numbered(16))]):
            live.fill_(0)
            live.copy_(tensor)
            other.copy_(tensor)
    assert [region for region, _ in watch.targets] == [Region("w", 0, 1, 16, 16)]


@pytest.mark.parametrize("apart", [0, 8])
def test_two_tensors_in_the_same_memory_are_refused(apart: int) -> None:
    """The head, tied to the embedding in the engine only, would take the embedding's noise away."""
    live = torch.zeros(24)
    watch = Watch([live])
    with watch:
        for name, tensor in watch.showing([("embedding", numbered(16)), ("head", numbered(16))]):
            live[apart * (name == "head") :][:16].copy_(tensor)
    with pytest.raises(EngineError, match="embedding and head in the same memory"):
        _ = watch.targets


def test_exactly_one_copy_of_each_element_counts() -> None:
    halves = [Region("w", 0, 4, 8, 16), Region("w", 8, 4, 8, 16)]
    norm = Region("n", 0, 1, 5, 5)
    ranks = [[halves[0], norm], [halves[0], norm], [halves[1], norm], [halves[1], norm]]
    chosen = choose_counted(ranks, {"w": 64, "n": 5})
    assert chosen == [[True, True], [False, False], [True, False], [False, False]]


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [Region("w", 0, 1, 56, 56)],
        [Region("w", 8, 1, 56, 56)],
        [Region("w", 0, 4, 8, 16), Region("w", 8, 3, 8, 16)],
        [Region("w", 0, 1, 64, 64), Region("w", 0, 1, 8, 8)],
    ],
)
def test_gaps_and_overlaps_are_named(regions: list[Region]) -> None:
    with pytest.raises(ModelError, match="each element of w"):
        choose_counted([regions], {"w": 64})


@given(
    start=st.integers(0, 3),
    rows=st.integers(1, 5),
    width=st.integers(1, 7),
    gap=st.integers(0, 2),
    at=st.integers(1, 9),
)
def test_a_region_in_parts_is_the_region(start: int, rows: int, width: int, gap: int, at: int) -> None:
    stride = 8 * (width + gap) if rows > 1 else 8 * width
    region = Region("w", 8 * start, rows, 8 * width, stride)
    cut = list(region.cut(8 * at))
    assert all(part.size <= 8 * at for part, _ in cut)
    assert np.concatenate([elements(part) for part, _ in cut]).tolist() == elements(region).tolist()
    assert [begin for _, begin in cut] == np.cumsum([0, *(part.size for part, _ in cut)])[:-1].tolist()


class Rank:
    """One rank's live model: gate and up fused, heads and their outputs sharded, the keys' heads never below two."""

    def __init__(self, arena: Arena, rank: int, num_ranks: int, dtype: torch.dtype) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self.live = dict[str, torch.Tensor]()
        for name in arena.names:
            shard = self._shard(name, torch.zeros(arena.shape(name), dtype=dtype))
            if "gate_proj" in name:
                fused = torch.zeros(2, *shard.shape, dtype=dtype)
                self.live[name], self.live[name.replace("gate", "up")] = fused
            self.live.setdefault(name, shard.clone())

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        pieces, rank = self._num_ranks, self._rank
        if "k_proj" in name or "v_proj" in name:
            pieces, rank = min(2, pieces), rank // max(1, pieces // 2)
        if "norm" in name:
            return tensor
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        return tensor.chunk(pieces, axis)[rank]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.live[name].copy_(self._shard(name, tensor))

    def targets(self, arena: Arena, dtype: Any) -> list[Target]:
        watch = Watch(self.live.values())
        with watch:
            arrays = arena.stream(None, dtype)
            self.load_weights(
                watch.showing((name, torch.from_numpy(a).view(getattr(torch, dtype))) for name, a in arrays)
            )
        assert not watch.obstacle
        return watch.targets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", tied=False)


def bases(arena: Arena, num_ranks: int, dtype: Any) -> tuple[list[Rank], list[HostBase]]:
    ranks = [Rank(arena, rank, num_ranks, getattr(torch, dtype)) for rank in range(num_ranks)]
    targets = [rank.targets(arena, dtype) for rank in ranks]
    sizes = {name: arena.tensor(name).size for name in arena.names}
    counted = choose_counted([[region for region, _ in each] for each in targets], sizes)
    made = list[HostBase]()
    for rank, (each, counts) in enumerate(zip(targets, counted, strict=True)):
        with_counts = [
            (Region(r.name, r.start, r.rows, r.width, r.stride, count), live)
            for (r, live), count in zip(each, counts, strict=True)
        ]
        made.append(HostBase(arena, with_counts, rank, num_ranks))
    return ranks, made


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_rank_holds_its_shard_of_the_same_member_and_their_shares_make_the_digest(
    folder: Path, dtype: Any, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's state has its share, a scope leaves tensors alone, pieces are cut small, updates are shared out."""
    monkeypatch.setattr("hpc_es.params.base.CHUNK", 1024)
    arena = Arena.from_pretrained(folder, exclude=["*.1.mlp*"], optimiser="adam")
    ranks, made = bases(arena, num_ranks, dtype)
    moved = Counted(EvalId(0, 1), 77, 1, 0.01, 0, 0.5, 1.0, float(np.float32(1e-5)))
    step = OptimiserStep("adam", 5e-4, 0.9, 0.1, 0.999, 0.001, 1e-8)
    reports = []
    for base in made:
        arena.version = 0
        reports.append(base.apply([built_commit(version=1, alpha=0.01, members=(moved,), step=step)]))
    assert sum(report.digest for report in reports) % 2**64 == arena.digest()
    part = Member(seed=9, sign=1, sigma=0.04, subspace=1, num_subspaces=4, partition_seed=3)
    for member in (MEMBER, None, part):
        for rank in ranks:
            for live in rank.live.values():
                live.fill_(torch.nan)
        shares = [base.write(member) for base in made]
        assert sum(shares) % 2**64 == arena.digest()
        for name, rank in product(arena.names, ranks):
            whole = torch.from_numpy(arena.perturbed(name, member, dtype)).view(getattr(torch, dtype))
            expected = rank._shard(name, whole)
            assert torch.equal(rank.live[name], expected), (name, member)
