"""Where the wall-clock time of a finished run went, from run.h5 and the times of its files.

Invariant: a worker's connected seconds are in exactly one row each: what it reports of its evaluations (by its own
monotonic clock), messages (from the lease to the result at the head, minus the former), and waiting.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from hpc_es.paths import RunPaths
from hpc_es.store import Run, read


class Row(NamedTuple):
    """Seconds that one kind of process spent in one phase."""

    process: str
    phase: str
    seconds: float
    """For workers, the mean over those that ever connected. NaN if unknown."""


def phases(root: Path) -> list[Row]:
    """Phases of a run that was not interrupted. Errors: StoreError."""
    paths = RunPaths(root)
    run = read(paths.hdf5)
    return [*_start(paths, run), *_workers(run), *_head(run), *_end(paths, run)]


def _event(run: Run, what: str) -> float:
    found = run.events.loc[run.events["what"] == what, "time"]
    return float(found.iloc[-1]) if len(found) else float("nan")


def _start(paths: RunPaths, run: Run) -> Iterator[Row]:
    launched = float("nan") if _was_launched_again(paths, run) else _newest([paths.launcher_lock])
    head = _event(run, "head started")
    joined = float(run.workers["time_joined"].mean())
    yield Row("launcher, head", "imports, checks, processes, theta_0, journal", head - launched)
    yield Row("workers", "imports, vLLM's start, proofs, beyond that", joined - head)


def _was_launched_again(paths: RunPaths, run: Run) -> bool:
    """Whether `hpc-es run RUN` ran again on the finished run and replaced its lock and learning curve."""
    return _newest([paths.launcher_lock]) > _event(run, "head started")


def _workers(run: Run) -> Iterator[Row]:
    rows = run.evaluations[(run.evaluations["source"] == "run") & run.evaluations["time_received"].notna()]
    count = len(run.workers)
    reported = 0.0
    for phase, kinds, columns in (
        ("members: updating theta", ("train",), ("seconds_update",)),
        ("members: writing weights", ("train",), ("seconds_perturb",)),
        ("members: episodes", ("train",), ("seconds_rollout",)),
        ("centre: all of it", ("eval", "centre"), ("seconds_update", "seconds_perturb", "seconds_rollout")),
    ):
        seconds = float(rows.loc[rows["kind"].isin(kinds), list(columns)].sum().sum()) / count
        reported += seconds
        yield Row("workers", phase, seconds)
    held = float((rows["time_received"] - rows["time_leased"]).sum()) / count
    connected = float(run.workers["seconds_connected"].sum()) / count
    yield Row("workers", "messages to and from the head", held - reported)
    yield Row("workers", "waiting for work, or for the end", connected - held)


def _head(run: Run) -> Iterator[Row]:
    yield Row("head", "from a full cohort to its commit", float(_commit_delays(run).sum()))
    yield Row("head", "updating its theta, beside the workers", float(run.updates["seconds_update"].sum()))


def _commit_delays(run: Run) -> "pd.Series[float]":
    """Seconds by which each commit is delayed after nothing holds it back any more.

    Then its cohort is full, and everything planned at its version is leased, including the batches of the centre.
    """
    rows = run.evaluations[run.evaluations["source"] == "run"]
    consumed = rows[rows["consumed_version"].notna()]
    full = consumed.groupby(consumed["consumed_version"].astype(int) + 1)["time_received"].max()
    leased = rows.groupby(rows["dispatch_version"].astype(int) + 1)["time_leased"].max().reindex(full.index)
    free = pd.concat([full, leased], axis=1).max(axis=1)
    return run.updates.set_index("version")["time_committed"] - free


def _end(paths: RunPaths, run: Run) -> Iterator[Row]:
    stopped = _event(run, "head stopped")
    last = float(run.evaluations.loc[run.evaluations["source"] == "run", "time_received"].max())
    gone = _newest(paths.logs.glob("*.log"))
    yield Row("head", "from the last result to its end: checkpoint, run.h5", stopped - last)
    yield Row("workers", "engine's end", gone - stopped)
    drawn = paths.report / "learning_curve.png"  # written only by the launcher: `hpc-es report` writes other files
    if drawn.exists():
        ended = float("nan") if _was_launched_again(paths, run) else _newest([drawn])
        yield Row("launcher", "processes' end, report", ended - gone)


def _newest(files: Iterable[Path]) -> float:
    """Time of the last write to any of the files; NaN without files, as in a run that Slurm started."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=float("nan"))
