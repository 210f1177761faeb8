"""GPU code without a GPU: the pipelines in Triton's interpreter, the rest behind small seams."""

import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
from repository import ROOT

from hpc_es.errors import ConfigError
from hpc_es.params import head_update as head_updates
from hpc_es.params.arena import Arena
from hpc_es.params.head_update import head_update

PIPELINES = ROOT / "tests" / "contract" / "test_device_pipelines.py"
INTERPRETED = (
    "test_an_update_streamed_through_a_device_is_the_arenas[32768-2-adam]",
    "test_a_member_is_written_as_the_arena_makes_it[2-bfloat16-streamed]",
    "test_a_member_is_written_as_the_arena_makes_it[2-bfloat16-kept]",
    "test_a_base_advances_and_goes_back[momentum-1-kept]",
)
"""Triton's interpreter takes seconds for each."""


@pytest.mark.slow
def test_the_pipelines_equal_the_arena_with_the_kernels_of_the_device() -> None:
    """The others have the host's kernels in their place."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    chosen = [f"{PIPELINES}::{name}" for name in INTERPRETED]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\b4 passed", done.stdout), done.stdout[-1000:]


@pytest.mark.parametrize("kept", [True, False])
def test_members_and_updates_wait_for_the_device_once(
    tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, jit = pytest.importorskip("torch"), pytest.importorskip("triton.runtime.jit")
    import device_cases as cases

    from hpc_es.params.device import DeviceBase
    from hpc_es.params.streamed import StreamedBase

    launches, waits = list[str](), list[str]()
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *_, **__: launches.append(kernel.__name__))
    model = small_checkpoint.make(tmp_path / "model", small_checkpoint.values(cases.SHAPES))
    arena = cases.arena_of(model, "adam")
    base = (DeviceBase if kept else StreamedBase)(arena, cases.live(arena, 0, 2, "bfloat16"), cases.DEVICE)
    base.apply(cases.commits("adam")[:1])

    def waiting(wait: Any) -> Any:
        return lambda values: (waits.append(wait), wait(values))[1]

    for wait in ("__int__", "cpu", "item"):
        monkeypatch.setattr(torch.Tensor, wait, waiting(getattr(torch.Tensor, wait)))
    for use in (lambda: base.write(cases.MEMBERS[1]), lambda: base.apply(cases.commits("adam")[1:3])):
        launches.clear()
        waits.clear()
        use()
        assert len(waits) == 1
        assert launches


# --- the head without a GPU -------------------------------------------------------------------------------------------


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.from_pretrained(small_checkpoint.make(tmp_path / "model"))


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_updates, "_obstacle", lambda: "torch sees no CUDA device")


def test_a_head_without_a_gpu_updates_on_its_cores(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    assert head_update(arena, "auto") == head_update(arena, "cpu") == arena.apply


def test_a_gpu_that_is_demanded_and_missing_is_named_with_the_remedy(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    with pytest.raises(ConfigError, match=r"head.device=cuda, but torch sees no CUDA device.*head.device=auto"):
        head_update(arena, "cuda")


def test_a_head_without_torch_finds_that_it_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_updates.ctypes, "CDLL", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert head_updates._obstacle() == "torch is not installed"


def test_torch_is_not_imported_without_a_driver() -> None:
    program = (
        "import sys; from hpc_es.params import head_update; "
        "head_update.ctypes.CDLL = lambda name: (_ for _ in ()).throw(OSError()); "
        "assert 'NVIDIA driver' in head_update._obstacle(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("refusal", [RuntimeError("out of memory"), subprocess.CalledProcessError(1, "cc")])
def test_a_gpu_that_cannot_be_used_leaves_the_head_its_cores(
    arena: Arena, refusal: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(head_updates, "_obstacle", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def refuse(*_: Any) -> None:
        raise refusal

    monkeypatch.setattr(head_updates, "on_device", refuse)
    assert head_update(arena, "auto") == arena.apply
    assert str(refusal) in caplog.text
    with pytest.raises(ConfigError, match=r"the GPU cannot be used .*head.device=cpu"):
        head_update(arena, "cuda")


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> "Cudart":
    """A driver and a device, as far as pinning needs them."""
    torch, cudart = pytest.importorskip("torch"), Cudart()
    monkeypatch.setattr(head_updates.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    return cudart


def test_the_heads_arena_is_pinned_where_cuda_is_present_whatever_updates_it(
    arena: Arena, cudart: "Cudart", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = arena.memory.ctypes.data
    assert head_updates.pin_arena(arena) == "pinned"
    assert head_update(arena, "cpu") == arena.apply
    assert cudart.registered == {address: arena.memory.nbytes}
    assert "arena is in pinned host memory" in caplog.text


def test_a_refusal_to_pin_the_heads_arena_is_logged(arena: Arena, cudart: "Cudart") -> None:
    cudart.code = 2
    assert head_updates.pin_arena(arena) == "pageable: CUDA refused to pin it"


def test_a_device_that_cannot_be_had_leaves_the_arena_as_it_is(
    arena: Arena, cudart: "Cudart", monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy() -> None:
        raise RuntimeError("all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr("torch.cuda.cudart", busy)
    assert head_updates.pin_arena(arena).startswith("pageable: CUDA cannot be used here (all CUDA-capable")


def test_a_head_without_cuda_says_why_its_arena_is_not_pinned(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(head_updates, "_no_cuda", lambda: "torch sees no CUDA device")
    assert head_updates.pin_arena(arena) == "pageable: torch sees no CUDA device"
    assert "pageable host memory: torch sees no CUDA device" in caplog.text


# --- pinned memory ----------------------------------------------------------------------------------------------------


class Owner:
    """The owner of pinned memory."""


class Cudart:
    """The functions of torch.cuda.cudart() that pinning uses."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaError(self, code: int) -> int:
        return code

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory"


