"""Records of a small made-up run, as a head would journal them: two workers, stale results, voids, evaluations."""

import random
from collections.abc import Iterator
from pathlib import Path

from builders import Counted, built_assignment, built_commit

from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Episode, EvalId, Member, Purpose, Result
from hpc_es.store.journal import JournalWriter
from hpc_es.store.later import EvalJournal
from hpc_es.store.records import (
    SCHEMA_VERSION,
    AnyRecord,
    Committed,
    Digested,
    Joined,
    Leased,
    Left,
    Noted,
    Planned,
    Reported,
    Started,
    Stopped,
    Unleased,
    Voided,
)

BASE_DIGEST = 2**64 - 3
CONFIG = '{"run":{"name":"fake","num_updates":4}}'
NUM_EVAL_TASKS = 12
POPULATION = 4


def started(generation: int, predecessor_bytes: int) -> Started:
    return Started(
        1000.0 + generation, SCHEMA_VERSION, "fake", generation, predecessor_bytes, CONFIG, BASE_DIGEST, {"x": "1"}, "h"
    )


def fake_records(num_updates: int = 4, *, seed: int = 0, lag: int = 1) -> Iterator[AnyRecord]:
    """Everything after Started. Half of each cohort (from update lag+1 on) has the given lag."""
    rng, clock = random.Random(seed), _Clock()
    for number in (0, 1):
        facts = {"slurm_job": "77", "array_task": str(number)}
        yield Joined(clock(), f"w{number}", f"seat{number}", "node", 10 + number, facts)
    waiting: dict[int, list[Result]] = {}
    yield from _evaluate_centre(rng, clock, 0)
    for version in range(num_updates):
        num_stale = POPULATION // 2 if version >= lag else 0
        update_of = [version + 1 + lag] * (POPULATION // 2) + [version + 1] * (POPULATION - num_stale)
        assignments = tuple(
            _assignment(rng, version, slot, "train", update)
            for slot, update in enumerate(update_of)
            if update <= num_updates
        )
        yield Planned(clock(), version, assignments)
        for assignment in assignments:
            records = list(_evaluate(rng, clock, assignment))
            yield from records
            report = records[-1]
            assert isinstance(report, Reported)
            waiting.setdefault(assignment.update, []).append(report.result)
        if version == 1:
            yield from _void_one(rng, clock, version)
        yield from _commit(clock, version + 1, waiting.pop(version + 1))
    yield from _evaluate_centre(rng, clock, num_updates)
    yield Left(clock(), "w0", "walltime")
    yield Stopped(clock(), "done", True)


def write_run(root: Path, num_updates: int = 4, **options: int) -> list[AnyRecord]:
    """Write a run folder with one segment; returns all its records."""
    root.mkdir(parents=True, exist_ok=True)
    writer = JournalWriter.create(RunPaths(root), started)
    records = list(fake_records(num_updates, **options))
    for number, record in enumerate(records):
        writer.append(record)
        if number % 7 == 0:
            writer.sync()
    writer.close()
    return [started(1, 0), *records]


def later_eval(version: int, reward: float) -> list[AnyRecord]:
    """Records of an evaluation of the centre made after the run."""
    rng, clock = random.Random(reward), _Clock()
    assignment = _assignment(rng, version, -1, "eval", 0)
    result = Result(assignment.eval_id, reward, (_episode(rng, 0, reward),), 5, 0.0, 0.0, 1.0)
    return [started(1, 0), Planned(clock(), version, (assignment,)), Reported(clock(), "local", result, 1.0, 2.0, 1)]


def write_later(root: Path, name: str, records: list[AnyRecord]) -> Path:
    """Records of a later evaluation as RUN/evals/NAME.hpcj."""
    assert isinstance(records[0], Started)
    later = EvalJournal.open(RunPaths(root), name, records[0])
    later.append(*records[1:])
    later.close()
    return later.path


class _Clock:
    def __init__(self) -> None:
        self.now = 2000.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def _assignment(rng: random.Random, version: int, slot: int, kind: Purpose, update: int) -> Assignment:
    member = Member(rng.getrandbits(64), 1, 1e-3) if kind == "train" else None
    tasks = tuple(range(4)) if kind == "train" else tuple(range(6 * slot, 6 * slot + 6))
    return built_assignment(EvalId(version, slot), update, kind, member, tasks, rng.getrandbits(64))


def _evaluate(rng: random.Random, clock: _Clock, assignment: Assignment) -> Iterator[AnyRecord]:
    worker = f"w{rng.randrange(2)}"
    if rng.random() < 0.2:
        yield Leased(clock(), assignment.eval_id, worker, 1)
        yield Unleased(clock(), assignment.eval_id, worker, "lost")
        worker = f"w{rng.randrange(2)}"
    yield Leased(clock(), assignment.eval_id, worker, 2)
    episodes = tuple(_episode(rng, task, rng.random()) for task in assignment.tasks)
    fitness = sum(episode.reward for episode in episodes) / len(episodes)
    result = Result(assignment.eval_id, fitness, episodes, 5, 0.01, 0.02, 0.1)
    yield Reported(clock(), worker, result, clock.now - 0.2, clock.now - 0.05, 2)


def _episode(rng: random.Random, task: int, reward: float) -> Episode:
    return Episode(task, reward, reward > 0.5, rng.randint(1, 5), 0, 30, 7, 0.05, 0.01, "terminated")


def _evaluate_centre(rng: random.Random, clock: _Clock, version: int) -> Iterator[AnyRecord]:
    batches = tuple(_assignment(rng, version, slot, "eval", 0) for slot in (0, 1))
    yield Planned(clock(), version, batches)
    for batch in batches:
        yield from _evaluate(rng, clock, batch)


def _void_one(rng: random.Random, clock: _Clock, version: int) -> Iterator[AnyRecord]:
    assignment = _assignment(rng, version, 99, "train", version + 1)
    yield Planned(clock(), version, (assignment,))
    failed = Result(assignment.eval_id, float("nan"), (), 5, 0.01, 0.02, 0.1, error="engine fault")
    yield Reported(clock(), "w0", failed, clock.now - 0.2, clock.now - 0.1, 1)
    yield Voided(clock(), assignment.eval_id, "engine fault")
    yield Noted(clock(), "warning", "evaluation is void", "engine fault")


def _commit(clock: _Clock, version: int, cohort: list[Result]) -> Iterator[AnyRecord]:
    results = sorted(cohort, key=lambda result: result.eval_id)
    members = tuple(
        Counted(result.eval_id, 7, 1, 1e-3, 0, result.fitness, result.fitness - 0.5, 2.0**-20) for result in results
    )
    yield Committed(clock(), built_commit(version, 5e-4, members))
    yield Digested(clock(), version, 2**63 + version, 0.5, 0.01)
