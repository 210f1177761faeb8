"""Journals of made-up runs in every mode of staleness: a few workers on a virtual clock, and nothing that thinks.

The fixed modes take their composition from the caller (update -> lag -> results), so that a test states what should
come out; `natural` commits whatever arrives. Long evaluations make more turns and tokens, as they do in truth.
"""

import heapq
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from builders import Counted, built_assignment, built_commit

from hpc_es.envs.base import TaskFacts
from hpc_es.envs.manifest import Manifest
from hpc_es.methods.es.shaping import coefficients, utilities
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Commit, Episode, EvalId, Member, Result
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter
from hpc_es.store.read import Run, read
from hpc_es.store.records import (
    SCHEMA_VERSION,
    AnyRecord,
    Committed,
    Digested,
    Discarded,
    Joined,
    Leased,
    Planned,
    Reported,
    Started,
    Stopped,
)

Composition = Callable[[int], Mapping[int, int]]
"""update -> {lag: results}."""

ALPHA, SIGMA = 5e-4, 1e-3


@dataclass
class Staged:
    """Description of a made-up run. `success` maps versions to solved held-out tasks of `num_tasks`."""

    staleness: dict[str, Any] = field(default_factory=lambda: {"mode": "sync"})
    composition: Composition | None = None
    """Fixed composition of the cohorts; None for natural staleness."""
    population: int = 4
    num_updates: int = 8
    workers: int = 2
    seed: int = 0
    success: Mapping[int, int] = field(default_factory=lambda: {0: 1, 4: 3, 8: 3})
    num_tasks: int = 8
    repeats: int = 1
    """Each solves one task more than the one before."""
    es: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    fitness: Callable[[int, float], float] = lambda version, noise: 0.1 * version + 0.05 * noise
    """Fitness of a member dispatched at `version`, from a standard normal number."""
    spread: float = 0.8
    """Standard deviation of the logarithm of an evaluation's seconds; median 1 s."""
    model: str = "models/none"
    device: str = "cpu"
    finish: Callable[[Commit], tuple[Commit, float]] = lambda commit: (commit, 0.01)
    """The commit as it is journalled, and the norm of its update."""

    def config(self) -> dict[str, Any]:
        return {
            "run": {"name": f"seed{self.seed}", "num_updates": self.num_updates, "seed": self.seed},
            "model": {"path": self.model},
            "task": {"env": "sudoku"},
            "es": {"population": self.population, "tasks_per_member": 2, "sigma": SIGMA, "alpha": ALPHA, **self.es},
            "staleness": self.staleness,
            "engine": self.engine,
        }


def stage(root: Path, staged: Staged) -> Run:
    """Write the run and read it back."""
    root.mkdir(parents=True, exist_ok=True)
    paths, config = RunPaths(root), json.dumps(staged.config())
    writer = JournalWriter.create(
        paths, lambda g, size: Started(1000.0, SCHEMA_VERSION, root.name, g, size, config, 7, {}, "node0")
    )
    for record in _Play(staged).records():
        writer.append(record)
    writer.close()
    return read(rebuild(root))


def write_facts(root: Path, facts: Sequence[TaskFacts]) -> None:
    """The manifest of its evaluation tasks."""
    RunPaths(root).tasks.write_bytes(msgspec.json.encode(Manifest("sudoku", {}, list(facts))))