def test_memory_is_pinned_until_its_owner_goes() -> None:
    pytest.importorskip("torch")
    from hpc_es.params.pinned import pin

    cudart, memory, owner = Cudart(), np.zeros(1000, np.float32), Owner()
    assert pin(memory, owner, cudart)
    assert cudart.registered == {memory.ctypes.data: 4000}
    del owner
    assert not cudart.registered


def test_a_refusal_is_a_warning_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    from hpc_es.params.pinned import pin

    cudart, memory = Cudart(code=2), np.zeros(1000, np.float32)
    with caplog.at_level(logging.WARNING):
        assert not pin(memory, Owner(), cudart)
    assert "error 2, out of memory" in caplog.text
    assert "ulimit -l" in caplog.text


def test_memory_that_is_already_pinned_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    from hpc_es.params.pinned import ALREADY_REGISTERED, pin

    cudart = Cudart(code=ALREADY_REGISTERED)
    cudart.registered[7] = 1
    assert pin(np.zeros(1000, np.float32), Owner(), cudart)
    assert cudart.registered == {7: 1}
    assert not caplog.text


def test_cuda_does_not_report_the_refusal_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from hpc_es.params.pinned import pin

    launched = list[Any]()

    def launch(*_: Any, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")  # of the refused call

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", launch)
    assert not pin(np.zeros(1000, np.float32), Owner(), Cudart(code=2))
    assert launched == ["cuda"]


# --- CUDA streams -----------------------------------------------------------------------------------------------------


def test_lanes_are_streams_that_wait_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from hpc_es.params.streams import CudaStreams

    told, names = list[str](), iter(["in", "compute", "out"])

    class Stream:
        def __init__(self, device: Any, name: str = "") -> None:
            self.name = name or next(names)

        def __getattr__(self, call: str) -> Any:
            def tell(*other: Any) -> str:
                told.append(" ".join([self.name, call, *(getattr(o, "name", o) for o in other)]))
                return f"event of {self.name}"

            return tell

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(told.append(f"on {stream.name}")))
    with CudaStreams(torch.device("cuda")) as lanes:
        copied = lanes.submit("in", lambda: told.append("copy"))
        lanes.submit("compute", lambda: told.append("kernel"), [copied])
    assert told == [
        *(f"{lane} wait_stream current" for lane in ("in", "compute", "out")),
        *("on in", "copy", "in record_event"),
        *("compute wait_event event of in", "on compute", "kernel", "compute record_event"),
        *(f"{lane} synchronize" for lane in ("in", "compute", "out")),
    ]
