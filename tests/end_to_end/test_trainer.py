"""Two-phase commits with real processes: heads, workers and trainers of the toy method (toy.py) that are killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from repository import ROOT, SUPPORT

from hpc_es.params.arena import Arena
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import replay, verify
from hpc_es.records import Result, Weights
from hpc_es.store import read
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal

NUM_UPDATES = 6
pytestmark = pytest.mark.slow

SCHEDULES = {
    "sync": ["staleness.mode=sync"],
    "natural": ["staleness.mode=natural", "staleness.max_lag=2"],
    "controlled": ["staleness.mode=controlled", "staleness.lag=1", "staleness.share=0.5"],
    "tail": ["staleness.mode=tail", "staleness.counts={0: 2, 1: 1, 2: 1}"],
}


def start(folder: Path, schedule: str) -> "subprocess.Popen[str]":
    model = write_lab_model(folder / "model", LAB_MODELS["lab-10k"])
    settings = [
        *("method=toy:Toy", "run.name=trained", f"run.num_updates={NUM_UPDATES}", f"run.dir={folder}"),
        *(f"model.path={model}", "es.population=4", "es.tasks_per_member=3", "eval.num_tasks=4", "launch.workers=2"),
        *("transport.heartbeat=0.5s", "transport.heartbeat_timeout=5s", "launch.max_restarts=20"),
        *SCHEDULES[schedule],
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{SUPPORT}",
        toy.SLOWLY: "0.3",
        toy.STARTED: str(folder / "started"),
    }
    command = [sys.executable, "-m", "hpc_es", "run", str(ROOT / "configs" / "lab" / "10k.yaml"), *settings]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **both)  # type: ignore[call-overload,no-any-return]


def processes(run: Path, role: str) -> list[int]:
    """Process ids of the run's heads, workers or trainers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in words and (role.encode() in words or f"hpc_es.{role}".encode() in words):
            found.append(int(path.parent.name))
    return found


def kill_at_random(process: "subprocess.Popen[str]", run: Path, roles: list[str], seed: int) -> int:
    """Kill one process after the other, at random moments; returns how many were killed."""
    chosen, killed = random.Random(seed), 0
    for role in roles:
        time.sleep(chosen.uniform(0.1, 0.5))
        find = trainers_at_work if role == "trainer" else processes
        while process.poll() is None and not (pids := find(run, role)):
            time.sleep(0.02)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen.choice(pids), signal.SIGKILL)
                killed += 1
    return killed


def trainers_at_work(run: Path, role: str) -> list[int]:
    """Trainers that have begun to change theta."""
    started = run.parent / "started"
    if not started.exists():
        return []
    alive = processes(run, role)
    return [pid for line in started.read_text().splitlines() if (pid := int(line.split()[1])) in alive]


def expected_theta(folder: Path, records: list[Any]) -> dict[int, int]:
    """Digests by version, from base model and journal alone, by the rule of the toy."""
    arena = Arena.from_pretrained(folder / "model")
    results: dict[Any, Result] = {r.result.eval_id: r.result for r in records if isinstance(r, journal.Reported)}
    digests = {}
    for record in records:
        if isinstance(record, journal.Closed):
            step = toy.nudge(results[eval_id].fitness for eval_id in record.evaluations)
            for name in arena.trained:
                values = arena.tensor(name)
                values += np.float32(step)
            digests[record.update] = arena.digest()
    return digests


@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kills_of_head_worker_and_trainer_lose_no_cohort_and_train_none_twice(tmp_path: Path, schedule: str) -> None:
    process, run = start(tmp_path, schedule), tmp_path / "trained"
    roles = ["trainer", "head", "worker", "trainer"]
    killed = kill_at_random(process, run, roles, seed=len(schedule))
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert killed == len(roles)
    records = list(read_journal(run))
    commits = [record.commit for record in records if isinstance(record, journal.Committed)]
    closed = [record for record in records if isinstance(record, journal.Closed)]
    assert [commit.version for commit in commits] == [each.update for each in closed] == list(range(1, NUM_UPDATES + 1))
    theta = expected_theta(tmp_path, records)
    assert [commit.body.digest for commit in commits if isinstance(commit.body, Weights)] == list(theta.values())
    started = [int(line.split()[0]) for line in (tmp_path / "started").read_text().splitlines()]
    assert len(started) > NUM_UPDATES, "a trainer was killed at work, and its cohort trained again"
    report = verify(run)
    assert report.problems == []
    assert replay(run).digest() == theta[NUM_UPDATES]
    tables = read(run)
    assert len(tables.contexts) == tables.evaluations.query("kind == 'propose' and status == 'accepted'").shape[0] > 0
    assert set(tables.evaluations["context"]) - {""} <= set(tables.contexts["context"])
    assert not list(RunPaths(run).root.glob("training/*.msgpack"))