class _Play:
    def __init__(self, staged: Staged) -> None:
        self.staged, self.rng, self.now = staged, random.Random(staged.seed), 1000.0
        self.version, self.slots, self.leases = 0, 0, 0
        self.queue: list[Assignment] = []
        self.reported: list[tuple[Assignment, Result]] = []

    def records(self) -> Iterator[AnyRecord]:
        for number in range(self.staged.workers):
            yield Joined(self.now, f"w{number}", f"seat{number}", "node", number, {"device": self.staged.device})
        yield from self.plan()
        yield from self.evaluate_centre()
        idle, flights = list(range(self.staged.workers)), list[tuple[float, int, int, float, Assignment]]()
        while self.version < self.staged.num_updates:
            while idle and (assignment := self.next_assignment()) is not None:
                worker, seconds = idle.pop(0), self.rng.lognormvariate(0, self.staged.spread)
                yield from self.planned_now(assignment)
                yield Leased(self.now, assignment.eval_id, f"w{worker}", 1)
                self.leases += 1
                heapq.heappush(flights, (self.now + seconds, self.leases, worker, seconds, assignment))
            self.now, _, worker, seconds, assignment = heapq.heappop(flights)
            idle.append(worker)
            yield from self.report(worker, seconds, assignment)
            yield from self.commit()
        yield Stopped(self.now, "all updates are done", finished=True)

    # --- planned evaluations ---

    def plan(self) -> Iterator[AnyRecord]:
        """The fixed modes plan at each version for all updates that will consume it."""
        if self.staged.composition is None:
            return
        updates = range(self.version + 1, self.staged.num_updates + 1)
        wanted = [u for u in updates for _ in range(self.staged.composition(u).get(u - 1 - self.version, 0))]
        made = tuple(self.assignment(slot, update) for slot, update in enumerate(wanted))
        self.queue += made
        yield Planned(self.now, self.version, made)

    def next_assignment(self) -> Assignment | None:
        if self.staged.composition is not None:
            return self.queue.pop(0) if self.queue else None
        self.slots += 1
        return self.assignment(self.slots - 1, self.version + 1)

    def planned_now(self, assignment: Assignment) -> Iterator[AnyRecord]:
        if self.staged.composition is None:
            yield Planned(self.now, self.version, (assignment,))

    def assignment(self, slot: int, update: int) -> Assignment:
        member = Member(self.rng.getrandbits(64), 1, SIGMA)
        return built_assignment(EvalId(self.version, slot), update, "train", member, (0, 1), self.rng.getrandbits(64))

    # --- results and commits ---

    def report(self, worker: int, seconds: float, assignment: Assignment) -> Iterator[AnyRecord]:
        fitness = self.staged.fitness(assignment.version, self.rng.gauss(0, 1))
        turns = 1 + round(4 * seconds)
        episodes = tuple(
            Episode(t, fitness, fitness > 0.5, turns, 0, 20 * turns, 5 * turns, seconds / 2, 0.1, "terminated")
            for t in assignment.tasks
        )
        result = Result(assignment.eval_id, fitness, episodes, 5, 0.05 * seconds, 0.05 * seconds, 0.8 * seconds)
        yield Reported(self.now + 0.01, f"w{worker}", result, self.now - 0.95 * seconds, self.now, 1)
        self.reported.append((assignment, result))

    def commit(self) -> Iterator[AnyRecord]:
        update, natural = self.version + 1, self.staged.composition is None
        max_lag = self.staged.staleness.get("max_lag", 0)
        stale = [a for a, _ in self.reported if natural and self.version - a.version > max_lag]
        for assignment in stale:
            yield Discarded(self.now + 0.02, assignment.eval_id, update)
        self.reported = [(a, r) for a, r in self.reported if a not in stale]
        ready = [(a, r) for a, r in self.reported if natural or a.update == update][: self.staged.population]
        if len(ready) < self.staged.population or update > self.staged.num_updates:
            return
        self.reported = [pair for pair in self.reported if pair not in ready]
        ready.sort(key=lambda pair: pair[1].eval_id)
        shaped = utilities("zscore", [result.fitness for _, result in ready])
        factors = coefficients(ALPHA, shaped, [1] * len(ready))
        members = tuple(
            Counted(a.eval_id, a.member.seed, 1, SIGMA, 0, r.fitness, u, c)
            for (a, r), u, c in zip(ready, shaped, factors, strict=True)
            if a.member is not None
        )
        self.now += 0.05
        commit, norm = self.staged.finish(built_commit(update, ALPHA, members))
        yield Committed(self.now, commit)
        yield Digested(self.now + 0.01, update, 100 + update, norm, 0.01)
        self.version, self.slots = update, 0
        if update < self.staged.num_updates:
            yield from self.plan()
        yield from self.evaluate_centre()
        yield from self.commit()  # the next cohort may be there already

    def evaluate_centre(self) -> Iterator[AnyRecord]:
        if self.version not in self.staged.success:
            return
        solved, tasks = self.staged.success[self.version], range(self.staged.num_tasks)
        slots = range(self.staged.repeats)
        plan = [built_assignment(EvalId(self.version, slot), 0, "eval", None, tuple(tasks), 3) for slot in slots]
        yield Planned(self.now, self.version, tuple(plan))
        for more, assignment in enumerate(plan):
            yield Leased(self.now, assignment.eval_id, "w0", 1)
            successes = [task < solved + more for task in tasks]
            episodes = tuple(
                Episode(task, float(won), won, 3, 0, 60, 15, 0.2, 0.1, "terminated")
                for task, won in zip(tasks, successes, strict=True)
            )
            result = Result(assignment.eval_id, sum(successes) / len(tasks), episodes, 5, 0.0, 0.0, 0.5)
            self.now += 0.5
            yield Reported(self.now, "w0", result, self.now - 0.5, self.now, 1)


def sync(population: int) -> Composition:
    return lambda update: {0: population}


def tail(counts: Mapping[int, int]) -> Composition:
    """Composition of a cohort. As long as no version is old enough for a lag, its results are fresh instead."""

    def composition(update: int) -> Mapping[int, int]:
        usable = {lag: count for lag, count in counts.items() if 0 < lag < update}
        return {**usable, 0: sum(counts.values()) - sum(usable.values())}

    return composition


def staircase(population: int, steps: tuple[tuple[int, int], ...]) -> Composition:
    return lambda update: {max(lag for begin, lag in steps if begin <= update): population}
