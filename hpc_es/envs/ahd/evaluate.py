"""Evaluate a program: its decisions are made in a sandbox, and scored outside of it.

Invariant: whatever a program does is an outcome, a score or the reason why it is invalid; only a sandbox that fails is
an error. The same program, set of instances and seed give the same scores on every machine.
"""

import base64
import binascii
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_es.envs.ahd.tasks import Evaluation
from hpc_es.envs.sandbox import Execution, Limits, Sandbox
from hpc_es.seeds import derive

Array = np.ndarray[Any, np.dtype[Any]]

INSIDE = Path(__file__).with_name("inside.py")
PACKAGES = ("numpy",)
"""Packages that programs can import, besides Python's standard library."""
MAX_PROGRAM = 100_000
"""Most characters of a program."""
START_SECONDS = 5.0
"""CPU time for starting Python and importing numpy, besides the program's own."""
WALL_FACTOR = 3
"""The wall-clock limit is this many times the CPU limit, because evaluations run side by side."""
FINAL_CPU_SECONDS = 600.0
MAX_BYTES = 2**25
"""Most bytes of decisions per execution. Larger sets of instances are evaluated in parts."""


@dataclass(frozen=True)
class Evaluated:
    """What a program achieved."""

    objectives: tuple[float, ...]
    """Objective on each instance; NaN where the program failed. Empty if it is invalid altogether."""
    invalid: str = ""
    """Why the program is invalid; empty if it is not."""
    seconds: float = 0.0
    """Wall-clock time in the sandbox."""

    @property
    def objective(self) -> float:
        """Mean objective over the valid instances, to be minimised; NaN if the program is invalid."""
        valid = [each for each in self.objectives if np.isfinite(each)]
        return float(np.mean(valid)) if valid and not self.invalid else np.nan

    @property
    def num_failures(self) -> int:
        return sum(not np.isfinite(each) for each in self.objectives)


def evaluate(source: str, task: Evaluation, *, seed: int = 1234, limits: Limits | None = None) -> Evaluated:
    """Evaluate a program, in one sandboxed process per MAX_BYTES of decisions. Errors: EnvError when the sandbox fails.

    seed: of what is random in the program and in ant colonies. limits: instead of the task's own.
    """
    if len(source) > MAX_PROGRAM:
        return Evaluated((), f"the program is longer than {MAX_PROGRAM} characters")
    objectives: list[float] = []
    seconds = 0.0
    for part in _parts(task):
        execution = _execute(source, task, part, seed, limits or _limits(task))
        seconds += execution.seconds
        if execution.ended != "exit":
            return Evaluated((), f"limit: {execution.ended}", seconds)
        if execution.output.startswith("!"):
            return Evaluated((), execution.output[1:], seconds)
        decided = _decisions(execution.output, task, len(part))
        if decided is None:
            return Evaluated((), "the program ended its evaluation", seconds)
        for instance, decision in zip(part, decided, strict=True):
            seed_here = derive(seed, task.problem, instance.shape[0], len(objectives))
            objectives.append(np.nan if decision is None else task.score(instance, decision, seed_here))
    failed = not np.isfinite(objectives).all() if not task.is_final else np.isnan(objectives).all()
    return Evaluated(tuple(objectives), "invalid decisions" if failed else "", seconds)


def _limits(task: Evaluation) -> Limits:
    cpu_seconds = (FINAL_CPU_SECONDS if task.is_final else task.cpu_seconds) + START_SECONDS
    return Limits(seconds=WALL_FACTOR * cpu_seconds, cpu_seconds=cpu_seconds, memory_mib=1024, processes=8)


def _parts(task: Evaluation) -> Iterator[Array]:
    """The instances, in parts whose decisions are small enough to be sent at once."""
    size = max(MAX_BYTES // _num_bytes(task), 1)
    for first in range(0, len(task.instances), size):
        yield task.instances[first : first + size]


def _num_bytes(task: Evaluation) -> int:
    shape, dtype = task.decided
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _execute(source: str, task: Evaluation, part: Array, seed: int, limits: Limits) -> Execution:
    request = {
        "decision": task.decision,
        "names": task.names,
        "gives_numpy": task.gives_numpy,
        "is_final": task.is_final,
        "options": task.options,
        "seed": seed % 2**32,
    }
    file = io.BytesIO()
    np.save(file, part, allow_pickle=False)
    files: dict[str, bytes | Path] = {
        "inside.py": INSIDE,
        "program.py": source.encode("utf-8", "replace"),
        "request.json": json.dumps(request).encode(),
        "instances.npy": file.getvalue(),
    }
    room = 2 * (_num_bytes(task) + 1) * len(part) + 2**16
    generous = limits.model_copy(update={"output_chars": room})
    with Sandbox(generous, files, packages=PACKAGES) as sandbox:
        return sandbox.run(["python3", "inside.py"])


def _decisions(output: str, task: Evaluation, count: int) -> list[Array | None] | None:
    """Decisions on each instance, None where the program failed; None if the output is anything else."""
    shape, dtype = task.decided
    num_bytes = _num_bytes(task)
    try:
        packed = base64.b64decode(output.encode("ascii"), validate=True)
        data = zlib.decompressobj().decompress(packed, count * (num_bytes + 1) + 1)
    except (ValueError, binascii.Error, zlib.error):
        return None
    found: list[Array | None] = []
    at = 0
    while at < len(data) and len(found) < count:
        if data[at] == 0:
            found.append(None)
            at += 1
        elif len(data) - at > num_bytes:
            found.append(np.frombuffer(data, dtype, int(np.prod(shape)), at + 1).reshape(shape))
            at += 1 + num_bytes
        else:
            return None
    return found if len(found) == count and at == len(data) else None
