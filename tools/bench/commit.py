"""Time from a full cohort until all workers know of the commit. It does not depend on the model's size.

    python tools/bench/commit.py [--workers 64] [--updates 30] [--members 16 30] [--parameters 1024 16777216] [--json]
    python tools/bench/commit.py RUN [--json]            # of an existing run: its share of the wall-clock time

Without RUN, a real head process serves `--workers` connections under CURVE, all from this process. The clock starts
when the last result of a cohort is sent, after all others are acknowledged, and stops when the last worker has read the
commit's record. In between are the head's decision, the journal with its fsyncs, and the announcement.
limit: one fsync by the disk of as many bytes as a commit's record has, once per update in the same folder.
usual: the parameters are updated before the workers are told, so the head's pass over its arena is added. Sending
parameters, which the usual way also needs, is not counted.

With RUN, the journal shows two parts of the wall-clock time: (a) from the last accepted result until everything planned
at the version is handed out, which a commit waits for by design (no worker is idle then: evaluations of the centre keep
them busy), and (b) the head's own time: from when nothing stands in the way until a worker has begun at the next
version, not counting the time while that worker was still busy, but at least until the commit. The announcement
precedes the order to begin, so (b) is an upper bound; a loose one if the head or all workers were lost, or if a
schedule holds a full cohort back. Goal: (b) sums up to less than 2 % of a run's wall-clock time of a minute or more.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Row, arguments, show
from head_capacity import Client, Crowd, make_config, prepared_folder, small_model, wait_for_head

from hpc_es.config import Config
from hpc_es.launch.process import Family, last_lines
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, EvalId
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal
from hpc_es.transport import messages
from hpc_es.transport.rendezvous import Rendezvous

WARM_UP = 2
GOAL_SHARE = 2.0
"""Goal for the head's own time, as a percentage of a run's wall-clock time."""
SHORTEST_S = 60.0
"""Shortest run whose share is judged: in runs of quick updates, messages take a visible part."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="folder of an existing run; default: measure now")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--updates", type=int, default=30, help="number of updates after the warm-up")
    parser.add_argument("--members", type=int, nargs="+", default=[16, 30], help="population N")
    parser.add_argument("--parameters", type=int, nargs="+", default=[2**10, 2**24])
    parser.add_argument("--folder", type=Path, help="folder for the runs; default: the system's temporary folder")
    options = parser.parse_args()
    show("commit", of_run(options.run) if options.run else here(options), as_json=options.json)


# --- a measurement ------------------------------------------------------------------------------------------------


def here(options: argparse.Namespace) -> list[Row]:
    rows = []
    for num_members in options.members:
        for num_parameters in options.parameters:
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                config = config_of(Path(scratch), num_members, num_parameters, WARM_UP + options.updates)
                known, synced, arena = measure(config, options.workers)
            what = f"commit known, N={num_members}, {options.workers} workers, {num_parameters:,} parameters"
            usual, note = statistics.median(known) + arena, "usual: after the head's pass over its arena; limit: fsync"
            rows.append(Row(what, "ms", statistics.median(known), usual, statistics.median(synced), note=note))
            rows.append(Row("  99th percentile", "ms", *np.quantile([known], [0.99]).tolist()))
    return rows


def config_of(folder: Path, num_members: int, num_parameters: int, num_updates: int) -> Config:
    config = make_config(folder, num_members, num_updates, 1, "sync")
    model = small_model(folder / f"model-{num_parameters}", num_parameters)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})


def measure(config: Config, num_workers: int) -> tuple[list[float], list[float], float]:
    """Milliseconds until all knew and of an fsync, per update; and the median pass over the arena."""
    paths = prepared_folder(config)
    with Family() as family:
        command = [sys.executable, "-m", "hpc_es", "head", str(paths.root), "--local", "--parent", str(os.getpid())]
        head = family.start(command, log=paths.log("head"))
        workers = Workers(paths, config, wait_for_head(paths), num_workers)
        workers.run(lambda: head.poll() is not None)
        while head.poll() is None:
            time.sleep(0.02)
        if head.poll() != 0:
            sys.exit(f"the head ended with code {head.poll()}:\n{last_lines(paths.log('head'))}")
    passes = [1e3 * r.seconds for r in read_journal(paths.root) if isinstance(r, journal.Digested)]
    return workers.known[WARM_UP:], workers.synced[WARM_UP:], statistics.median(passes[WARM_UP:])


