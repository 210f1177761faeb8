"""The way to another version: the cost model, what it learns, and that only speed depends on it."""

import asyncio
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import Counted, built_commit
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.engine.lab import LabEngine
from hpc_es.params import Arena, checkpoint
from hpc_es.params.catch_up import UNTRIED_LOAD_DECAY, Costs, Measured, Way, full_work, ways, work
from hpc_es.params.lab_model import write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.records import Commit, EvalId
from hpc_es.worker.catch_up import CatchUp, Pending

seconds = st.floats(0, 1e6)
costs = st.builds(Costs, seconds, seconds, seconds)
versions = st.integers(0, 60)


def commit(version: int, num_members: int = 4, null: bool = False, num_subspaces: int = 1) -> Commit:
    members = [
        Counted(EvalId(version - 1, slot), 100 * version + slot, 1, 0.1, 0, 0.0, 0.0, 1e-5)
        for slot in range(num_members)
    ]
    return built_commit(version, 0.1, tuple(members), null, num_subspaces)


def test_commits_that_come_in_several_answers_are_all_obtained():
    """The head bounds the size of an answer."""
    asked = list[tuple[int, int]]()

    async def obtain() -> list[Commit]:
        def fetch(first: int, last: int) -> None:
            asked.append((first, last))
            asyncio.get_running_loop().call_soon(pending.keep, [commit(first), commit(first + 1)])

        pending = Pending(SimpleNamespace(version=0), fetch)
        return await pending.obtain(range(1, 6))

    assert [each.version for each in asyncio.run(obtain())] == [1, 2, 3, 4, 5]
    assert asked == [(1, 5), (3, 5), (5, 5)]


# --- the model ----------------------------------------------------------------------------------------------------


@given(st.none() | versions, versions, st.sets(versions), st.lists(st.floats(0, 100), min_size=61, max_size=61), costs)
def test_the_choice_is_never_worse_than_any_other_way(here, wanted, checkpoints, worth, price):
    def by_hand(start: int) -> float:
        replay = price.begin + price.each * sum(worth[start + 1 : wanted + 1])
        return replay if start < wanted else 0.0

    found = ways(here, wanted, checkpoints, worth.__getitem__, price)
    by_start = {way.load: way.seconds for way in found}
    expected = {start: price.load + by_hand(start) for start in {0, *checkpoints} if start <= wanted}
    if here is not None and here <= wanted:
        expected[None] = by_hand(here)
    assert by_start == pytest.approx(expected)
    assert found[0].seconds == min(by_start.values())
    assert all(way.commits == range((here if way.load is None else way.load) + 1, wanted + 1) for way in found)


@given(versions, versions, st.sets(versions), costs, seconds)
def test_dearer_loads_never_make_a_load_the_choice(here, wanted, checkpoints, price, more):
    def loads(price: Costs) -> bool:
        return ways(here, wanted, checkpoints, lambda version: 1.0, price)[0].load is not None

    if not loads(price):
        assert not loads(price._replace(load=price.load + more))


def test_near_is_replayed_and_far_is_loaded():
    price = Costs(load=10.0, begin=1.0, each=0.1)
    for here, expected in ((100, None), (97, None), (60, 90), (101, 90)):
        assert ways(here, 100, [80, 90], lambda version: full_work(16, 1), price)[0].load == expected


def test_of_equally_fast_ways_staying_and_then_the_newest_come_first():
    free = Costs(0.0, 0.0, 0.0)
    assert [way.load for way in ways(7, 9, [3, 7], lambda version: 1.0, free)] == [None, 7, 3, 0]


def test_a_way_prints_its_steps():
    assert str(Way(None, range(4, 9), 1.234)) == "from here by 5 commits in 1.2 s"
    assert str(Way(0, range(1, 9), 20.0)) == "from the base model by 8 commits in 20 s"
    assert str(Way(5, range(6, 6), 0.5)) == "from checkpoint 5 by 0 commits in 0.5 s"


def test_a_subspace_costs_its_share_and_a_null_commit_nothing():
    assert work(commit(1, num_members=8)) == 9
    assert work(commit(1, num_members=8, num_subspaces=4)) == 3
    assert work(commit(1, null=True)) == 0


# --- what is learnt -----------------------------------------------------------------------------------------------


@given(
    st.floats(0, 1e4),
    st.lists(
        st.one_of(
            st.tuples(st.just("load"), seconds, seconds),
            st.tuples(st.just("lost"), seconds, seconds),
            st.tuples(st.just("apply"), st.floats(0, 1e5), seconds),
        )
    ),
)
def test_costs_are_never_negative_and_always_finite(base_load, history):
    measured = Measured(base_load)
    for what, amount, took in history:
        if what == "load":
            measured.loaded(took)
        elif what == "lost":
            measured.load_not_chosen()
        else:
            measured.applied(amount, took)
    assert all(0 <= cost < math.inf for cost in measured.costs)


@given(st.floats(0, 30), st.floats(0.001, 1))
def test_passes_of_different_sizes_tell_the_pass_from_the_work(pass_worth, each):
    measured, begin = Measured(), pass_worth * each
    for amount in (17, 34, 170, 17, 51, 340, 17) * 3:
        measured.applied(amount, begin + each * amount)
    for amount in (17, 1700):
        predicted = measured.costs.begin + measured.costs.each * amount
        assert predicted == pytest.approx(begin + each * amount, rel=0.15)


