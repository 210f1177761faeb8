"""Records of evaluations and commits in one line, for tests that write many of them."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import structs

from hpc_es.config.schema import Config
from hpc_es.methods.base import Tasks
from hpc_es.methods.es.method import EvolutionStrategies
from hpc_es.records import Assignment, Candidate, Commit, Consumed, EvalId, Member, OptimiserStep, Purpose, Seeds, Term


class Counted(NamedTuple):
    """One consumed evaluation with its term of an update by seeds."""

    eval_id: EvalId
    seed: int
    sign: int
    sigma: float
    subspace: int
    fitness: float
    utility: float
    coefficient: float
    partition_seed: int = 0


def counted(commit: Commit) -> tuple[Counted, ...]:
    """The evaluations that a commit by seeds consumed."""
    return tuple(
        Counted(c.eval_id, t.seed, t.sign, t.sigma, t.subspace, c.fitness, t.utility, t.coefficient, t.partition_seed)
        for c, t in zip(commit.consumed, commit.seeds.terms, strict=True)
    )


def built_commit(
    version: int,
    alpha: float,
    members: Iterable[Counted],
    null: bool = False,
    num_subspaces: int = 1,
    partition_seed: int = 0,
    step: OptimiserStep | None = None,
) -> Commit:
    """A commit by seeds."""
    members = list(members)
    terms = [Term(m.seed, m.sign, m.sigma, m.subspace, m.utility, m.coefficient, m.partition_seed) for m in members]
    header = tuple(Consumed(member.eval_id, member.fitness) for member in members)
    return Commit(version, header, Seeds(alpha, tuple(terms), num_subspaces, partition_seed, step), null)


def with_step(commit: Commit, step: OptimiserStep) -> Commit:
    """The same commit with a step of an optimiser."""
    return structs.replace(commit, body=structs.replace(commit.seeds, step=step))


def built_assignment(
    eval_id: EvalId, update: int, purpose: Purpose, member: Member | None, tasks: tuple[int, ...], sampling_seed: int
) -> Assignment:
    named = EvalId(eval_id.version, eval_id.slot, eval_id.replacement, purpose)
    return Assignment(named, update, Candidate(eval_id.version, member), tasks, sampling_seed)


def es(config: Config, num_tasks: int = 10_000) -> EvolutionStrategies:
    """The method of a configuration, over more training tasks than any test needs."""
    return EvolutionStrategies(config, Tasks(num_tasks, config.eval.num_tasks))
