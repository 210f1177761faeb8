"""What a run dispatches and what an update is, as pure functions of its configuration and recorded results.

The core asks here while the run lives; `verify` asks again afterwards and must get the same answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from msgspec import structs

from hpc_es import seeds, staleness
from hpc_es.config import es as settings
from hpc_es.config.schema import Config
from hpc_es.errors import VerifyError
from hpc_es.methods.es import optimiser, population, remedies, schedules, shaping, subspaces
from hpc_es.records import CENTRE_SLOT, Assignment, Commit, EvalId, Member, OptimiserStep, Result, UpdateMember
from hpc_es.staleness import Schedule


@dataclass(frozen=True)
class Tasks:
    """How many tasks the environments have."""

    train: int
    eval: int


def schedule_of(config: Config) -> Schedule:
    """The schedule that a run's configuration asks for."""
    size, num_updates = config.es.population, config.run.num_updates
    match config.staleness:
        case settings.Natural(max_lag=max_lag, overdue=overdue):
            return staleness.Natural(size, num_updates, max_lag, hold=overdue == "hold")
        case settings.Controlled(lag=lag, share=share):
            return staleness.Controlled(size, num_updates, lag, share)
        case settings.Tail(counts=counts):
            return staleness.Tail(size, num_updates, counts)
        case settings.Staircase(steps=steps, isolated=isolated):
            return staleness.Staircase(size, num_updates, steps, isolated)
        case settings.Sync():
            return staleness.Sync(size, num_updates)


def plan(config: Config, schedule: Schedule, tasks: Tasks, version: int) -> tuple[Assignment, ...]:
    """What to dispatch at `version`, whoever is free: members in slot order, the centre on their batch, evaluations."""
    assignments = [
        assign_member(config, tasks, version, dispatch.slot, dispatch.update) for dispatch in schedule.plan(version)
    ]
    if config.es.baseline == "centre" and (assignments or (schedule.on_demand and version < schedule.num_updates)):
        batch = _batch(config, tasks, version)
        assignments.append(assign(config, EvalId(version, CENTRE_SLOT), 0, "centre", batch))
    if eval_is_due(config, version):
        assignments.extend(plan_evaluation(config, tasks.eval, version))
    return tuple(assignments)


def plan_evaluation(config: Config, num_tasks: int, version: int) -> Iterator[Assignment]:
    """The unperturbed policy on evaluation tasks 0..num_tasks-1, eval.repeats times, in batches: slots -1, -2, ..."""
    size = config.eval.batch or config.es.tasks_per_member
    slot = 0
    for repeat in range(config.eval.repeats):
        for first in range(0, num_tasks, size):
            slot -= 1
            sampling_seed = seeds.eval_sampling_seed(config.run.seed, repeat, first)
            batch = tuple(range(first, min(first + size, num_tasks)))
            yield Assignment(EvalId(version, slot), 0, "eval", None, batch, sampling_seed)


def assign_member(config: Config, tasks: Tasks, version: int, slot: int, update: int) -> Assignment:
    """A member that is dispatched at `version` for an update, on that version's batch."""
    return assign(config, EvalId(version, slot), update, "train", _batch(config, tasks, version))


def assign(
    config: Config, eval_id: EvalId, update: int, kind: Literal["train", "centre"], tasks: tuple[int, ...]
) -> Assignment:
    """A member, or the centre on its version's batch."""
    member = member_of(config, eval_id, update) if kind == "train" else None
    return Assignment(eval_id, update, kind, member, tasks, _sampling_seed(config.run.seed, eval_id.version))


def replacement(config: Config, void: Assignment) -> Assignment:
    """The evaluation that takes the place of a void one: a new seed for a member, the same tasks."""
    old = void.eval_id
    eval_id = EvalId(old.version, old.slot, old.replacement + 1)
    if void.kind == "eval":
        return structs.replace(void, eval_id=eval_id)
    return assign(config, eval_id, void.update, void.kind, void.tasks)


def _batch(config: Config, tasks: Tasks, version: int) -> tuple[int, ...]:
    return _drawn(config.run.seed, version, config.es.tasks_per_member, tasks.train)


_drawn = lru_cache(maxsize=64)(seeds.task_batch)
"""All members of a version play one batch."""
_sampling_seed = lru_cache(maxsize=64)(seeds.sampling_seed)


