"""Run the checks of tools/gpu one after the other, each in a process of its own, and end with one table.

    see check.sh

Invariant: no check stops another, nothing outlives its time limit, and what was not run is never counted as passed.
The runner imports neither torch nor hpc_es, so it works where they do not.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from outcomes import A_GPU, Row, counts, failed, row_of, table

HERE = Path(__file__).resolve().parent
SECONDS = 450.0
"""For all checks together."""

KERNELS = ("numpy", "torch", "triton")
TESTS = (*KERNELS, "pytest", "hypothesis")
BASES = (*KERNELS, "msgspec")
PLANE = ("torch", "msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "yaml")
PIPELINES = (*TESTS, *BASES, *PLANE, "zmq", "h5py")
ENGINE = (*BASES, *PLANE, "zmq", "safetensors", "tokenizers", "transformers", "vllm")


class Check(NamedTuple):
    name: str
    about: str
    command: tuple[str, ...]
    """A script beside this one, and its arguments."""
    needs: tuple[str, ...]
    """Modules that it imports."""
    limit_s: float
    not_on_cpu: str = ""
    """Why a rehearsal leaves it out."""


IN_CI = "in Triton's interpreter, tests/contract/test_noise_cuda.py runs it"
PHASES: tuple[tuple[Check, ...], ...] = (
    (Check("environment", "the machine, and its bandwidths", ("environment.py",), ("torch",), 60),),
    (  # the checks of one phase run side by side
        Check("perturb", "kernels against the reference", ("twins.py", "perturb"), TESTS, 150, IN_CI),
        Check("update", "kernels against the reference, no state", ("twins.py", "update"), TESTS, 150, IN_CI),
        Check("momentum", "kernels against the reference", ("twins.py", "momentum"), TESTS, 150, IN_CI),
        Check("adam", "kernels against the reference", ("twins.py", "adam"), TESTS, 150, IN_CI),
        Check("digest", "kernels against the reference, and plans", ("twins.py", "digest"), TESTS, 150),
        Check(
            "pipelines", "bases and streams", ("twins.py", "pipelines"), (*TESTS, *BASES, *PLANE, "zmq", "h5py"), 150
        ),
    ),
    (Check("speed", "kernels on 1.2 B parameters, and beyond 2^32 elements", ("speed.py",), KERNELS, 100),),
    (Check("bases", "1.2 B parameters: digests, speed, memory", ("bases.py",), (*BASES, "numba"), 130),),
    (
        Check("graphs", "CUDA graphs over live weights", ("graphs.py",), BASES, 60),
        Check("live_model", "the direct map of fused and sharded weights", ("live_model.py",), BASES, 60),
        Check("collective", "NCCL and its fallback", ("collective.py",), PLANE, 150),
        Check("head", "the head's update", ("head.py",), BASES, 60),
    ),
    (Check("engine", "vLLM on a tiny model", ("engine.py",), ENGINE, 170),),
)
CHECKS = {check.name: check for phase in PHASES for check in phase}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal, tiny")
    parser.add_argument("--out", type=Path, help="folder for check.json and check.log")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK")
    parser.add_argument("--skip", nargs="+", choices=CHECKS, metavar="CHECK", default=[])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all checks together")
    parser.add_argument("--list", action="store_true", help="name the checks, run none")
    parser.add_argument("--scratch", type=Path, help="folder for what nobody needs afterwards")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{check.name:<12} {check.about}" for check in CHECKS.values()))
        return
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="hpc_es-gpu-"))
    out = options.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="hpc_es-gpu-check-"))
    out.mkdir(parents=True, exist_ok=True)
    chosen = set(options.only or CHECKS) - set(options.skip)
    runner = Runner(options.device, scratch, out, time.monotonic() + options.seconds)
    for phase in PHASES:
        runner.run([check for check in phase if check.name in chosen])
    print(table(runner.rows, options.device))
    print(f"\n{out / 'check.json'}, {out / 'check.log'}")
    sys.exit(any(row["status"] == "FAILED" for row in runner.rows))


class Runner:
    """Runs checks until the time is up, and keeps their findings in out/check.json, their output in out/check.log."""

    def __init__(self, device: str, scratch: Path, out: Path, deadline: float) -> None:
        self.rows = list[Row]()
        self._device, self._scratch, self._out, self._deadline = device, scratch, out, deadline
        self._environment = environment(device, scratch)
        self._broken = without_broken_numba(scratch, self._environment)
        self._obstacle = ""
        (out / "check.log").write_text("", encoding="utf-8")

    def run(self, checks: Sequence[Check]) -> None:
        """Side by side."""
        at_once = max(2, min(len(checks), (os.cpu_count() or 2) // 2))
        with ThreadPoolExecutor(at_once) as pool:
            for check, rows in zip(checks, pool.map(self._run, checks), strict=True):
                self.rows += [{"check": check.name, **row} for row in rows]
        if self._device == "cuda" and any(row["what"] == A_GPU for row in failed(self.rows)):
            self._obstacle = "torch sees no CUDA device"
        (self._out / "check.json").write_text(
            json.dumps({"device": self._device, "rows": self.rows}, indent=1), encoding="utf-8"
        )

    def _run(self, check: Check) -> list[Row]:
        left = self._deadline - time.monotonic()
        absent = missing(check.needs) + [module for module in check.needs if module in self._broken]
        late = "the time for all checks is up" if left < 5 else ""
        why = f"{', '.join(absent)} not usable here" if absent else self._obstacle or late
        if why := why or (check.not_on_cpu if self._device == "cpu" else ""):
            return [row_of(check.about, "not run", why)]
        print(f"{check.name}: {check.about} ...", flush=True)
        findings, log = self._scratch / f"{check.name}.findings", self._scratch / f"{check.name}.log"
        script, *rest = check.command
        command = [sys.executable, str(HERE / script), *rest, "--device", self._device, "--findings", str(findings)]
        limit, began = min(check.limit_s, left), time.monotonic()
        ended = carry_out(command, self._environment, log, limit)
        seconds = time.monotonic() - began
        lines = findings.read_text(encoding="utf-8").splitlines(keepends=True) if findings.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be torn
        text = log.read_text(encoding="utf-8", errors="replace")
        with (self._out / "check.log").open("a", encoding="utf-8") as all_logs:
            all_logs.write(f"==== {check.name}, {seconds:.1f} s, exit code {ended}\n{text}\n")
        if ended is None:
            rows.append(row_of(check.about, "FAILED", f"not finished within {limit:.0f} s"))
        elif ended != 0:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
            rows.append(row_of(check.about, "FAILED", f"ended with exit code {ended}: {last[:300]}"))
        elif not rows:
            rows.append(row_of(check.about, "FAILED", "ended without a finding"))
        print(f"{check.name}: {seconds:.1f} s, {counts(rows)}", flush=True)
        return rows


def carry_out(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> int | None:
    """The exit code, or None where the process and its children had to be ended."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=HERE.parents[1],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(device: str, scratch: Path) -> dict[str, str]:
    """Of every check; nothing is left in anybody's home."""
    own = {
        "HPC_ES_TEST_DEVICE": device,
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
    }
    return {**os.environ, **own, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}


def without_broken_numba(scratch: Path, environment: dict[str, str]) -> list[str]:
    """numba refuses a numpy newer than itself: then it is hidden from the checks, which have the reference instead."""
    if find_spec("numba") is None:
        return []
    done = subprocess.run([sys.executable, "-c", "import numba"], env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    print(f"numba does not work here: {done.stderr.splitlines()[-1]}", flush=True)
    hidden = scratch / "without"
    hidden.mkdir()
    (hidden / "numba.py").write_text(
        "raise ModuleNotFoundError('it does not work here', name='numba')\n", encoding="utf-8"
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(hidden), environment.get("PYTHONPATH", "")])
    return ["numba"]


def missing(modules: Sequence[str], find: Callable[[str], object] = find_spec) -> list[str]:
    return [module for module in dict.fromkeys(modules) if find(module) is None]


if __name__ == "__main__":
    main()
