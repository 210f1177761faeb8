"""The GPU's kernels, where there is no GPU: in Triton's interpreter, and as the machine code that a GPU would run."""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hpc_es.noise.reference import Perturbation, State, Update

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
cuda = pytest.importorskip("hpc_es.noise.cuda")

TWIN = Path(__file__).with_name("triton_twin.py")
POINTERS = {
    "pieces": "*i64",
    "runs": "*i64",
    "segments": "*i64",
    "digest": "*i64",
    "digests": "*i64",
    "digests_of_state": "*i64",
    "squares": "*fp64",
    "bounds": "*i32",
    "seeds": "*i64",
    "coefficients": "*fp32",
    "subspaces": "*i32",
    "partition_seeds": "*i64",
    "steps": "*fp32",
}


@pytest.mark.slow
def test_the_kernels_equal_the_reference_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TWIN)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"^11 passed", done.stdout, re.MULTILINE), done.stdout[-1000:]


def signature_of(kernel: Any, constants: Collection[str]) -> dict[str, str]:
    return {
        parameter.name: "constexpr"
        if parameter.name in constants
        else parameter.annotation_type or POINTERS[parameter.name]
        for parameter in kernel.params
    }


def compiled(kernel: Any, constants: Mapping[str, Any], arch: int, options: Mapping[str, Any]) -> tuple[str, str]:
    """PTX and SASS of a kernel as every launch makes it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature_of(kernel, constants), dict(constants), {})
    asm = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options)).asm
    return asm["ptx"], disassembled(asm["cubin"])


def disassembled(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


PERTURB = [
    (cuda.perturb_kernel, {"NOISY": noisy, "NUM": num, "KIND": kind, "ROWS": rows})
    for noisy, num, kind, rows in [
        *((True, 1, "fp32", False), (True, 4, "bf16", False), (True, 64, "fp16", False), (False, 1, "bf16", False)),
        *((True, 1, "fp32", True), (True, 1, "bf16", True)),
    ]
] + [(cuda.perturb_kernel, {"NOISY": True, "NUM": 1, "KIND": "bf16", "ROWS": False, "ALIGNED": False})]
UPDATE = [
    (cuda.update_kernel, {"STATES": states, "NUM": num, "ROWS": rows})
    for states, num, rows in [(0, 1, False), (0, 4, False), (1, 1, False), (0, 1, True)]
]
DIGEST = [(cuda.digest_kernel, {"ROWS": rows}) for rows in (False, True)]
ADAM = (cuda.update_kernel, {"STATES": 2, "NUM": 1, "ROWS": False})


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("kernel", "constants"), PERTURB + UPDATE + DIGEST)
def test_nothing_is_fused_flushed_or_approximate(kernel: Any, constants: dict[str, Any], arch: int) -> None:
    ptx, sass = compiled(*with_all((kernel, constants)), arch, cuda.EXACT)
    assert not re.search(r"\.ftz|\.approx|\bfma\.\w+\.f", ptx)
    assert not re.search(r"\bFFMA|\.FTZ|\bMUFU", sass)
    if not constants.get("ALIGNED", True):
        assert set(re.findall(r"\b(?:LDG\.E\.EF|STG\.E)[.\w]*", sass)) == {"LDG.E.EF", "STG.E.U16"}
        return
    moved = set(re.findall(r"\b(LDG|STG)\.E(?:\.EF)?(\.\w+)?", sass))
    assert ("LDG", ".128") in moved, "memory is read 16 bytes at a time"
    if kernel is not cuda.update_kernel:  # which also moves its members and sums
        assert moved <= {("LDG", ".128"), ("STG", ".128"), ("LDG", ".64")}
    assert kernel is cuda.digest_kernel or ("STG", ".128") in moved
    if constants.get("NUM", 1) == 1:
        shared = set(re.findall(r"\b(?:LDS|STS)[.\w]*", sass))
        assert shared <= {"LDS.64", "STS.64"}, "only lines and sums go through shared memory; more at a time conflicts"
    sums = set(re.findall(r"\b(?:RED|ATOM)G?\.[\w.]+", sass))
    assert sums == {"REDG.E.ADD.64.STRONG.GPU"} or sums == {"RED.E.ADD.64.STRONG.GPU"}, "integers, in any order"


@pytest.mark.parametrize("size", [1, 1032])
def test_no_value_of_an_argument_makes_another_variant(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the function that selects a launch's variant, for values that Triton specialises on by default."""
    launched = list[Any]()

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        variants, constants = binder(*arguments, **options)[1], [p.name for p in kernel.params if p.is_constexpr]
        types = signature_of(kernel, constants).values()
        assert [v for v in variants if v[0] != "constexpr"] == [(t, None) for t in types if t != "constexpr"]
        launched.append(kernel)

    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(JITFunction, "run", launch)
    theta = torch.zeros(size)
    for value in (1, 16, 17, 2**63):
        member = Perturbation(value, 1.0, value % 2, 2, value)
        cuda.perturb(theta, torch.zeros(size, dtype=torch.bfloat16), value, member)
        cuda.update(theta, value, [Update([value] * (value % 19), [1.0] * (value % 19))], state=[State(theta, value)])
        cuda.digest(theta, value)
    assert set(launched) == {cuda.perturb_kernel, cuda.update_kernel, cuda.digest_kernel}


def test_many_pieces_are_a_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    launched = list[str]()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    memory, device = torch.zeros(16_000), torch.device("cpu")
    pieces = cuda.Pieces([cuda.Piece(memory[start:][:80], start) for start in range(0, 16_000, 80)], device)
    pieces.perturb(Perturbation(1, 1.0), cuda.zero(device))
    pieces.digest(cuda.zero(device))
    cuda.Plan.of([Update([1], [1.0])], device).run(pieces)
    assert launched == ["perturb_kernel", "digest_kernel", "update_kernel"]


@pytest.mark.parametrize("arch", [80, 90])
def test_adam_divides_and_takes_roots_correctly_rounded(arch: int) -> None:
    """Their own machine code refines an estimate by fused steps, so only the PTX can be held to anything."""
    ptx, _ = compiled(*with_all(ADAM), arch, cuda.EXACT)
    assert not re.search(r"\.ftz|\.approx|\bfma\.\w+\.f", ptx)
    assert {"sqrt.rn.f32", "div.rn.f32"} <= set(re.findall(r"(?:sqrt|div)\.\w+\.f32", ptx))


def test_without_the_option_multiply_and_add_are_fused() -> None:
    """The test above can fail."""
    _, sass = compiled(*with_all(UPDATE[0]), 80, {**cuda.EXACT, "enable_fp_fusion": True})
    assert re.search(r"\bFFMA", sass)


def with_all(case: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    kernel, constants = case
    itemsize = 4 if constants.get("KIND", "fp32") == "fp32" else 2
    return kernel, {"ALIGNED": True, **constants, "W": 16 // itemsize, "B": cuda.TILE, "RUN": cuda.RUN}
