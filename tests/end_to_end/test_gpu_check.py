"""tools/gpu/check.sh where there is no GPU: a rehearsal of every check, and a runner that takes nothing for granted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

TOOLS = ROOT / "tools" / "gpu"
pytest.importorskip("torch")


@pytest.mark.slow
def test_a_rehearsal_runs_every_check(tmp_path: Path) -> None:
    """vLLM's is left out: it takes a minute, and tests of the engine do the same."""
    pytest.importorskip("triton")
    command = ["bash", str(TOOLS / "check.sh"), "--device", "cpu", "--skip", "engine", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + (tmp_path / "check.log").read_text()[-5000:]
    rows = json.loads((tmp_path / "check.json").read_text())["rows"]
    passed = {row["check"] for row in rows if row["status"] == "passed"}
    assert passed == {
        *("environment", "digest", "pipelines", "speed", "bases", "graphs", "live_model", "collective", "head"),
    }
    assert {row["status"] for row in rows} == {"passed", "measured", "not run"}
    goals = {row["what"] for row in rows if row["detail"] == "how fast or large it is on a CPU says nothing"}
    assert goals >= {"perturb, all tensors", "update, all tensors", "base device: update"}
    *_, verdict, _, files = done.stdout.splitlines()
    assert verdict.startswith("a rehearsal on a CPU, which says nothing about a GPU")
    assert files == f"{tmp_path / 'check.json'}, {tmp_path / 'check.log'}"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The runner, whose checks are the scripts that a test writes."""
    monkeypatch.syspath_prepend(TOOLS)
    import check

    monkeypatch.setattr(check, "HERE", tmp_path / "a" / "b")
    check.HERE.mkdir(parents=True)
    return check


FOUND = """
import json, os, sys, time
findings = open(sys.argv[sys.argv.index("--findings") + 1], "a")
def found(what, status="passed"):
    row = {"what": what, "status": status, "detail": "", "value": None, "unit": "", "goal": None}
    findings.write(json.dumps(row) + "\\n"); findings.flush()
"""
SCRIPTS = {
    "fine": "found('one'); found('two')",
    "dies": "found('before'); os.abort()",
    "raises": "raise RuntimeError('CUDA error')",
    "torn": "found('before'); findings.write('{\"what')",
    "hangs": "found('before'); time.sleep(60)",
    "silent": "",
}


def run(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str
) -> tuple[int, dict[str, list[Any]]]:
    """The exit code of the runner with SCRIPTS, and by check (status, what or why)."""
    checks = [check.Check(name, "a check", (f"{name}.py",), (), 60.0) for name in SCRIPTS]
    for name, body in SCRIPTS.items():
        (check.HERE / f"{name}.py").write_text(FOUND + body)
    patient = [each._replace(limit_s=1.5) if each.name == "hangs" else each for each in checks]
    needy = check.Check("needy", "a check", ("fine.py",), ("json", "no_such_module"), 60.0)
    monkeypatch.setattr(check, "PHASES", (tuple(patient), (needy, needy._replace(name="later", needs=()))))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(out), "--scratch", str(tmp_path), *arguments])
    monkeypatch.setattr(check, "CHECKS", {each.name: each for phase in check.PHASES for each in phase})
    with pytest.raises(SystemExit) as ended:
        check.main()
    found = dict[str, list[Any]]()
    for row in json.loads((out / "check.json").read_text())["rows"]:
        found.setdefault(row["check"], []).append((row["status"], row["detail"] or row["what"]))
    return int(ended.value.code or 0), found


def test_whatever_becomes_of_one_check_the_others_are_made(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(check, monkeypatch, tmp_path)
    assert code == 1
    assert found == {
        "fine": [("passed", "one"), ("passed", "two")],
        "dies": [("passed", "before"), ("FAILED", "ended with exit code -6: no output")],
        "raises": [("FAILED", "ended with exit code 1: RuntimeError: CUDA error")],
        "torn": [("passed", "before")],
        "hangs": [("passed", "before"), ("FAILED", "not finished within 2 s")],
        "silent": [("FAILED", "ended without a finding")],
        "needy": [("not run", "no_such_module not usable here")],
        "later": [("passed", "one"), ("passed", "two")],
    }
    assert "FAILED dies: a check: ended with exit code -6" in capsys.readouterr().out


def test_a_numba_that_cannot_be_imported_is_hidden(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    assert check.without_broken_numba(tmp_path, environment) == ["numba"]
    program = "from hpc_es.noise import kernels; print(kernels().__name__)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "hpc_es.noise.reference\n"
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert check.without_broken_numba(tmp_path, environment) == []


def test_nothing_failed_is_exit_code_0_and_one_failure_is_1(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(check, monkeypatch, tmp_path, "--only", "fine", "needy")[0] == 0
    monkeypatch.setitem(SCRIPTS, "fine", "found('one'); found('a goal', 'FAILED')")
    assert run(check, monkeypatch, tmp_path, "--only", "fine", "needy")[0] == 1


def test_without_a_gpu_or_time_the_rest_is_not_run(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SCRIPTS, "fine", "found('a CUDA device', 'FAILED')")
    _, found = run(check, monkeypatch, tmp_path, "--only", "fine", "later")
    assert found["later"] == [("not run", "torch sees no CUDA device")]
    _, found = run(check, monkeypatch, tmp_path, "--only", "later", "--seconds", "1")
    assert found["later"] == [("not run", "the time for all checks is up")]


def test_a_goal_is_judged_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    import torch
    from findings import Findings

    for device in ("cuda", "cpu"):
        findings = Findings(tmp_path / device, torch.device(device))
        for value in (0.69, 0.7):
            findings.measured("perturb", value, "of copy bandwidth", goal=0.7)
    statuses = [
        [json.loads(line)["status"] for line in (tmp_path / device).read_text().splitlines()]
        for device in ("cuda", "cpu")
    ]
    assert statuses == [["FAILED", "passed"], ["not run", "not run"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "lacking"),
    [
        ("speed", "msgspec pydantic zmq h5py yaml numba safetensors tokenizers transformers"),
        ("bases, graphs, live_model, head", "pydantic zmq h5py yaml safetensors tokenizers transformers"),
    ],
)
def test_checks_get_by_with_the_packages_that_they_name(modules: str, lacking: str) -> None:
    pytest.importorskip("triton")
    program = f"import sys; sys.modules.update(dict.fromkeys({lacking.split()})); import {modules}"
    path = os.pathsep.join([str(TOOLS), str(ROOT)])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path})


WRONG = """
import sys
from dataclasses import replace
from hpc_es.noise import cuda
perturb, of = cuda.Pieces.perturb, cuda.Plan.of
cuda.Pieces.perturb = lambda pieces, noisy, total: perturb(pieces, noisy and replace(noisy, seed=1), total)
cuda.Plan.of = lambda updates, device: of([replace(u, seeds=[s + 1 for s in u.seeds]) for u in updates], device)
import speed
speed.main()
"""


@pytest.mark.slow
def test_other_noise_than_the_hosts_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), str(ROOT)]), "TRITON_INTERPRET": "1"}
    found = tmp_path / "findings"
    command = [sys.executable, "-c", WRONG, "--device", "cpu", "--findings", str(found)]
    subprocess.run(command, check=True, env=environment)
    failed = {row["what"] for row in map(json.loads, found.read_text().splitlines()) if row["status"] == "FAILED"}
    assert failed >= {"perturb: the bits of whole tensors", "update: the bits of whole tensors"}
