"""What a check has found, and how it times: shared by the checks of tools/gpu/check.sh.

Invariant: every finding is on disk before the next one is made, so that a check that dies leaves what it had. A goal is
judged on a GPU only; what was not run never counts as passed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from outcomes import Row, line_of, row_of

ROUNDS, WARM_UP = 7, 2


class Findings:
    """One JSON line each in a file."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self.device = path, device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def check(self, what: str, is_right: bool, detail: str = "") -> None:
        self._add(row_of(what, "passed" if is_right else "FAILED", detail))

    def not_run(self, what: str, reason: str) -> None:
        self._add(row_of(what, "not run", reason))

    def fact(self, what: str, detail: object) -> None:
        self._add(row_of(what, "measured", str(detail)))

    def measured(self, what: str, value: float, unit: str, *, goal: float | None = None, detail: str = "") -> None:
        """Something to know, or with a goal something to reach."""
        if not self.on_gpu:
            self.not_run(what, "how fast or large it is on a CPU says nothing")
            return
        status = "measured" if goal is None else "passed" if value >= goal else "FAILED"
        self._add({**row_of(what, status, detail), "value": value, "unit": unit, "goal": goal})

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """An error inside is a failure of this step alone, unless the device is lost with it."""
        try:
            yield
        except Exception as error:
            self.check(what, False, f"{type(error).__name__}: {error}")
            if self.on_gpu:
                torch.cuda.synchronize()  # raises again where the context is broken: the rest cannot be trusted then

    def _add(self, row: Row) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)

    def seconds(self, work: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Median over rounds, by events on the current stream, after warming up. Once, by the clock, on a CPU."""
        if not self.on_gpu:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        for _ in range(WARM_UP):
            work()
        took = list[float]()
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(took)

    def copy_bandwidth(self) -> float:
        """Bytes a second that a copy on the device reads and writes."""
        source = torch.randn(2**29 if self.on_gpu else 2**12, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Of a check: where it runs, and the file for its findings."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--findings", type=Path, required=True)
    return parser


def begin(options: argparse.Namespace) -> Findings:
    return Findings(options.findings, torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"))
