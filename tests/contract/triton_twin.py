"""The GPU's kernels equal the reference, bit for bit: in Triton's interpreter, or on a GPU.

Run by test_noise_cuda.py with TRITON_INTERPRET=1, in a process of its own; by tools/gpu/check.sh with
HPC_ES_TEST_DEVICE=cuda.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_cases import GPU_TILE, LAYOUTS, STARTS, U64, Layout, close, perturbations, updates, values

from hpc_es.noise import cuda, reference
from hpc_es.noise.reference import Array, Perturbation, Rows, State, Update

DEVICE = torch.device(os.environ.get("HPC_ES_TEST_DEVICE", "cpu"))
DTYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of what wraps around and of NaNs


def on_device(values: Array) -> torch.Tensor:
    """A copy."""
    return torch.from_numpy(values.copy()).to(DEVICE)


def bits(values: torch.Tensor) -> bytes:
    return values.cpu().view(torch.uint8).numpy().tobytes()


def test_the_cases_are_for_these_tiles() -> None:
    assert GPU_TILE == cuda.TILE


@settings(deadline=None, max_examples=40)
@given(layout=LAYOUTS, start=STARTS, ident=U64, noisy=st.none() | perturbations(), dtype=st.sampled_from(list(DTYPES)))
def test_perturb(layout: Layout, start: int, ident: int, noisy: Perturbation | None, dtype: torch.dtype) -> None:
    out, expected = torch.empty(layout.count, dtype=dtype, device=DEVICE), np.empty(layout.count, DTYPES[dtype])
    where: dict[str, Any] = {"start": start, "rows": layout.rows}
    before = values(layout.size)
    if DEVICE.type == "cuda" and noisy:  # a GPU adds to a NaN and gets one of its own, whatever that one was
        before[np.isnan(before)] = 1
    theta = on_device(before)
    digest = cuda.perturb(theta, out, ident, noisy, **where)
    assert int(digest) % 2**64 == reference.perturb(before, expected, ident, noisy, **where)
    assert bits(out) == expected.tobytes()
    assert bits(theta) == before.tobytes()


def test_noise_is_never_minus_zero() -> None:
    """Three places in either half of the table are 0, and the second half is the first one's negative."""
    before, member = np.full(2**17, -0.0, np.float32), Perturbation(1, 2.0**-12)
    out, expected = torch.empty(before.size, device=DEVICE), np.empty_like(before)
    cuda.perturb(on_device(before), out, 3, member)
    reference.perturb(before, expected, 3, member)
    assert np.count_nonzero(expected == 0) > 1
    assert bits(out) == expected.tobytes()


