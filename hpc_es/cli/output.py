"""Output of the commands: the console, tables, JSON, and the progress of a run.

Invariant: on a terminal, progress is redrawn in place. Elsewhere (a log file, a pipe) it is plain lines with a time,
one per event and one per new version.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hpc_es import modes
from hpc_es.cli.terminal import harmless
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import Status

if TYPE_CHECKING:  # it brings numba
    from hpc_es.analysis.statistics.summary import Summary
    from hpc_es.launch.slurm import Role
    from hpc_es.launch.slurm_commands import JobStatus
    from hpc_es.recorded.verify import VersionLine

NUM_EVENTS_SHOWN = 4
MAX_WORKERS_SHOWN = 50
"""Workers or jobs that are shown one by one; of more, their numbers, and those that have failed."""
NUM_FAILED_SHOWN = 10
NUM_ABSENT_SHOWN = 4
ABSENT_EVERY_S = 15.0
"""How often progress in a log repeats that a worker is not connected."""
MAX_DETAIL = 500
WIDTH_IN_FILES = 160
"""Width of the output in pipes and files, which have no width of their own: enough for every cell of every table."""
NUM_ROWS_SHOWN = 24
"""Longest table that is shown in full without --all."""
NUM_ROWS_AT_ENDS = 4
"""Number of first and of last rows that are shown of a longer table."""

_STDOUT, _STDERR = 1, 2
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")

Row = TypeVar("Row")
Column = tuple[str, Sequence[str]]
"""Title and cells."""


class _Screen(Console):
    """A console that prints text unchanged: no markup, no emoji codes, no control sequences except those of rich."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)  # escape first: rich would drop some control characters


def console(*, stderr: bool = False) -> Console:
    """Make the console on which a command prints its tables and lines."""
    out = _Screen(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = WIDTH_IN_FILES
    return out


def tables(
    columns: Sequence[Column], room: int, *, num_keys: int = 1, justify: Literal["left", "right"] = "left"
) -> Iterator[Table]:
    """Yield one table, or several narrower ones if it is wider than `room`, so that no number is cut.

    Each begins with the first `num_keys` columns. `justify` applies to the other columns.
    """
    widths = [max(map(len, (title, *cells))) + 2 for title, cells in columns]
    keys, shown = list(range(num_keys)), list[int]()
    for place in range(num_keys, len(columns)):
        if shown and sum(widths[other] for other in (*keys, *shown, place)) > room:
            yield _table(columns, keys, shown, justify)
            shown = []
        shown.append(place)
    yield _table(columns, keys, shown, justify)


def _table(
    columns: Sequence[Column], keys: Sequence[int], others: Sequence[int], justify: Literal["left", "right"]
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place in (*keys, *others):
        table.add_column(Text(columns[place][0]), no_wrap=True, justify="left" if place in keys else justify)
    for row in zip(*(columns[place][1] for place in (*keys, *others)), strict=True):
        table.add_row(*map(Text, row))
    return table


def excerpt(rows: Sequence[Row], notable: Callable[[Row], bool], *, whole: bool) -> list[Row | None]:
    """The rows to show of a table. Of a long one, these are its ends and the notable rows, with None for each gap."""
    if whole or len(rows) <= NUM_ROWS_SHOWN:
        return list(rows)
    shown: list[Row | None] = []
    for place, row in enumerate(rows):
        if min(place, len(rows) - 1 - place) < NUM_ROWS_AT_ENDS or notable(row):
            shown.append(row)
        elif shown[-1] is not None:
            shown.append(None)
    return shown


@contextlib.contextmanager
def stdout_for(json_wanted: bool) -> Iterator[None]:
    """With --json, redirect to stderr what environments, engines and their processes print to stdout meanwhile."""
    if not json_wanted or sys.stdout is None:  # None: the program was started with a closed stdout
        yield
        return
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)


def print_json(value: Any) -> None:
    """Print one JSON object to stdout, also of structs and paths, with NaN as null. In ASCII, for every locale."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    print(_BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text), flush=True)


def duration(seconds: float | None) -> str:
    """Format a duration as h:mm:ss; ? if it is unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def status_line(status: Status) -> str:
    """Format a status as one line."""
    parts = [f"version {status.version} of {status.num_updates}", status.state]
    if status.fitness is not None:
        parts.append(f"fitness {status.fitness:.4f}")
    if status.eval_fitness is not None:
        parts.append(f"held out {status.eval_fitness:.4f} (version {status.eval_version})")
    parts.append(f"{len(status.workers)} worker{'' if len(status.workers) == 1 else 's'}")
    counts = Counter(each.state for each in status.absent)
    parts += [f"{count} {state}" for state, count in counts.items()]
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:.0f} tokens/s")
    if status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    return ", ".join(parts)


