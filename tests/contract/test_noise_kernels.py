"""The compiled kernels equal the reference, bit for bit, however the work is cut."""

import platform
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_cases import DTYPES, LAYOUTS, SIZES, STARTS, TILE, U64, Layout, close, fp32, perturbations, updates, values

from hpc_es.noise import BLOCK, reference, threads
from hpc_es.noise.reference import Array, Perturbation, Rows, State, Step, Update

pytest.importorskip("numba")
import numba

from hpc_es.noise import cpu, cpu_kernels
from hpc_es.noise.compiling import compiled


@settings(deadline=None, max_examples=60)
@given(size=SIZES, start=st.integers(0, 5000), seed=U64, ident=U64)
def test_noise_equals_the_reference(size: int, start: int, seed: int, ident: int) -> None:
    assert np.array_equal(cpu.noise(seed, ident, start, size), reference.noise(seed, ident, start, size))


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")  # numpy, of a signalling NaN
@settings(deadline=None, max_examples=150)
@given(layout=LAYOUTS, start=STARTS, ident=U64, noisy=st.none() | perturbations(), dtype=DTYPES)
def test_perturb_equals_the_reference(
    layout: Layout, start: int, ident: int, noisy: Perturbation | None, dtype: type[np.generic]
) -> None:
    theta, out, expected = values(layout.size), np.empty(layout.count, dtype), np.empty(layout.count, dtype)
    before = theta.copy()
    digest = cpu.perturb(theta, out, ident, noisy, start=start, rows=layout.rows)
    assert digest == reference.perturb(theta, expected, ident, noisy, start=start, rows=layout.rows)
    assert out.tobytes() == expected.tobytes()
    assert theta.tobytes() == before.tobytes()


