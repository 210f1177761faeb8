"""Noise of low rank: its definition (design, section 15), and numba's kernels against the reference."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_cases import (
    DTYPES,
    LAYOUTS,
    MATRICES,
    STARTS,
    U64,
    Layout,
    close,
    low_rank_perturbations,
    low_rank_updates,
    updates,
    values,
)

from hpc_es.noise import noise, reference, tensor_id
from hpc_es.noise.reference import Array, Matrix, Perturbation, State, Update

pytest.importorskip("numba")
from hpc_es.noise import cpu

NAME = "model.layers.0.q_proj.weight"


def matrix_at(name: str, num_rows: int, num_columns: int) -> Matrix:
    return Matrix(num_rows, num_columns, tensor_id(f"{name}#A"), tensor_id(f"{name}#B"))


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_a_matrix_gets_the_product_of_two_factors_with_names_of_their_own(rank: int) -> None:
    a = noise(9, f"{NAME}#A", 0, 30 * rank).reshape(30, rank).astype(np.int64)
    b = noise(9, f"{NAME}#B", 0, 44 * rank).reshape(44, rank).astype(np.int64)
    theta, out = np.zeros(30 * 44, np.float32), np.empty(30 * 44, np.float32)
    cpu.perturb(theta, out, tensor_id(NAME), Perturbation(9, 1.0, rank=rank), matrix=matrix_at(NAME, 30, 44))
    assert np.array_equal(out.reshape(30, 44), (a @ b.T).astype(np.float32))
    assert np.linalg.matrix_rank(a @ b.T) == rank


def test_products_of_the_largest_values_are_exact_at_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    extreme = np.full(65536, reference.table().max(), np.int16)
    monkeypatch.setattr(cpu, "table", lambda: extreme)
    monkeypatch.setattr(reference, "table", lambda: extreme)
    for rank in range(1, 17):
        out = np.empty(64, np.float32)
        cpu.perturb(np.zeros(64, np.float32), out, 1, Perturbation(1, 1.0, rank=rank), matrix=Matrix(8, 8, 2, 3))
        assert set(out) == {np.float32(rank * int(extreme[0]) ** 2)}


def test_the_noise_has_mean_0_and_variance_1_at_every_rank() -> None:
    for rank in (1, 3, 16):
        found = [
            reference.low_rank_noise(seed, rank, matrix_at(NAME, 64, 64), 0, 4096) / (4096**2 * rank**0.5)
            for seed in range(300)
        ]
        assert abs(np.mean(found)) < 0.02
        assert np.var(found) == pytest.approx(1, abs=0.02)


def test_every_matrix_of_a_stack_has_noise_of_its_own() -> None:
    stack = reference.low_rank_noise(5, 1, matrix_at(NAME, 6, 8), 0, 3 * 48).reshape(3, 6, 8)
    assert [np.linalg.matrix_rank(each) for each in stack] == [1, 1, 1]
    assert np.linalg.matrix_rank(stack.reshape(18, 8)) == 3


@pytest.mark.parametrize("kernels", [reference, cpu])
def test_what_is_no_matrix_is_left_untouched(kernels: Any) -> None:
    theta, m = np.full(20, -0.0, np.float32), np.ones(20, np.float32)
    out = np.empty_like(theta)
    kernels.perturb(theta, out, 1, Perturbation(5, 1.0, rank=1))
    assert out.tobytes() == theta.tobytes()
    step = reference.Step(0.1, 0.5, 0.5)
    trace = kernels.update(theta, 1, [Update([5], [1.0], step=step, rank=1)], state=[State(m, 2)])
    assert trace.squares == [0.0]
    assert (theta.tobytes(), m.tobytes()) == (out.tobytes(), np.ones(20, np.float32).tobytes())


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")  # numpy, of a signalling NaN
@settings(deadline=None, max_examples=150)
@given(layout=LAYOUTS, start=STARTS, ident=U64, matrix=MATRICES, noisy=low_rank_perturbations(), dtype=DTYPES)
def test_perturb_equals_the_reference(
    layout: Layout, start: int, ident: int, matrix: Matrix, noisy: Perturbation, dtype: type[np.generic]
) -> None:
    theta, out, expected = values(layout.size), np.empty(layout.count, dtype), np.empty(layout.count, dtype)
    where: dict[str, Any] = {"start": start, "rows": layout.rows, "matrix": matrix}
    digest = cpu.perturb(theta, out, ident, noisy, **where)
    assert digest == reference.perturb(theta, expected, ident, noisy, **where)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_states", [0, 1, 2])
@settings(deadline=None, max_examples=60)
@given(layout=LAYOUTS, start=STARTS, idents=st.tuples(U64, U64, U64), matrix=MATRICES, data=st.data())
def test_update_equals_the_reference(
    num_states: int, layout: Layout, start: int, idents: tuple[int, int, int], matrix: Matrix, data: st.DataObject
) -> None:
    """Versions of low and of full rank may follow each other."""
    steps = data.draw(st.lists(low_rank_updates(num_states) | updates(num_states), max_size=3))
    generator = np.random.default_rng(0)
    mine = [generator.standard_normal(layout.size).astype(np.float32) for _ in range(1 + num_states)]
    if num_states:
        mine[-1] **= 2
    mine[0][: layout.size // 8] = -0.0
    theirs = [values.copy() for values in mine]

    def state(values: list[Array]) -> list[State]:
        return [State(*pair) for pair in zip(values[1:], idents[1:], strict=False)]

    where: dict[str, Any] = {"start": start, "rows": layout.rows, "matrix": matrix}
    trace = cpu.update(mine[0], idents[0], steps, state=state(mine), **where)
    wanted = reference.update(theirs[0], idents[0], steps, state=state(theirs), **where)
    assert [values.tobytes() for values in mine] == [values.tobytes() for values in theirs]
    assert close(trace, wanted)


@pytest.mark.parametrize("rank", [1, 6])
def test_results_do_not_depend_on_how_a_tensor_is_cut(rank: int) -> None:
    matrix, versions = matrix_at(NAME, 37, 44), [Update([1, 2, 3, 4, 5], [1e-8] * 5, rank=rank)]
    whole = np.linspace(-1, 1, 37 * 44, dtype=np.float32)
    parts = whole.copy()
    traces = [
        cpu.update(parts[start : start + 88], 3, versions, start=start, matrix=matrix)
        for start in range(0, parts.size, 88)
    ]
    digest = cpu.update(whole, 3, versions, matrix=matrix).digests[0]
    assert parts.tobytes() == whole.tobytes()
    assert sum(trace.digests[0] for trace in traces) % 2**64 == digest