def status_table(status: Status, *, whole: bool = False) -> RenderableType:
    """Format a status for a terminal: progress bar, cohort, workers, latest events.

    whole: show every worker, however many there are.
    """
    done = Table.grid(padding=(0, 2))
    share = status.version + min(status.cohort_done / max(status.cohort_size, 1), 1.0)
    done.add_row(
        Text(status.run_id, style="bold"),
        ProgressBar(total=max(status.num_updates, 1), completed=min(share, status.num_updates), width=30),
        Text(f"{duration(status.seconds_elapsed)} since start, {duration(status.seconds_left)} left"),
    )
    workers = _workers_in_numbers(status) if not whole and len(status.workers) > MAX_WORKERS_SHOWN else _workers(status)
    idle = f"; {status.why_idle}" if status.why_idle else ""
    cohort = Text(f"cohort {status.cohort_done} of {status.cohort_size}{idle}")
    events = [Text(event, style="dim") for event in status.events[-NUM_EVENTS_SHOWN:]]
    absent = [Text(line) for line in absent_lines(status)]
    return Group(done, Text(status_line(status)), cohort, *([workers] if status.workers else []), *absent, *events)


def _workers(status: Status) -> RenderableType:
    workers = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("worker", "host", "state", "version", "busy", "useful", "results"):
        workers.add_column(title)
    for worker in status.workers:
        shares = (f"{worker.busy_share:.0%}", f"{worker.useful_share:.0%}", str(worker.num_results))
        workers.add_row(worker.seat, worker.host, worker.state, str(worker.version), *shares)
    return workers


def _workers_in_numbers(status: Status) -> RenderableType:
    """How many workers are in which state and at which version, and what they have done on average."""
    many = status.workers
    states = Counter(worker.state for worker in many)
    versions = Counter(worker.version for worker in many)
    busy, useful = fmean(worker.busy_share for worker in many), fmean(worker.useful_share for worker in many)
    in_states = ", ".join(f"{count} {state}" for state, count in states.most_common())
    at_versions = ", ".join(f"{count} at {version}" for version, count in sorted(versions.items(), reverse=True))
    return Text(
        f"  workers: {in_states}; busy {busy:.0%}, useful {useful:.0%} on average, "
        f"{sum(worker.num_results for worker in many):,} results\n"
        f"  versions: {at_versions}\n"
        f"  each worker: hpc-es status --all"
    )


def absent_lines(status: Status) -> list[str]:
    """One line for each worker that is not connected, with the reason."""
    lines = [
        f"worker {each.seat} {each.state} {duration(each.seconds)}{' ago' if each.state in ('failed', 'died') else ''}"
        + (f": {each.detail[:MAX_DETAIL]}" if each.detail else "")
        for each in status.absent[:NUM_ABSENT_SHOWN]
    ]
    more = len(status.absent) - NUM_ABSENT_SHOWN
    return [*lines, f"and {more} more that are not connected"] if more > 0 else lines


def jobs_report(jobs: "Sequence[tuple[Role, JobStatus]]", *, whole: bool = False) -> RenderableType:
    """The run's Slurm jobs; of very many their numbers, the head, and some that have failed, unless `whole`."""
    if whole or len(jobs) <= MAX_WORKERS_SHOWN:
        return jobs_table(jobs)
    failed = [(role, job) for role, job in jobs if role != "head" and job.has_failed]
    heads = [(role, job) for role, job in jobs if role == "head"]
    return Group(Text(jobs_line([job for _, job in jobs])), jobs_table([*heads, *failed[:NUM_FAILED_SHOWN]]))