class Workers(Crowd):
    """Clients that send the last result of a cohort once the others are acknowledged and the head's arena is idle."""

    def __init__(self, paths: RunPaths, config: Config, head: Rendezvous, num_workers: int) -> None:
        super().__init__(paths, config, head, num_workers)
        self.known: list[float] = []
        self.synced: list[float] = []
        self._num_workers = num_workers
        self._scratch = (paths.root / "fsync").open("wb")
        self._full_at = self._pass_s = 0.0
        self._num_told = 0
        self._given: list[tuple[Client, Assignment]] = []
        """Assignments of this version."""
        self._acks = 0

    def _work(self, client: Client, assignment: Assignment) -> None:
        if assignment.version not in self._digests:
            super()._work(client, assignment)
            return
        self._given.append((client, assignment))
        if len(self._given) < self.config.es.population:
            super()._work(client, assignment)

    def _answer(self, client: Client, message: messages.AnyMessage) -> None:
        match message:
            case messages.Ack():
                super()._answer(client, message)
                self._acks += 1
                if self._acks == self.config.es.population - 1:
                    time.sleep(2 * self._pass_s)  # the next update would wait for the head's pass over its arena
                    self._full_at = time.perf_counter()
                    super()._work(*self._given[-1])
            case messages.Announce(record=record):
                self._num_told += 1
                if self._num_told == self._num_workers:
                    self.known.append(1e3 * (time.perf_counter() - self._full_at))
                    self._sync(record or b"")
                    self._given, self._acks, self._num_told = [], 0, 0
                    began = time.perf_counter()
                    super()._answer(client, message)
                    self._pass_s = time.perf_counter() - began
            case _:
                super()._answer(client, message)

    def _sync(self, record: bytes) -> None:
        began = time.perf_counter()
        self._scratch.write(record)
        self._scratch.flush()
        os.fsync(self._scratch.fileno())
        self.synced.append(1e3 * (time.perf_counter() - began))


# --- an existing run ----------------------------------------------------------------------------------------------


class Update(NamedTuple):
    """Parts of one update, in seconds."""

    handing_out: float
    """Part (a) in the text above."""
    own: float
    """Part (b) in the text above."""
    arena: float
    """The head's pass over its arena, which runs at the same time."""


def of_run(root: Path) -> list[Row]:
    if not RunPaths(root).segments():
        sys.exit(f"error: {root} is not a run: it has no journal.1.hpcj")
    updates, wall_clock = read_updates(RunPaths(root))
    if not updates:
        sys.exit(f"{root}: no update was followed by an evaluation, so there is nothing to measure")
    for version, update in updates.items():
        waits = f"handing out {1e3 * update.handing_out:8.1f} ms, then known after {1e3 * update.own:8.1f} ms"
        print(f"update {version:4}: {waits}, arena {update.arena:6.2f} s")
    goal = GOAL_SHARE if wall_clock >= SHORTEST_S else None
    if goal is None:
        print(f"not judged: the goal of {GOAL_SHARE:g} % is for runs of minutes, and this one took {wall_clock:.1f} s")
    first = "(a) full cohort -> all that was planned is handed out"
    return [
        *_rows(first, [update.handing_out for update in updates.values()], wall_clock),
        *_rows("(b) then -> a worker has begun", [update.own for update in updates.values()], wall_clock, goal),
        Row(
            "the head's pass over its arena, beside it",
            "ms",
            1e3 * statistics.median(u.arena for u in updates.values()),
        ),
    ]


def _rows(what: str, seconds: list[float], wall_clock: float, goal: float | None = None) -> list[Row]:
    return [
        Row(f"{what}, share of wall-clock", "%", 100 * sum(seconds) / wall_clock, goal=goal),
        Row("  median", "ms", 1e3 * statistics.median(seconds)),
        Row("  maximum", "ms", 1e3 * max(seconds)),
    ]


def read_updates(paths: RunPaths) -> tuple[dict[int, Update], float]:
    """Parts of each update that was followed by an evaluation, and seconds between first lease and last such start."""
    reported, arena = dict[EvalId, float](), dict[int, float]()
    full, handed, committed = dict[int, float](), dict[int, float](), dict[int, float]()
    begun = dict[int, tuple[float, float]]()  # start of the first evaluation, and when its worker became free
    free, queued, handed_at, first_lease = dict[str, float](), set[EvalId](), 0.0, math.inf
    for record in read_journal(paths.root):
        match record:
            case journal.Planned(assignments=assignments):
                queued |= {assignment.eval_id for assignment in assignments}
            case journal.Unleased(eval_id=eval_id):
                queued.add(eval_id)
            case journal.Leased(eval_id=eval_id, time=when) | journal.Voided(eval_id=eval_id, time=when):
                queued.discard(eval_id)
                handed_at = handed_at if queued else when
                first_lease = min(first_lease, when)
            case journal.Reported(result=result, time=when, started=started, worker=worker):
                reported[result.eval_id] = when
                version = result.eval_id.version
                begun[version] = min(begun.get(version, (math.inf, 0.0)), (started, free.get(worker, 0.0)))
                free[worker] = when
            case journal.Committed(commit=commit, time=when):
                full[commit.version] = max(reported[each.eval_id] for each in commit.consumed)
                handed[commit.version], committed[commit.version] = handed_at, when
            case journal.Digested(version=version, seconds=seconds):
                arena[version] = seconds
    updates = dict[int, Update]()
    for version in sorted(full.keys() & begun.keys() & arena.keys()):
        (when, idle_since), ready = begun[version], max(full[version], handed[version])
        own = max(when - max(ready, idle_since), committed[version] - ready)
        updates[version] = Update(ready - full[version], own, arena[version])
    return updates, max((begun[version][0] for version in updates), default=0.0) - first_lease


if __name__ == "__main__":
    main()
