"""A method that trains: its trainer nudges theta by a known rule. It has contexts and proposals, too.

Every update adds STEP * sum_k (k + 1) * fitness_k to all elements of theta, over the closed cohort in its order, so the
result shows which cohort was trained, in which order, and how often.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_es.methods.base import NO_CONTEXTS, Cohort, Method, consumed
from hpc_es.records import Assignment, Candidate, Commit, Context, EvalId, PoolChange, Weights
from hpc_es.seeds import derive

STEP = 1e-3
MAX_POOL = 2
SLOWLY = "TOY_SECONDS"
"""Environment variable: seconds that the trainer takes, so that tests can kill it meanwhile."""
STARTED = "TOY_STARTED"
"""Environment variable: a file to which every trainer appends a line when it starts."""


class Toy(Method):
    trains = True

    @property
    def cohort_size(self) -> int:
        return self.config.es.population

    def assign(self, version: int, slot: int, update: int, pool: Mapping[str, Context] = NO_CONTEXTS) -> Assignment:
        eval_id = EvalId(version, slot)
        context = list(pool)[slot % len(pool)] if pool else ""
        return Assignment(eval_id, update, Candidate(version, None, context), self.batch(version), self._seed(eval_id))

    def replacement(self, void: Assignment) -> Assignment:
        eval_id = void.eval_id.next_replacement
        return Assignment(eval_id, void.update, void.candidate, void.tasks, self._seed(eval_id))

    def proposals(self, version: int, pool: Mapping[str, Context]) -> Sequence[Assignment]:
        eval_id, parent = EvalId(version, 0, 0, "propose"), next(iter(pool), "")
        return [Assignment(eval_id, 0, Candidate(version, None, parent), self.batch(version)[:1], self._seed(eval_id))]

    def commit(self, update: int, cohort: Cohort, centres: Mapping[int, float] | None = None) -> Commit:
        return Commit(update, consumed(cohort), Weights(0, 0.0))

    def pool_change(self, pool: Mapping[str, Context], proposed: Sequence[Context]) -> PoolChange | None:
        added = [context.id for context in proposed if context.id not in pool]
        removed = [*pool, *added][: max(len(pool) + len(added) - MAX_POOL, 0)]
        return PoolChange(tuple(added), tuple(removed)) if added else None

    def train(self, theta: Mapping[str, "np.ndarray[Any, Any]"], update: int, cohort: Cohort) -> dict[str, float]:
        if STARTED in os.environ:
            with Path(os.environ[STARTED]).open("a") as file:
                file.write(f"{update} {os.getpid()}\n")
        time.sleep(float(os.environ.get(SLOWLY, "0")))
        step = nudge(result.fitness for _, result in cohort)
        for values in theta.values():
            values += np.float32(step)
        return {"step": step}

    def faults_in_assignment(self, assignment: Assignment) -> list[str]:
        right = assignment.sampling_seed == self._seed(assignment.eval_id)
        return [] if right else ["its sampling seed does not follow from the run seed"]

    def faults_in_commit(self, commit: Commit, cohort: Cohort, centres: Mapping[int, float]) -> list[str]:
        assert isinstance(commit.body, Weights)
        step = nudge(result.fitness for _, result in cohort)
        return [] if commit.body.metrics == {"step": step} else [f"step is {commit.body.metrics}, computed {step}"]

    def _seed(self, eval_id: EvalId) -> int:
        return derive(self.config.run.seed, "toy", eval_id.version, eval_id.slot, eval_id.replacement)


class Traced(Toy):
    """Needs the sampled tokens; notes how many of each evaluation there are."""

    needs_traces = True


class Lazy(Method):
    """Says that it trains, but has no train()."""

    trains = True


def nudge(fitness: Any) -> float:
    return STEP * sum((place + 1) * value for place, value in enumerate(fitness))
