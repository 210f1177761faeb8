"""The contract of a method: which evaluations a run dispatches, and which update a full cohort makes.

Invariant: a method is pure. Its results depend on the configuration and its arguments only, so a head that restarts
makes the same decisions, and `verify` can compute them again. Methods use the staleness schedules, which do not depend
on methods. Head, verify, counterfactual, simulator and planner use this contract only (design, section 13).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpc_es import seeds
from hpc_es.config.schema import Config
from hpc_es.methods.evaluation import eval_is_due, plan_evaluation
from hpc_es.records import Assignment, Candidate, Commit, Consumed, Context, EvalId, PoolChange, Result
from hpc_es.staleness import Schedule, schedule_of

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Cohort = Sequence[tuple[Assignment, Result]]
"""The evaluations that an update consumes, sorted by (dispatch version, slot)."""


NO_CONTEXTS: Mapping[str, Context] = MappingProxyType({})


@dataclass(frozen=True)
class Tasks:
    """Number of tasks of the training environment, and of the evaluation tasks."""

    train: int
    eval: int


class Method(ABC):
    """One way to post-train: subclass it, and name it in methods/__init__.py or as package.module:Class."""

    trains = False
    """Whether a trainer makes theta from a closed cohort (two-phase commit); the commits then contain Weights."""
    needs_traces = False
    """Whether the trainer needs the sampled tokens of every candidate (see hpc_es/traces.py)."""
    needs_centre = False
    """Whether updates need the centre's fitness: that of the unperturbed policy on the batch of a version."""
    answerable: tuple[str, ...] = ()
    """Configuration keys that `counterfactual` can change, because their effect follows from recorded results."""

    def __init__(self, config: Config, tasks: Tasks) -> None:
        self.config = config
        self.tasks = tasks

    # --- what is dispatched ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def cohort_size(self) -> int:
        """Number of evaluations that one update consumes."""

    @property
    def cohort_key(self) -> str:
        """Name of the configuration key that sets `cohort_size`, for messages."""
        return "es.population"

    @abstractmethod
    def assign(self, version: int, slot: int, update: int, pool: Mapping[str, Context] = NO_CONTEXTS) -> Assignment:
        """The evaluation in a slot of a version, planned for one update; `pool`: the contexts in use, by id."""

    def proposals(self, version: int, pool: Mapping[str, Context]) -> Sequence[Assignment]:
        """Evaluations with purpose "propose" to dispatch at a version; `pool`: the contexts in use, by id."""
        return ()

    def replacement(self, void: Assignment) -> Assignment:
        """The evaluation that replaces a void one: it has the same tasks, but its random numbers are drawn again."""
        return _renamed(void, void.eval_id.next_replacement)

    def plan(self, schedule: Schedule, version: int, pool: Mapping[str, Context]) -> tuple[Assignment, ...]:
        """All evaluations to plan at a version, in order: candidates by slot, centre, proposals, evaluation tasks."""
        planned = [self.assign(version, dispatch.slot, dispatch.update, pool) for dispatch in schedule.plan(version)]
        has_candidates = bool(planned) or (schedule.on_demand and version < schedule.num_updates)
        if self.needs_centre and has_candidates:
            planned.append(self.centre(version))
        if has_candidates:
            planned.extend(self.proposals(version, pool))
        if eval_is_due(self.config, version):
            planned.extend(plan_evaluation(self.config, self.eval_batch, self.tasks.eval, version))
        return tuple(planned)

    def centre(self, version: int) -> Assignment:
        """The evaluation of the unperturbed policy on the batch of a version's candidates."""
        eval_id = EvalId(version, 0, 0, "centre")
        return Assignment(eval_id, 0, Candidate(version), self.batch(version), self.sampling_seed(version))

    # --- the update from a cohort --------------------------------------------------------------------------------

    @abstractmethod
    def commit(self, update: int, cohort: Cohort, centres: Mapping[int, float] | None = None) -> Commit:
        """The update from a full cohort. If the method trains, the head replaces the body (see `Closed`).

        `centres`: version -> fitness of the unperturbed policy on its batch. Errors: VerifyError.
        """

    def train(self, theta: Mapping[str, "Array"], update: int, cohort: Cohort) -> dict[str, float]:
        """Change theta_{update-1} to theta_update, in place; returns metrics. Only for methods that train.

        `theta`: float32 arrays by canonical name. Called in the trainer's process, and again for the same cohort if
        that process or the head ended before the update was committed.
        """
        raise NotImplementedError(f"method={self.config.method} has trains=True, but does not define train()")

    def pool_change(self, pool: Mapping[str, Context], proposed: Sequence[Context]) -> PoolChange | None:
        """Changes of the pool in the next commit, given the contexts proposed since the last one; None: no change."""
        return None

    def why_null(self, commit: Commit) -> str:
        """Why an update did not change theta, and what the user can do about it."""
        return "the method found nothing to learn from this cohort"

    def remark(self, commit: Commit) -> tuple[str, str] | None:
        """An event to record with a commit, as (what, detail); None if there is none."""
        return None

    def advice(self) -> str | None:
        """A warning about the configuration, shown when a run first starts; None if there is none."""
        return None

    # --- for verify ------------------------------------------------------------------------------------------------

    @abstractmethod
    def faults_in_assignment(self, assignment: Assignment) -> list[str]:
        """Differences between a planned candidate and what run seed and configuration give; empty if there are none."""

    @abstractmethod
    def faults_in_commit(self, commit: Commit, cohort: Cohort, centres: Mapping[int, float]) -> list[str]:
        """Differences between a recorded commit and what the recorded results give; empty if there are none."""

    # --- common to all methods ---------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of tasks that one candidate plays."""
        return self.config.es.tasks_per_member

    @property
    def eval_batch(self) -> int:
        """Number of evaluation tasks in one evaluation."""
        return self.config.eval.batch or self.batch_size

    def schedule(self) -> Schedule:
        """The schedule of staleness that the configuration asks for."""
        return schedule_of(self.config, self.cohort_size)

    def batch(self, version: int) -> tuple[int, ...]:
        """Training tasks of the candidates of a version."""
        return _drawn(self.config.run.seed, version, self.batch_size, self.tasks.train)

    def sampling_seed(self, version: int) -> int:
        """Sampling seed of all evaluations of a version on training tasks."""
        return _sampling_seed(self.config.run.seed, version)


def consumed(cohort: Cohort) -> tuple[Consumed, ...]:
    """The header of the commit that consumes a cohort."""
    return tuple([Consumed(result.eval_id, result.fitness) for _, result in cohort])


def _renamed(void: Assignment, eval_id: EvalId) -> Assignment:
    return Assignment(eval_id, void.update, void.candidate, void.tasks, void.sampling_seed)


_drawn = lru_cache(maxsize=64)(seeds.task_batch)
"""All candidates of a version play the same batch, so it is drawn once."""
_sampling_seed = lru_cache(maxsize=64)(seeds.sampling_seed)
