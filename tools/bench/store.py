"""The journal and run.h5, compared with what is usually written instead, and with the disk.

    python tools/bench/store.py [--updates 1000] [--rounds 50] [--folder FOLDER] [--json]

A synthetic run with N = 64 and T = 16: 1000 updates are 64,000 evaluations and 1,024,000 episodes.

- "journal, 1 result": append and fsync, as when results arrive one by one. usual: a row into SQLite, committed
  (synchronous=FULL). limit: write and fsync of as many bytes to a plain file. All three take turns.
- "journal, 256 results": the same with the largest group that one fsync makes durable.
- "run.h5, flush of a cohort": 64 results and the update, into a file of all updates but the last ones. usual: h5py,
  one compound row appended after the other, to an empty file. limit: the same bytes, written and synced.
- "run.h5, rebuilt": from the journal. limit: reading the journal's records alone.
- "run.h5, read": all episodes as a DataFrame. usual: the same table as JSON lines, by pandas, on a tenth of the rows,
  times ten. limit: reading the file's bytes.
"""

import argparse
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pandas as pd
from harness import Row, alternate, arguments, show

from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Candidate, Commit, Consumed, Episode, EvalId, Member, Result, Seeds, Term
from hpc_es.store import read
from hpc_es.store import records as journal
from hpc_es.store.hdf5 import Hdf5Writer, rebuild
from hpc_es.store.journal import JournalWriter, read_journal

