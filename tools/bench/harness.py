"""Shared by all benchmarks: how cases are timed and reported, and the limits of this machine to compare them with.

    rows = [Row("perturb, bfloat16", "s", ours=0.12, usual=3.4, limit=0.1, min_ratio=8, max_of_limit=1.5)]
    show("noise", rows, as_json=options.json)

prints a table. With --json the last line is {"bench": "noise", "rows": [{"what": ..., "ratio": ..., ...}, ...]}, from
which tools/bench/all.sh makes one table of all benchmarks. A benchmark begins with `parser = arguments(__doc__)`.

The machine may be shared, so the cases that are compared take turns within one run (`alternate`), and medians count.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hpc_es.noise import Perturbation, Update, kernels, threads

Clock = Callable[[], float]
CACHED = 2**16
"""Number of elements that stay in a core's L2 cache: theta and its copy take 512 KiB."""
TITLES = ("", "ours", "usual", "ratio", "limit", "x limit", "goal")


@dataclass(frozen=True)
class Row:
    """Result of one case. Less is better, unless `unit` ends in "/s"."""

    what: str
    unit: str
    ours: float
    usual: float | None = None
    """Result of the usual way, in the same unit and the same run."""
    limit: float | None = None
    """The best that this machine can do, in the same unit and the same run."""
    min_ratio: float | None = None
    """Goal: smallest `ratio`."""
    max_of_limit: float | None = None
    """Goal: largest `of_limit`."""
    goal: float | None = None
    """Goal for `ours` itself."""
    note: str = ""
    """Explanation of the usual way or the limit."""

    @property
    def ratio(self) -> float | None:
        """How many times better ours is than the usual way."""
        return None if self.usual is None else self._worse(self.usual, self.ours)

    @property
    def of_limit(self) -> float | None:
        """How many times worse ours is than the limit; 1 is perfect."""
        return None if self.limit is None else self._worse(self.ours, self.limit)

    @property
    def met(self) -> bool | None:
        """Whether every goal is met; None without goals."""
        goals = [
            None if self.min_ratio is None or self.ratio is None else self.ratio >= self.min_ratio,
            None if self.max_of_limit is None or self.of_limit is None else self.of_limit <= self.max_of_limit,
            None if self.goal is None else self._worse(self.ours, self.goal) <= 1,
        ]
        judged = [goal for goal in goals if goal is not None]
        return all(judged) if judged else None

    def _worse(self, one: float, other: float) -> float:
        """How many times worse `one` is than `other`."""
        return other / one if self.unit.endswith("/s") else one / other


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the module's docstring as its help, and the option --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON, for tools/bench/all.sh")
    return parser


def alternate(
    cases: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: bool = True, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each case. Every round runs each case once, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + warm_up):
        for name, work in cases.items():
            began = clock()
            work()
            if number >= warm_up:
                seconds[name].append(clock() - began)
    return {name: statistics.median(measured) for name, measured in seconds.items()}


def show(bench: str, rows: Sequence[Row], *, as_json: bool) -> None:
    """Print the table and, if asked, the JSON as the last line."""
    lines = [TITLES, *map(cells, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(TITLES))]
    for line in lines:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print(line[0].ljust(len(first)), *others, sep="  ", flush=True)
    if as_json:
        made = [{**asdict(row), "ratio": row.ratio, "of_limit": row.of_limit, "met": row.met} for row in rows]
        print(json.dumps({"bench": bench, "rows": made}), flush=True)


def cells(row: Row) -> tuple[str, ...]:
    """Format a row as the cells of a table with TITLES."""

    def quantity(value: float | None) -> str:
        return "" if value is None else f"{value:.3g} {row.unit}" if value < 1000 else f"{value:,.0f} {row.unit}"

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"

    goals = [
        "" if row.min_ratio is None else f"ratio >= {row.min_ratio:g}",
        "" if row.max_of_limit is None else f"x limit <= {row.max_of_limit:g}",
        "" if row.goal is None else f"{'>=' if row.unit.endswith('/s') else '<='} {row.goal:g} {row.unit}",
    ]
    judged = {True: "met", False: "MISSED", None: ""}[row.met]
    goal = ", ".join(filter(None, goals)) + (f": {judged}" if judged else "")
    ours, usual, limit = map(quantity, (row.ours, row.usual, row.limit))
    return (row.what, ours, usual, times(row.ratio), limit, times(row.of_limit), goal)


# --- limits of this machine ---------------------------------------------------------------------------------------
# Each function returns work for `alternate`, to be timed in turn with what it limits: the same number of bytes or
# elements on the same pool of threads (hpc_es.noise.threads).


def copying(num_bytes: int, num_threads: int) -> Callable[[], None]:
    """Copy with numpy: half of `num_bytes` is read, half is written. Choose far more than the cache holds."""
    source, target = np.ones(num_bytes // 16), np.ones(num_bytes // 16)
    chunk = -(-source.size // (8 * num_threads))

    def copy(begin: int) -> None:
        np.copyto(target[begin : begin + chunk], source[begin : begin + chunk])

    return lambda: threads.run(copy, range(0, source.size, chunk))


def perturbing(
    num_elements: int, num_threads: int, dtype: type[np.generic], member: Perturbation
) -> Callable[[], None]:
    """Run the perturb kernel repeatedly over one small array per thread."""
    theta, outs = np.ones((num_threads, CACHED), np.float32), np.empty((num_threads, CACHED), dtype)

    def perturb(thread: int) -> None:
        for _ in range(num_elements // (CACHED * num_threads)):
            kernels().perturb(theta[thread], outs[thread], 1, member)

    return lambda: threads.run(perturb, range(num_threads))


def updating(num_elements: int, num_threads: int, versions: list[Update]) -> Callable[[], None]:
    """Run the update kernel repeatedly over one small array per thread."""
    theta = np.ones((num_threads, CACHED), np.float32)

    def update(thread: int) -> None:
        for _ in range(num_elements // (CACHED * num_threads)):
            kernels().update(theta[thread], 1, versions)

    return lambda: threads.run(update, range(num_threads))