def jobs_table(jobs: "Sequence[tuple[Role, JobStatus]]") -> Table:
    """The run's Slurm jobs, one row for each element of an array."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("job", "role", "state", "node", "time left"):
        table.add_column(title, no_wrap=True)
    table.add_column("why")
    for role, job in jobs:
        left = duration(job.seconds_left) if job.seconds_left is not None else ""
        table.add_row(job.name, role, job.state, job.node, left, job.explanation)
    return table


def jobs_line(jobs: "Sequence[JobStatus]") -> str:
    """Number of jobs in each state, with the reason: 1 RUNNING, 2 PENDING (Resources: waits for free nodes)."""
    counts = Counter(f"{job.state} ({job.explanation})" if job.explanation else job.state for job in jobs)
    return "jobs: " + ", ".join(f"{count} {state}" for state, count in counts.items())


def versions_table(versions: "Sequence[VersionLine]", *, whole: bool = True) -> Table:
    """Table of the versions that `verify` checked; without `whole`, a long one shows its ends and wrong versions."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("version", "digest", "recorded", "members", "fitness", "norm"):
        table.add_column(title, no_wrap=True)
    for line in excerpt(versions, lambda line: not line.ok, whole=whole):
        if line is None:
            table.add_row("...")
            continue
        recorded = "not" if line.recorded is None else "the same" if line.ok else f"{line.recorded:016x}"
        fitness = "" if line.fitness is None else f"{line.fitness:.4f}"
        norm = "null" if line.null else f"{line.update_norm:.3g}"
        table.add_row(str(line.version), f"{line.digest:016x}", recorded, str(line.num_members), fitness, norm)
    return table


class Progress:
    """Shows the launcher's events and the status of its run. `live` is None without a terminal."""

    def __init__(self, out: Console, live: Live | None) -> None:
        self._out, self._live = out, live
        self._shown: tuple[Any, ...] = ()

    def status(self, status: Status) -> None:
        if self._live:
            self._live.update(status_table(status))
            return
        # Print a new line only after a change that matters to a reader of a log
        absent = tuple((each.seat, each.state, each.seconds // ABSENT_EVERY_S) for each in status.absent)
        key = (status.version, status.state, len(status.workers), status.eval_version, absent)
        if key != self._shown:
            self._shown = key
            self._print("; ".join((status_line(status), *absent_lines(status))))

    def event(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._out.print(f"{time.strftime('%H:%M:%S')} {text}")


@contextlib.contextmanager
def progress(out: Console) -> Iterator[Progress]:
    if not out.is_terminal:
        yield Progress(out, None)
        return
    with Live(Text("starting head and workers ..."), console=out, refresh_per_second=4, transient=True) as live:
        yield Progress(out, live)


def report(paths: RunPaths, out: Console) -> "Summary":
    """Print the summary of a finished run, draw its learning curve, and suggest commands to try next."""
    from hpc_es.analysis.figures.plots import plot_learning_curve, save_png
    from hpc_es.analysis.statistics.summary import render, summary
    from hpc_es.store import read

    run = read(paths.root)
    result = summary(run)
    out.print(render(result))
    with modes.within(paths.root):
        curve = save_png(plot_learning_curve([run]), paths.report / "learning_curve.png")
    out.print(f"learning curve: {curve}")
    out.print("try next:", style="bold")
    for command in (
        f"hpc-es verify {paths.root}",
        f"hpc-es replay {paths.root} --version {result.num_commits} --out models/{paths.root.name}",
        f"hpc-es report {paths.root}",
        f"hpc-es eval {paths.root} --versions 0,last --repeats 4 sampling.temperature=0.7",
        f"hpc-es run {paths.config} run.name={paths.root.name}-seed1 run.seed=1",
    ):
        out.print(f"  {command}")
    return result
