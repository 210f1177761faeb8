"""theta streamed through a device, or kept on it, is that of the arena's own passes, bit for bit.

On CPU tensors with the host's kernels in place of the device's; some of it again by test_device.py in Triton's
interpreter (TRITON_INTERPRET=1), and all of it on a GPU with HPC_ES_TEST_DEVICE=cuda.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_kernels
import pytest
import small_checkpoint
from adversary import ORDERS, Adversary, Wait
from device_cases import (
    COLUMNS,
    DEVICE,
    HAS_KERNELS,
    MEMBERS,
    SCOPE,
    SHAPES,
    STEPS,
    arena_of,
    commits,
    holds,
    live,
    ring,
    same,
)

from hpc_es.errors import EngineError, RunFailed, StoreError, VerifyError
from hpc_es.head.loop import restore
from hpc_es.methods.es.optimiser import Kind
from hpc_es.noise import cuda
from hpc_es.noise.reference import Trace
from hpc_es.params import head_update
from hpc_es.params import streamed as streamed_module
from hpc_es.params.arena import CAST, Arena, Dtype
from hpc_es.params.base import Target
from hpc_es.params.device import DeviceBase
from hpc_es.params.report import UpdateReport, combine
from hpc_es.params.streamed import Streamed, StreamedBase
from hpc_es.params.streams import InOrder
from hpc_es.paths import RunPaths
from hpc_es.records import Commit

Make = Any


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_KERNELS:
        host_kernels.install(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model", small_checkpoint.values(SHAPES))


def streamed(arena: Arena, targets: Sequence[Target], rank: int, num_ranks: int) -> StreamedBase:
    return StreamedBase(arena, targets, DEVICE, rank, num_ranks, ring=ring(256))


def kept(arena: Arena, targets: Sequence[Target], rank: int, num_ranks: int) -> DeviceBase:
    return DeviceBase(arena, targets, DEVICE, rank, num_ranks)


BASES = pytest.mark.parametrize("make", [streamed, kept])


# --- the head's update ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("elements", "num_slots"), [(64, 3), (600, 2), (2**15, 2)])
def test_an_update_streamed_through_a_device_is_the_arenas(
    model: Path, kind: Kind, elements: int, num_slots: int
) -> None:
    """Chunks smaller than a tensor, of another size than any, and larger than the arena."""
    mine, theirs, todo = arena_of(model, kind), arena_of(model, kind), commits(kind)
    update = Streamed(mine, DEVICE, ring=ring(elements, num_slots))
    for some in (todo[:3], todo[3:], []):
        assert same(update.apply(some), theirs.apply(some))
        assert mine.memory.tobytes() == theirs.memory.tobytes()
        assert mine.version == theirs.version
    assert update.apply([]).digest == mine.digest()


def test_several_ranks_update_slices_of_one_arena(model: Path) -> None:
    mine, theirs, todo = arena_of(model, "adam"), arena_of(model, "adam"), commits("adam")
    reports = []
    for rank in range(3):
        mine.version = 0
        reports.append(Streamed(mine, DEVICE, rank, 3, ring=ring(300)).apply(todo))
    assert same(combine(reports), theirs.apply(todo))
    assert mine.memory.tobytes() == theirs.memory.tobytes()


def test_commits_that_do_not_follow_change_nothing(model: Path) -> None:
    arena = arena_of(model)
    before, update = arena.memory.tobytes(), Streamed(arena, DEVICE, ring=ring(300))
    with pytest.raises(StoreError, match="do not continue"):
        update.apply(commits("none")[1:])
    assert arena.memory.tobytes() == before
    assert same(update.apply(commits("none")[:1]), arena_of(model).apply(commits("none")[:1]))


class Failing(InOrder):
    """The device fails at the fifth piece of work."""

    left = 5

    def submit(self, lane: Any, work: Any, after: Any = ()) -> None:
        self.left -= 1
        if self.left == 0:
            self.fail()
        super().submit(lane, work, after)

    def fail(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_half_an_update_is_never_used(model: Path) -> None:
    arena, todo = arena_of(model), commits("none")
    base = StreamedBase(arena, live(arena, 0, 1, "float32"), DEVICE, ring=ring(300), streams=Failing())
    with pytest.raises(RuntimeError, match="launch failure"):
        base.apply(todo[:1])
    assert arena.version == 0
    is_refused(base, todo)
    arena.reload(None)
    base.reload()
    assert same(base.apply(todo), arena_of(model).apply(todo))


def test_half_an_update_on_the_device_is_never_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, todo = arena_of(model), commits("none")
    base = DeviceBase(arena, live(arena, 0, 1, "float32"), DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(cuda.Plan, "trace", lambda plan: Failing().fail())
        with pytest.raises(RuntimeError, match="launch failure"):
            base.apply(todo[:1])
    is_refused(base, todo)
    base._streams = Failing()
    with pytest.raises(RuntimeError, match="launch failure"):
        base.reload()
    is_refused(base, todo)
    base._streams = InOrder()
    base.reload()
    assert same(base.apply(todo), arena_of(model).apply(todo))


def is_refused(base: Any, todo: list[Commit]) -> None:
    for use in (lambda: base.apply(todo[:1]), lambda: base.write(None)):
        with pytest.raises(EngineError, match="half updated"):
            use()


@BASES
def test_a_long_catch_up_takes_several_passes(model: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, todo = arena_of(model, "momentum"), arena_of(model, "momentum"), commits("momentum")
    base = make(mine, live(mine, 0, 1, "float32"), 0, 1)
    monkeypatch.setattr(streamed_module, "VERSIONS", 3)
    assert same(base.apply(todo), theirs.apply(todo))
    assert base.write(None) == theirs.digest()


@BASES
def test_untrained_tensors_that_no_live_memory_holds_are_in_every_digest(model: Path, make: Make) -> None:
    mine, theirs, todo = arena_of(model, "adam"), arena_of(model, "adam"), commits("adam")
    unheld = [name for name in mine.names if name not in mine.trained]
    base = make(mine, [target for target in live(mine, 0, 1, "float32") if target[0].name not in unheld], 0, 1)
    base.unheld = mine.digest_of(unheld)
    assert unheld
    assert base.write(MEMBERS[1]) == base.apply([]).digest == theirs.digest()
    assert same(base.apply(todo), theirs.apply(todo))
    assert base.write(None) == theirs.digest()


def test_the_head_stops_with_the_remedy_when_its_gpu_fails(model: Path) -> None:
    apply = head_update.on_device(arena_of(model), DEVICE, ring=ring(300), streams=Failing())
    with pytest.raises(StoreError, match="do not continue"):
        apply(commits("none")[1:])
    with pytest.raises(RunFailed, match="restart the head"):
        apply(commits("none")[:1])


def test_a_head_rebuilds_theta_through_its_gpu(model: Path, tmp_path: Path) -> None:
    mine, theirs, todo = arena_of(model), arena_of(model), commits("none")
    digest = theirs.apply(todo).digest
    ledger: Any = SimpleNamespace(version=4, commits={c.version: c for c in todo}, digests={4: digest})
    assert restore(mine, head_update.on_device(mine, DEVICE), RunPaths(tmp_path), ledger) is None
    assert mine.memory.tobytes() == theirs.memory.tobytes()
    ledger.digests[4] += 1
    with pytest.raises(VerifyError, match="the journal says"):
        restore(mine, head_update.on_device(mine, DEVICE), RunPaths(tmp_path), ledger)


def test_a_gpu_with_other_bits_is_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert same(head_update.on_device(arena_of(model), DEVICE)(commits("none")), arena_of(model).apply(commits("none")))
    others = SimpleNamespace(update=lambda *_, **__: Trace([1], [0.0]))
    monkeypatch.setattr(head_update, "kernels", lambda: others)
    with pytest.raises(RuntimeError, match="different bits"):
        head_update.on_device(arena_of(model), DEVICE)


# --- writing members ------------------------------------------------------------------------------------------------


@BASES
@pytest.mark.parametrize("dtype", CAST)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_member_is_written_as_the_arena_makes_it(model: Path, make: Make, dtype: Dtype, num_ranks: int) -> None:
    arena = arena_of(model)
    ranks = [live(arena, rank, num_ranks, dtype) for rank in range(num_ranks)]
    bases = [make(arena, targets, rank, num_ranks) for rank, targets in enumerate(ranks)]
    addresses = [values.data_ptr() for targets in ranks for _, values in targets]
    for member in MEMBERS:
        assert sum(base.write(member) for base in bases) % 2**64 == arena.digest()
        assert all(holds(targets, arena, member, dtype) for targets in ranks)
    assert addresses == [values.data_ptr() for targets in ranks for _, values in targets]


@BASES
@pytest.mark.parametrize(("kind", "num_ranks"), [("none", 2), ("momentum", 1), ("adam", 2)])
def test_a_base_advances_and_goes_back(model: Path, make: Make, kind: Kind, num_ranks: int) -> None:
    mine, theirs, todo = arena_of(model, kind, shared=True), arena_of(model, kind), commits(kind)
    attached = [
        Arena.attach(mine.memory_path, model, exclude=SCOPE, version=0, base_digest=mine.base_digest, optimiser=kind)
        for _ in range(num_ranks)
    ]
    ranks = [live(mine, rank, num_ranks, "float32") for rank in range(num_ranks)]
    bases = [make(arena, ranks[rank], rank, num_ranks) for rank, arena in enumerate(attached)]
    for some in (todo[:3], todo[3:], []):
        wanted = theirs.apply(some)
        assert same(combine([base.apply(some) for base in bases]), wanted)
        assert [arena.version for arena in attached] == [theirs.version] * num_ranks
        assert sum(base.write(MEMBERS[1]) for base in bases) % 2**64 == wanted.digest
        assert all(holds(targets, theirs, MEMBERS[1], "float32") for targets in ranks)
    mine.memory[:] = theirs.memory  # as another process would load a checkpoint with all state
    for base in bases:
        base.reload()
    assert sum(base.write(None) for base in bases) % 2**64 == theirs.digest()
    mine.reload(None)
    for arena, base in zip(attached, bases, strict=True):
        arena.version = 0
        base.reload()
    assert sum(base.write(None) for base in bases) % 2**64 == mine.digest()
    assert same(combine([base.apply(todo) for base in bases]), theirs_anew(model, kind, todo))


def theirs_anew(model: Path, kind: Kind, todo: list[Commit]) -> UpdateReport:
    return arena_of(model, kind).apply(todo)


@BASES
def test_reloading_repairs_tensors_that_no_update_reaches(model: Path, make: Make) -> None:
    arena, todo = arena_of(model), commits("none")
    arena.tensor("vision.patch.weight")[3, 4] += 1
    base = make(arena, live(arena, 0, 1, "float32"), 0, 1)
    wanted = arena_of(model).apply(todo)
    assert base.apply(todo).digest != wanted.digest
    arena.reload(None)
    base.reload()
    assert same(base.apply(todo), wanted)


@BASES
def test_an_error_in_theta_shows_in_the_digest(model: Path, make: Make) -> None:
    arena = arena_of(model)
    arena.tensor(COLUMNS)[3, 17] += 1
    ranks = [make(arena, live(arena, rank, 2, "bfloat16"), rank, 2) for rank in range(2)]
    assert sum(base.write(None) for base in ranks) % 2**64 == arena.digest() != arena.base_digest


# --- every dependence between copies and kernels is declared ----------------------------------------------------------


def updated(model: Path, streams: Any) -> bool:
    mine, theirs, todo = arena_of(model, "momentum"), arena_of(model, "momentum"), commits("momentum")[:2]
    report = Streamed(mine, DEVICE, ring=ring(500), streams=streams).apply(todo)
    return same(report, theirs.apply(todo)) and mine.memory.tobytes() == theirs.memory.tobytes()


def written(model: Path, streams: Any) -> bool:
    arena = arena_of(model)
    targets = live(arena, 0, 2, "bfloat16")
    StreamedBase(arena, targets, DEVICE, 0, 2, ring=ring(256), streams=streams).write(MEMBERS[1])
    return holds(targets, arena, MEMBERS[1], "bfloat16")


def loaded(model: Path, streams: Any) -> bool:
    arena = arena_of(model)
    targets = live(arena, 1, 2, "float16")
    DeviceBase(arena, targets, DEVICE, streams=streams, ring=ring(256)).write(MEMBERS[1])
    return holds(targets, arena, MEMBERS[1], "float16")


UPDATE_WAITS: set[Wait] = {("compute", "in"), ("out", "compute"), ("in", "out")}
WRITE_WAITS: set[Wait] = {("compute", "in"), ("in", "compute")}
PIPELINES = pytest.mark.parametrize(
    ("works", "waits"), [(updated, UPDATE_WAITS), (written, WRITE_WAITS), (loaded, WRITE_WAITS)]
)


@PIPELINES
def test_bits_are_right_in_every_order(model: Path, works: Any, waits: set[Wait]) -> None:
    for choose in ORDERS:
        streams = Adversary(choose)
        assert works(model, streams)
        assert streams.waits == waits


@PIPELINES
def test_without_any_one_wait_bits_go_wrong(model: Path, works: Any, waits: set[Wait]) -> None:
    """The test above can fail."""
    for wait in waits:
        assert not all(works(model, Adversary(choose, forget=wait)) for choose in ORDERS), wait