@settings(deadline=None, max_examples=100)
@given(layout=LAYOUTS, start=STARTS, ident=U64, steps=st.lists(updates(), max_size=3))
def test_update_equals_the_reference(layout: Layout, start: int, ident: int, steps: list[Update]) -> None:
    theta = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
    theta[: layout.size // 8] = -0.0  # what is left untouched must keep even this
    expected = theta.copy()
    trace = cpu.update(theta, ident, steps, start=start, rows=layout.rows)
    wanted = reference.update(expected, ident, steps, start=start, rows=layout.rows)
    assert theta.tobytes() == expected.tobytes()
    assert close(trace, wanted)


@pytest.mark.parametrize("num_states", [1, 2])
@settings(deadline=None, max_examples=60)
@given(layout=LAYOUTS, start=STARTS, idents=st.tuples(U64, U64, U64), data=st.data())
def test_an_optimisers_update_equals_the_reference(
    num_states: int, layout: Layout, start: int, idents: tuple[int, int, int], data: st.DataObject
) -> None:
    steps = data.draw(st.lists(updates(num_states), max_size=3))
    generator = np.random.default_rng(0)
    mine = [generator.standard_normal(layout.size).astype(np.float32) for _ in range(1 + num_states)]
    mine[-1] **= 2  # v is a mean of squares; m may be anything
    mine[0][: layout.size // 8] = -0.0
    theirs = [values.copy() for values in mine]

    def state(values: list[Array]) -> list[State]:
        return [State(*pair) for pair in zip(values[1:], idents[1:], strict=False)]

    trace = cpu.update(mine[0], idents[0], steps, start=start, state=state(mine), rows=layout.rows)
    wanted = reference.update(theirs[0], idents[0], steps, start=start, state=state(theirs), rows=layout.rows)
    assert [values.tobytes() for values in mine] == [values.tobytes() for values in theirs]
    assert close(trace, wanted)


@settings(deadline=None, max_examples=50)
@given(layout=LAYOUTS, start=STARTS, ident=U64)
def test_digest_equals_the_reference(layout: Layout, start: int, ident: int) -> None:
    theta = values(layout.size)
    where: dict[str, Any] = {"start": start, "rows": layout.rows}
    assert cpu.digest(theta, ident, **where) == reference.digest(theta, ident, **where)


def test_several_versions_in_one_pass_round_as_several_passes_do() -> None:
    steps = [
        Update([3, 4], [1e-3, 2e-3]),
        Update([], []),
        Update([5], [1e-3], [1], 2, [9]),
        Update([6, 3], [-1e-3, 0.1]),
    ]
    at_once = np.random.default_rng(0).standard_normal(5001).astype(np.float32)
    one_by_one = at_once.copy()
    trace = cpu.update(at_once, 7, steps)
    digests = [cpu.update(one_by_one, 7, [step]).digests[0] for step in steps]
    assert at_once.tobytes() == one_by_one.tobytes()
    assert trace.digests == digests
    assert digests[0] == digests[1]


def test_several_steps_of_an_optimiser_in_one_pass_round_as_several_passes_do() -> None:
    step = Step(*fp32(5e-4, 0.9, 0.1, 0.999, 0.001, 1e-8))
    steps = [Update([3, 4], [1e-3, 2e-3], step=step), Update([], [], step=step), Update([5], [1e-3], step=step)]
    at_once, one_by_one = np.zeros((3, 5001), np.float32), np.zeros((3, 5001), np.float32)

    def state(values: Array) -> list[State]:
        return [State(values[1], 8), State(values[2], 9)]

    trace = cpu.update(at_once[0], 7, steps, state=state(at_once))
    digests = [cpu.update(one_by_one[0], 7, [step], state=state(one_by_one)).digests[0] for step in steps]
    assert at_once.tobytes() == one_by_one.tobytes()
    assert trace.digests == digests
    assert digests[0] == digests[1] != digests[2]


def test_the_order_of_members_matters_and_is_kept() -> None:
    """fp32 sums depend on their order: were it lost, this would not differ."""
    seeds, coefficients = list(range(16)), [float(np.float32(10.0 ** (-i % 7))) for i in range(16)]
    forwards, backwards = np.zeros(4096, np.float32), np.zeros(4096, np.float32)
    cpu.update(forwards, 7, [Update(seeds, coefficients)])
    cpu.update(backwards, 7, [Update(seeds[::-1], coefficients[::-1])])
    assert forwards.tobytes() != backwards.tobytes()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [BLOCK, 37 * BLOCK, TILE * BLOCK, 1001 * BLOCK])
def test_results_do_not_depend_on_threads_or_chunks(num_threads: int, chunk: int) -> None:
    member, steps = Perturbation(3, 1e-3 / 4096, 2, 5, 9), [Update([3, 4], [1e-3, 2e-3], [0, 1], 3, [8, 9])]
    theta = values(9_000)[20:].copy()
    whole, cut = np.empty(theta.shape, np.uint16), np.empty(theta.shape, np.uint16)
    after, changed, digests = theta.copy(), theta.copy(), list[tuple[int, int]]()
    expected = cpu.perturb(theta, whole, 7, member), cpu.update(after, 7, steps).digests[0]
    before = threads.start()

    def work(start: int) -> None:
        part = slice(start, start + chunk)
        digest = cpu.perturb(theta[part], cut[part], 7, member, start=start)
        digests.append((digest, cpu.update(changed[part], 7, steps, start=start).digests[0]))

    try:
        threads.start(num_threads)
        threads.run(work, reversed(range(0, theta.size, chunk)))
    finally:
        threads.start(before)
    assert cut.tobytes() == whole.tobytes()
    assert changed.tobytes() == after.tobytes()
    assert tuple(sum(shares) % 2**64 for shares in zip(*digests, strict=True)) == expected


@pytest.mark.parametrize("module", [reference, cpu])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_along_a_later_axis_are_the_cut_of_the_whole(module: ModuleType, shards: int) -> None:
    """Shards of a matrix by columns: in its own memory, and as a compact copy."""
    height, width = 7, 240 // shards
    matrix = np.random.default_rng(0).standard_normal((height, width * shards)).astype(np.float32)
    member, steps = Perturbation(3, 1e-3 / 4096, 2, 5, 9), [Update([3, 4], [1e-3, 2e-3], [0, 1], 3, [8, 9])]
    whole, after = np.empty_like(matrix), matrix.copy()
    digest = module.perturb(matrix.ravel(), whole.ravel(), 7, member)
    trace = module.update(after.ravel(), 7, steps)
    live, digests, changed = matrix.copy(), [], []
    for shard in range(shards):
        first, columns = shard * width, slice(shard * width, (shard + 1) * width)
        rows, out = Rows(width, width * shards, width * shards), np.empty((height, width), np.float32)
        view = live.ravel()[first : first + (height - 1) * width * shards + width]
        digests.append(module.perturb(view, out.ravel(), 7, member, start=first, rows=rows))
        assert out.tobytes() == whole[:, columns].tobytes()
        copy = live[:, columns].copy()
        changed += module.update(copy.ravel(), 7, steps, start=first, rows=rows._replace(pitch=width)).digests
        assert module.update(view, 7, steps, start=first, rows=rows).digests == changed[-1:]
        assert live[:, columns].tobytes() == copy.tobytes() == after[:, columns].tobytes()
    assert sum(digests) % 2**64 == digest
    assert sum(changed) % 2**64 == trace.digests[0]


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def work(item: int) -> None:
        if item == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        threads.run(work, range(10))


FUSED = {"x86_64": r"\bvf[n]?m(add|sub)", "aarch64": r"\bfn?m(la|ls|add|sub)\b"}
APART = {"x86_64": (r"\bv?mul[sp]s\b", r"\bv?add[sp]s\b"), "aarch64": (r"\bfmul\b", r"\bfadd\b")}
APPROXIMATE = r"\bv?(rsqrt|rcp)|\bf(rsqrt|recp)"
"""Estimates of roots and reciprocals, which some compilers put in place of the correctly rounded."""


@pytest.mark.skipif(platform.machine() not in FUSED, reason="the instruction names of this CPU are not known here")
@pytest.mark.parametrize("kernel", ["perturb_kernel", "update_kernel"])
def test_no_multiply_and_add_is_fused_in_the_machine_code(kernel: str) -> None:
    function = getattr(cpu_kernels, kernel)
    (signature,) = function.signatures
    again = compiled(*signature, cache=False)(function.py_func)  # cached code cannot be inspected
    text = again.inspect_asm(signature)  # type: ignore[attr-defined]
    assert all(re.search(instruction, text) for instruction in APART[platform.machine()])
    assert not re.search(FUSED[platform.machine()], text)
    assert not re.search(APPROXIMATE, text)


def test_kernels_compile_where_no_cache_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse_cache(signature: object, **options: object) -> object:
        calls.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", refuse_cache)
    compiled(numba.types.int64)(lambda x: None)
    assert calls == [True, False]