def eval_is_due(config: Config, version: int) -> bool:
    """theta_0, the final theta, and every so many versions between."""
    every = config.eval.every
    return version in (0, config.run.num_updates) or (every > 0 and version % every == 0)


def member_of(config: Config, eval_id: EvalId, update: int) -> Member:
    """The member that the run's configuration puts into this slot, planned for `update`."""
    es, run_seed, num_subspaces = config.es, config.run.seed, config.es.subspaces
    sigma = subspaces.scaled(scheduled(es.sigma, update, config.run.num_updates), num_subspaces)
    return structs.replace(
        population.member(run_seed, eval_id, sigma=sigma, mirrored=es.mirrored),
        subspace=subspaces.subspace(eval_id.slot, num_subspaces, mirrored=es.mirrored),
        num_subspaces=num_subspaces,
        partition_seed=subspaces.partition_seed(run_seed, update, num_subspaces),
    )


def make_commit(
    config: Config, update: int, cohort: Sequence[tuple[Member, Result]], centres: Mapping[int, float] | None = None
) -> Commit:
    """The update that a full cohort makes. `cohort` is sorted by (dispatch version, slot).

    c_i = fp32(alpha * u_i * w_i * sign_i / 4096), u_i the shaped score and w_i = 1/N_k times the weight of its lag;
    with an optimiser alpha is in `step` instead. `centres`: version -> fitness of the unperturbed centre on its batch,
    for es.baseline=centre. A member planned with sigma 0 says nothing about its noise and weighs 0. An update whose
    coefficients are all zero, or whose alpha is, is null.
    Errors: VerifyError when a centre is missing.
    """
    es, members = config.es, [member for member, _ in cohort]
    alpha = scheduled(es.alpha, update, config.run.num_updates)
    step = _step(config, alpha, update)
    utilities = shaping.utilities(es.shaping, _scores(config, update, cohort, centres or {}))
    coefficients = shaping.coefficients(
        1.0 if step else alpha, utilities, [member.sign for member in members], _weights(config, update, cohort)
    )
    return Commit(
        version=update,
        alpha=alpha,
        members=tuple(
            UpdateMember(r.eval_id, m.seed, m.sign, m.sigma, m.subspace, r.fitness, utility, c, m.partition_seed)
            for (m, r), utility, c in zip(cohort, utilities, coefficients, strict=True)
        ),
        null=alpha == 0 or not any(coefficients),
        num_subspaces=es.subspaces,
        partition_seed=subspaces.partition_seed(config.run.seed, update, es.subspaces),
        step=step,
    )


def _weights(config: Config, update: int, cohort: Sequence[tuple[Member, Result]]) -> list[float]:
    """w_i: the member's share of its subspace, times the weight of its lag."""
    by_lag = config.es.lag_weight
    shares = subspaces.weights([member.subspace for member, _ in cohort])
    lags = [staleness.lag(result.eval_id.version, update) for _, result in cohort]
    return [
        share * remedies.lag_weight(by_lag.kind, lag, by_lag.rate) if member.sigma else 0.0
        for share, lag, (member, _) in zip(shares, lags, cohort, strict=True)
    ]


def _scores(
    config: Config, update: int, cohort: Sequence[tuple[Member, Result]], centres: Mapping[int, float]
) -> list[float]:
    """What is shaped: fitness less its baseline; random numbers in a run that walks at random."""
    fitness = [result.fitness for _, result in cohort]
    versions = [result.eval_id.version for _, result in cohort]
    if config.es.control == "random-walk":
        return [remedies.meaningless(config.run.seed, result.eval_id) for _, result in cohort]
    if config.es.baseline == "batch":
        return remedies.without_batch_means(fitness, versions)
    if config.es.baseline == "centre":
        if missing := sorted(set(versions) - centres.keys()):
            raise VerifyError(
                f"update {update} needs the fitness of the centre at versions {missing}: none is recorded"
            )
        return remedies.without_centres(fitness, versions, centres)
    return fitness


def _step(config: Config, alpha: float, update: int) -> OptimiserStep | None:
    chosen = config.es.optimiser
    scalars = {"beta1": chosen.beta1, "beta2": chosen.beta2, "epsilon": chosen.epsilon}
    return optimiser.step(chosen.kind, alpha=alpha, update=update, **scalars)


def scheduled(schedule: settings.Schedule, update: int, num_updates: int) -> float:
    """A schedule's value for an update of a run."""
    return schedules.value(schedule.kind, schedule.start, schedule.end, update=update, num_updates=num_updates)