NUM_MEMBERS, NUM_TASKS, GROUP = 64, 16, 256
COHORTS = 5
"""Flushes that are measured."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50, help="of one result; a tenth as many of 256")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        show("store", list(measure(Path(scratch), options)), as_json=options.json)


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    for size, rounds in ((1, options.rounds), (GROUP, max(options.rounds // 10, 1))):
        yield durable(folder / f"journal-{size}", size, rounds)
    paths = RunPaths(folder / "run")
    yield flush(paths, options.updates)
    yield build(paths)
    yield from reading(paths)


def durable(folder: Path, size: int, rounds: int) -> Row:
    """Measure `size` results made durable by one fsync."""
    folder.mkdir()
    paths, results = RunPaths(folder), [reported(0, slot % NUM_MEMBERS, random.Random(slot)) for slot in range(size)]
    writer = JournalWriter.create(paths, started)
    database = sqlite3.connect(folder / "usual.db")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE results (time REAL, worker TEXT, fitness REAL, episodes TEXT)")
    rows = [(r.time, r.worker, r.result.fitness, msgspec.json.encode(r.result.episodes)) for r in results]
    plain, before = FileIO(folder / "plain", "w"), writer.size

    def ours() -> None:
        for record in results:
            writer.append(record)
        writer.sync()

    def usual() -> None:
        database.executemany("INSERT INTO results VALUES (?, ?, ?, ?)", rows)
        database.commit()

    ours()
    num_bytes = writer.size - before
    seconds = alternate({"ours": ours, "usual": usual, "disk": lambda: synced(plain, num_bytes)}, rounds)
    writer.close()
    database.close()
    plain.close()
    what = f"journal, {size} result{'s' * (size > 1)} durable"
    ours_ms, usual_ms, disk_ms = (1e3 * seconds[way] for way in ("ours", "usual", "disk"))
    return Row(what, "ms", ours_ms, usual_ms, disk_ms, note="usual: SQLite; limit: the disk's write and fsync")


def synced(file: FileIO, num_bytes: int) -> None:
    file.write(bytes(num_bytes))
    os.fsync(file.fileno())


def flush(paths: RunPaths, num_updates: int) -> Row:
    """Measure flushes of run.h5. Leaves a run folder with journal and run.h5."""
    paths.root.mkdir()
    writer, tables = JournalWriter.create(paths, started), Hdf5Writer(paths)
    tables.add(started(1, 0))
    measured, grown = list[float](), list[int]()
    for version in range(num_updates):
        for record in update(version):
            writer.append(record)
            tables.add(record)
        writer.sync()
        if version >= num_updates - COHORTS - 1:
            before = paths.hdf5.stat().st_size if paths.hdf5.exists() else 0
            measured.append(elapsed(lambda: tables.flush(writer.size)))
            grown.append(paths.hdf5.stat().st_size - before)
    writer.close()
    rows = NUM_MEMBERS * (1 + NUM_TASKS)
    usual = elapsed(lambda: usual_append(paths.root / "usual.h5", rows))
    with FileIO(paths.root / "plain", "w") as plain:
        num_bytes = max(statistics.mean(grown[1:]), 1)
        limit = statistics.median(elapsed(lambda: synced(plain, int(num_bytes))) for _ in range(COHORTS))
    what = f"run.h5, flush of a cohort ({rows:,} rows) behind {num_updates * rows:,}"
    ours = statistics.median(measured[1:])
    return Row(what, "ms", 1e3 * ours, 1e3 * usual, 1e3 * limit, note="usual: h5py row by row; limit: write and fsync")


def usual_append(path: Path, num_rows: int) -> None:
    """Append one compound row after the other, as simple loggers do."""
    kind = np.dtype([(f"column{column}", np.float64) for column in range(15)])
    with h5py.File(path, "w") as file:
        table = file.create_dataset("episodes", (0,), kind, maxshape=(None,), chunks=(1024,))
        for number in range(num_rows):
            table.resize(number + 1, axis=0)
            table[number] = np.zeros((), kind)


def build(paths: RunPaths) -> Row:
    limit = elapsed(lambda: sum(1 for _ in read_journal(paths.root)))
    num_rows = len(read(paths.hdf5).episodes)
    paths.hdf5.unlink()
    ours = elapsed(lambda: rebuild(paths.root))
    return Row(f"run.h5, rebuilt ({num_rows:,} episodes)", "s", ours, limit=limit, note="limit: the journal read")


def reading(paths: RunPaths) -> Iterator[Row]:
    frame = read(paths.hdf5).episodes
    lines = paths.root / "episodes.jsonl"
    frame.iloc[: len(frame) // 10].to_json(lines, orient="records", lines=True)
    seconds = alternate(
        {
            "ours": lambda: read(paths.hdf5).episodes,
            "usual": lambda: pd.read_json(lines, lines=True),
            "disk": paths.hdf5.read_bytes,
        },
        3,
        warm_up=False,
    )
    what, note = f"run.h5, read ({len(frame):,} episodes)", "usual: JSON lines by pandas; limit: reading the file"
    yield Row(what, "s", seconds["ours"], 10 * seconds["usual"], seconds["disk"], note=note)
    size = paths.hdf5.stat().st_size / len(frame)
    yield Row("run.h5, bytes per episode", "bytes", size, 10 * lines.stat().st_size / len(frame))


def elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- the synthetic run --------------------------------------------------------------------------------------------


def started(generation: int, sealed: int) -> journal.Started:
    config = '{"run":{"name":"bench","num_updates":1000}}'
    return journal.Started(1e9, journal.SCHEMA_VERSION, "bench", generation, sealed, config, 1, {}, "host")


def update(version: int) -> Iterator[journal.AnyRecord]:
    """All records from the plan at a version until the digest of the next."""
    generator, now = random.Random(version), 1e9 + 10 * version
    members = [Member(generator.getrandbits(64), 1, 1e-3) for _ in range(NUM_MEMBERS)]
    ids = [EvalId(version, slot) for slot in range(NUM_MEMBERS)]
    tasks = tuple(range(NUM_TASKS))
    plan = (
        Assignment(name, version + 1, Candidate(version, member), tasks, version)
        for name, member in zip(ids, members, strict=True)
    )
    yield journal.Planned(now, version, tuple(plan))
    for name in ids:
        yield journal.Leased(now, name, "worker", 1)
        yield reported(version, name.slot, generator)
    consumed = tuple(Consumed(name, 0.5) for name in ids)
    terms = tuple(Term(member.seed, 1, 1e-3, 0, 0.1, 1e-6) for member in members)
    yield journal.Committed(now + 9, Commit(version + 1, consumed, Seeds(1e-3, terms)))
    yield journal.Digested(now + 9.5, version + 1, generator.getrandbits(64), 0.1, 0.5)


def reported(version: int, slot: int, generator: random.Random) -> journal.Reported:
    episodes = tuple(
        Episode(task, generator.random(), True, 4, 0, 900, 60, generator.random(), 0.01, "terminated")
        for task in range(NUM_TASKS)
    )
    fitness = sum(episode.reward for episode in episodes) / NUM_TASKS
    now = 1e9 + 10 * version
    result = Result(EvalId(version, slot), fitness, episodes, 1, 0.1, 0.2, 7.5)
    return journal.Reported(now + 8, "worker", result, now, now + 8, 1)


if __name__ == "__main__":
    main()