def test_passes_of_one_size_are_predicted_well_and_longer_ones_sensibly():
    measured = Measured()
    for _ in range(5):
        measured.applied(17, 3.4)
    price = measured.costs
    assert price.begin + 17 * price.each == pytest.approx(3.4)
    assert 0 < price.begin < 3.4 / 10  # taken to be worth one unit
    measured.applied(17, 100.0)  # the machine was busy
    for _ in range(20):
        measured.applied(17, 3.4)
    assert measured.costs.begin + 17 * measured.costs.each == pytest.approx(3.4, rel=0.1)


def test_one_slow_first_pass_does_not_make_members_free():
    measured = Measured()
    measured.applied(17, 60.0)  # kernels were compiled
    measured.applied(34, 4.0)
    assert measured.costs.each > 0


def test_one_slow_read_does_not_decide_for_ever():
    measured = Measured()
    measured.applied(17, 3.4)
    measured.loaded(100.0)
    lost = 0
    while ways(0, 20, [20], lambda version: 1.0, measured.costs)[0].load is None:
        measured.load_not_chosen()
        lost += 1
    assert measured.costs.load == pytest.approx(100 * UNTRIED_LOAD_DECAY**lost)
    assert 0 < lost < 500
    measured.loaded(1.0)  # the next read says how it is now
    assert measured.costs.load < 10


def test_a_read_from_memory_is_forgotten_once_reads_come_from_disk():
    measured = Measured(0.01)
    for _ in range(15):
        measured.loaded(20.0)
    assert measured.costs.load == pytest.approx(20, rel=0.05)


# --- a real arena -------------------------------------------------------------------------------------------------

NEWEST, KEPT = 12, (5, 10)


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunPaths, ModelConfig, list[int]]:
    """A run folder with checkpoints, and the digests of all versions."""
    write_lab_model(tmp_path / "model", 8)
    paths, arena = RunPaths(tmp_path / "run"), Arena.from_pretrained(tmp_path / "model")
    digests = [arena.base_digest]
    for version in range(1, NEWEST + 1):
        digests.append(arena.apply([commit(version, null=version == 7)]).digest)
        if version in KEPT:
            checkpoint.write(paths, arena)
    return paths, ModelConfig(path=str(tmp_path / "model"), dtype="float32"), digests


def travel(run: tuple[RunPaths, ModelConfig, list[int]], price: Costs, *stops: int) -> None:
    """Go to these versions one after the other; every one has the head's digest."""
    paths, model, digests = run

    async def obtain(wanted: range) -> list[Commit]:
        return [commit(version, null=version == 7) for version in wanted]

    async def go() -> None:
        engine = await LabEngine.start(model, EngineConfig(kind="lab"), threads=1)
        catch_up = CatchUp(engine, paths, known={}, obtain=obtain, usual_work=5.0)
        catch_up._measured = Fixed(price)
        for version in stops:
            await catch_up.go_to(version)
            assert (engine.version, engine.digest) == (version, digests[version])
        await engine.close()

    asyncio.run(go())


class Fixed(Measured):
    """Costs that nothing changes."""

    def __init__(self, price: Costs) -> None:
        super().__init__()
        self._price = price

    @property
    def costs(self) -> Costs:
        return self._price


DEAR_LOADS, DEAR_COMMITS = Costs(1e6, 0.1, 0.1), Costs(0.5, 0.1, 0.1)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The logged choices, up to the predicted time."""
    return [record.message.partition(" in ")[0] for record in caplog.records if "other ways" in record.message]


def test_far_behind_a_checkpoint_is_loaded_and_near_commits_are_applied(run, caplog):
    caplog.set_level(logging.INFO)
    travel(run, DEAR_COMMITS, 4, 12)
    assert lines(caplog) == ["theta_4 to theta_12: from checkpoint 10 by 2 commits"]
    caplog.clear()
    travel(run, DEAR_LOADS, 4, 12)
    assert lines(caplog) == ["theta_4 to theta_12: from here by 8 commits"]
    assert caplog.records[-1].message.startswith("theta_12 reached after ")


def test_backwards_every_way_ends_with_the_same_bits(run):
    for price in (DEAR_LOADS, DEAR_COMMITS):
        travel(run, price, 12, 11, 5, 7, 6, 4, 0, 10, 9)


@pytest.mark.parametrize("damage", ["digest", "pruned"])
def test_a_checkpoint_that_fails_leaves_the_next_best_way_and_never_half_a_version(run, caplog, damage):
    caplog.set_level(logging.INFO)
    theta = run[0].checkpoint(10) / checkpoint.THETA
    if damage == "pruned":
        theta.unlink()
    else:  # the arena is overwritten before the digest shows it
        data = bytearray(theta.read_bytes())
        data[-1] ^= 1
        theta.write_bytes(data)
    travel(run, DEAR_COMMITS, 6, 12)
    assert lines(caplog)[1:] == [
        "theta_6 to theta_12: from checkpoint 10 by 2 commits",
        "theta_6 to theta_12: from checkpoint 5 by 7 commits",
    ]
