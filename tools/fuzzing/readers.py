"""What reads a run folder: the functions behind the commands, and what a head does when it resumes."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from fuzzing.base import Base
from fuzzing.child import Answer, digest_of
from hpc_es.analysis.report.build import write_report
from hpc_es.cli import _status_at_rest
from hpc_es.cli.report import read_runs
from hpc_es.config import load, refuse_another
from hpc_es.errors import HpcEsError, VerifyError
from hpc_es.head.ledger import Ledger
from hpc_es.head.loop import restore
from hpc_es.launch import prepare
from hpc_es.params import Arena
from hpc_es.paths import RunPaths
from hpc_es.recorded import verify as verifying
from hpc_es.store import read as read_run
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter, fold_journal

TABLES = ("evaluations", "updates", "episodes", "evals", "workers", "events")


def verify(base: Base, run: Path) -> Answer:
    report = verifying.verify(run)
    if not report.ok:
        raise VerifyError("; ".join(report.problems))
    said = [(line.version, line.digest, line.recorded, line.num_members, line.fitness) for line in report.versions]
    return tuple(line.digest for line in report.versions), digest_of((said, report.num_results, report.num_counted))


def status(base: Base, run: Path) -> Answer:
    answer = _status_at_rest(RunPaths(run))
    said = (answer.run_id, answer.generation, answer.state, answer.fitness, answer.eval_fitness, answer.cohort_done)
    return base.digests[: answer.version + 1], digest_of(said)


def replay(base: Base, run: Path) -> Answer:
    arena = verifying.replay(run)
    return (*base.digests[: arena.version], arena.digest()), ""


def read(base: Base, run: Path) -> Answer:
    return _tables(run)


def read_alone(base: Base, run: Path) -> Answer:
    """run.h5 without its journal."""
    alone = base.folder / "alone"
    shutil.rmtree(alone, ignore_errors=True)
    alone.mkdir()
    shutil.copy2(run / "run.h5", alone / "run.h5")
    return _tables(alone / "run.h5")


def _tables(path: Path) -> Answer:
    tables = read_run(path)
    said = {table: getattr(tables, table).to_csv(index=False) for table in TABLES}
    digests = tuple(int(digest) for digest in tables.updates["digest"].dropna())
    return (int(tables.attrs["base_digest"]), *digests), digest_of(said)


def report(base: Base, run: Path) -> Answer:
    out = base.folder / "report"
    shutil.rmtree(out, ignore_errors=True)
    written = write_report(read_runs([str(run)]), out)
    tables = [path.read_text() for path in written.tables if path.suffix == ".csv"]
    updates = read_run(run).updates
    return (base.digests[0], *map(int, updates["digest"].dropna())), digest_of(tables)


def resume(base: Base, run: Path) -> Answer:
    """What launcher and head do before anything is played."""
    paths = RunPaths(run)
    config = load(paths.config).config
    began_with = prepare.began_config(paths)
    if began_with is not None:
        refuse_another(began_with.model_dump_json(), config, paths.config)
    prepare.write_folder(config)
    arena = Arena.from_pretrained(config.model.path)
    writer = JournalWriter.create(paths, lambda generation, sealed: _started(config, arena, generation, sealed))
    ledger = Ledger()
    try:
        fold_journal(run, ledger.apply)
        restore(arena, arena.apply, paths, ledger)
    finally:
        writer.close()
    return (*base.digests[: ledger.version], arena.digest()), digest_of(sorted(ledger.evaluations))


def _started(config, arena, generation: int, sealed: int) -> journal.Started:  # type: ignore[no-untyped-def]
    dump, digest = config.model_dump_json(), arena.base_digest
    return journal.Started(
        time.time(), journal.SCHEMA_VERSION, config.run.name, generation, sealed, dump, digest, {}, "h"
    )


def run_on(base: Base, run: Path) -> Answer:
    """`hpc-es run`, to the end of the run."""
    command = [sys.executable, "-m", "hpc_es", "run", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    if "Traceback" in done.stderr + done.stdout:
        raise RuntimeError(done.stderr)
    if done.returncode != 0:
        raise HpcEsError(done.stderr)
    return tuple(line.digest for line in verifying.verify(run).versions), ""


READERS = (verify, status, replay, read)