@pytest.mark.parametrize("num_states", [0, 1, 2])
@settings(deadline=None, max_examples=25)
@given(layout=LAYOUTS, start=STARTS, idents=st.tuples(U64, U64, U64), data=st.data())
def test_update(num_states: int, layout: Layout, start: int, idents: tuple[int, int, int], data: st.DataObject) -> None:
    steps = data.draw(st.lists(updates(num_states), max_size=3))
    generator = np.random.default_rng(0)
    theirs = [generator.standard_normal(layout.size).astype(np.float32) for _ in range(1 + num_states)]
    if num_states:
        theirs[-1] **= 2
    theirs[0][: layout.size // 8] = -0.0
    mine = [on_device(values) for values in theirs]

    def state(values: list[Array] | list[torch.Tensor]) -> list[State]:
        return [State(*pair) for pair in zip(values[1:], idents[1:], strict=False)]

    trace = cuda.update(mine[0], idents[0], steps, start=start, state=state(mine), rows=layout.rows)
    wanted = reference.update(theirs[0], idents[0], steps, start=start, state=state(theirs), rows=layout.rows)
    assert [bits(values) for values in mine] == [values.tobytes() for values in theirs]
    assert close(trace, wanted)


def test_pieces_of_a_pass_add_up_on_the_device() -> None:
    """The same plan for every piece; what does not count, such as a second copy of a piece, is updated all the same."""
    versions = [Update([5], [1e-3]), Update([6, 7], [1e-3, 2e-3], [0, 3], 4, [9, 9]), Update([8], [1e-3])]
    before = np.linspace(-1, 1, 5000, dtype=np.float32)
    expected, theta, copy = before.copy(), on_device(before), on_device(before)
    plan, total = cuda.Plan.of(versions, theta.device), cuda.zero(theta.device)
    for start in range(0, 5000, 1608):
        piece = slice(start, start + 1608)
        assert cuda.perturb(theta[piece], torch.empty_like(theta[piece]), 3, None, start=start, total=total) is total
        plan.apply(theta[piece], 3, start=start)
        plan.apply(copy[piece], 3, start=start, counts=False)
    assert close(plan.trace(), reference.update(expected, 3, versions))
    assert bits(theta) == bits(copy) == expected.tobytes()
    assert int(total) % 2**64 == reference.digest(before, 3)


def test_pieces_of_many_kinds_go_through_one_pass() -> None:
    """Other types, unaligned memory, rows, second copies and tensors that are not trained."""
    member, versions = Perturbation(5, 1e-3, 1, 2, 9), [Update([5, 6], [1e-3, 2e-3])]
    memory, pieces, wanted, digests = on_device(values(9000)), list[cuda.Piece](), list[Any](), [0, 0, 0]
    for number, dtype in enumerate([*DTYPES, *DTYPES]):
        rows = Rows(64, 128, 64) if number == 4 else None
        theta = memory[1500 * number + number % 2 :][: 1280 - number]
        out, trained, counts = torch.empty_like(theta, dtype=dtype), number != 2, number != 3
        pieces.append(cuda.Piece(theta, number, 8 * number, rows, out, (), trained, counts))
        before, expected = theta.cpu().numpy().copy(), np.empty(theta.numel(), DTYPES[dtype])
        where: dict[str, Any] = {"start": 8 * number, "rows": rows}
        digests[0] += counts * reference.perturb(before, expected, number, member if trained else None, **where)
        if trained:
            digests[1] += counts * reference.update(before, number, versions, **where).digests[0]
        digests[2] += counts * reference.digest(before, number, **where)
        wanted.append((before, expected))
    several, total = cuda.Pieces(pieces, DEVICE), cuda.zero(DEVICE)
    several.perturb(member, total)
    plan = cuda.Plan.of(versions, DEVICE)
    plan.run(several)
    after = cuda.zero(DEVICE)
    several.digest(after)
    found = [int(total), plan.trace().digests[0], int(after)]
    assert [digest % 2**64 for digest in found] == [digest % 2**64 for digest in digests]
    assert [(bits(p.theta), bits(p.out)) for p in pieces if p.out is not None] == [
        (theta.tobytes(), out.tobytes()) for theta, out in wanted
    ]


def test_versions_with_other_numbers_of_subspaces_follow_each_other() -> None:
    versions = [Update([5], [1e-3]), Update([6, 7], [1e-3, 2e-3], [0, 3], 4, [9, 9]), Update([8], [1e-3])]
    expected = np.linspace(-1, 1, 5000, dtype=np.float32)
    theta = on_device(expected)
    assert close(cuda.update(theta, 3, versions), reference.update(expected, 3, versions))
    assert bits(theta) == expected.tobytes()


def test_a_program_goes_through_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PROGRAMS", 2)
    expected = np.linspace(-1, 1, 40_001, dtype=np.float32)
    theta, versions = on_device(expected), [Update([1, 2], [1e-3, 1e-3]), Update([3], [1e-3])]
    assert close(cuda.update(theta, 3, versions), reference.update(expected, 3, versions))
    assert cuda.digest(theta, 3) == reference.digest(expected, 3)


@settings(deadline=None, max_examples=20)
@given(layout=LAYOUTS, start=STARTS, ident=U64)
def test_digest(layout: Layout, start: int, ident: int) -> None:
    theta = values(layout.size)
    where: dict[str, Any] = {"start": start, "rows": layout.rows}
    assert cuda.digest(on_device(theta), ident, **where) == reference.digest(theta, ident, **where)
