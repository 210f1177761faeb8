"""The contract of a method: what a run dispatches, and what a full cohort becomes.

Invariant: a method is pure. What it answers follows from the configuration and from what it is given, so a head that
restarts decides alike, and `verify` asks again afterwards and must get the same answers. Methods know the schedules of
staleness, which know nothing of methods; head, verify, counterfactual, simulator and planner ask the method and never
look inside it (design, section 13).
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
    """Whether a trainer digests a closed cohort (two-phase commit); its commits have weights as their body."""
    needs_traces = False
    """Whether the trainer needs the sampled tokens of every candidate (see hpc_es/traces.py)."""
    needs_centre = False
    """Whether updates need the fitness of the unperturbed policy on the batch of every version that they consume."""
    answerable: tuple[str, ...] = ()
    """Configuration keys whose change `counterfactual` can answer from the log, without new rollouts."""

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
        """The configuration key that sets `cohort_size`, for messages."""
        return "es.population"

    @abstractmethod
    def assign(self, version: int, slot: int, update: int, pool: Mapping[str, Context] = NO_CONTEXTS) -> Assignment:
        """The evaluation in one slot at a version, meant for one update; `pool`: the contexts in use, by id."""

    def proposals(self, version: int, pool: Mapping[str, Context]) -> Sequence[Assignment]:
        """Evaluations with purpose "propose" to dispatch at a version; `pool`: the contexts in use, by id."""
        return ()

    def replacement(self, void: Assignment) -> Assignment:
        """The evaluation that takes the place of a void one: the same tasks, but what is random is drawn again."""
        return _renamed(void, void.eval_id.next_replacement)

    def plan(self, schedule: Schedule, version: int, pool: Mapping[str, Context]) -> tuple[Assignment, ...]:
        """Everything to dispatch at a version, whoever is free: candidates in slot order, the centre, evaluations."""
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
        """The unperturbed policy on the batch that the candidates of its version play."""
        eval_id = EvalId(version, 0, 0, "centre")
        return Assignment(eval_id, 0, Candidate(version), self.batch(version), self.sampling_seed(version))

    # --- what a cohort becomes -----------------------------------------------------------------------------------

    @abstractmethod
    def commit(self, update: int, cohort: Cohort, centres: Mapping[int, float] | None = None) -> Commit:
        """The update that a full cohort makes; for a method that trains, all but the body (see `Closed`).

        `centres`: version -> fitness of the unperturbed policy on its batch. Errors: VerifyError.
        """

    def train(self, theta: Mapping[str, "Array"], update: int, cohort: Cohort) -> dict[str, float]:
        """Turn theta_{update-1} into theta_update, in place; returns metrics. For a method that trains.

        `theta`: float32 arrays by canonical name. Called in the trainer's process, and again for the same cohort if
        that process or the head ended before the update was committed.
        """
        raise NotImplementedError(f"method={self.config.method} has trains=True, but no train()")

    def pool_change(self, pool: Mapping[str, Context], proposed: Sequence[Context]) -> PoolChange | None:
        """How the next commit changes the pool, given the contexts proposed since the last one; None: not at all."""
        return None

    def why_null(self, commit: Commit) -> str:
        """What made an update leave theta alone, and what would help."""
        return "the cohort taught nothing"

    def remark(self, commit: Commit) -> tuple[str, str] | None:
        """An event worth recording about a commit: (what, detail)."""
        return None

    def advice(self) -> str | None:
        """A warning about the configuration, for the first start of a run."""
        return None

    # --- what verify asks ------------------------------------------------------------------------------------------

    @abstractmethod
    def faults_in_assignment(self, assignment: Assignment) -> list[str]:
        """Why a planned candidate does not follow from run seed and configuration."""

    @abstractmethod
    def faults_in_commit(self, commit: Commit, cohort: Cohort, centres: Mapping[int, float]) -> list[str]:
        """Why the body of a recorded commit does not follow from the recorded results."""

    # --- what every method shares ------------------------------------------------------------------------------------

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
        """Training tasks that the candidates of a version play."""
        return _drawn(self.config.run.seed, version, self.batch_size, self.tasks.train)

    def sampling_seed(self, version: int) -> int:
        """Sampling seed that the evaluations of a version share."""
        return _sampling_seed(self.config.run.seed, version)


def consumed(cohort: Cohort) -> tuple[Consumed, ...]:
    """The header of the commit that consumes a cohort."""
    return tuple([Consumed(result.eval_id, result.fitness) for _, result in cohort])


def _renamed(void: Assignment, eval_id: EvalId) -> Assignment:
    return Assignment(eval_id, void.update, void.candidate, void.tasks, void.sampling_seed)


_drawn = lru_cache(maxsize=64)(seeds.task_batch)
"""All candidates of a version play one batch, which is drawn once."""
_sampling_seed = lru_cache(maxsize=64)(seeds.sampling_seed)
