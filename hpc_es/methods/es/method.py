"""Evolution strategies on the weights: the members of a cohort, and the update from their fitness.

theta += sum_i c_i * T(seed_i) with c_i = fp32(alpha * u_i * w_i * sign_i / 4096), where u_i is the shaped score and
w_i is 1/N_k times the weight of its lag (design, section 4; Qiu et al., 2025). With an optimiser, alpha is not in the
coefficients but in the optimiser's step. With es.rank, low-rank noise takes the place of T (low_rank.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from hpc_es.config import es as settings
from hpc_es.errors import VerifyError
from hpc_es.methods.base import NO_CONTEXTS, Cohort, Method, consumed
from hpc_es.methods.es import optimiser, population, remedies, schedules, shaping, subspaces
from hpc_es.records import Assignment, Candidate, Commit, Context, EvalId, Member, OptimiserStep, Result, Seeds, Term
from hpc_es.staleness import lag


class EvolutionStrategies(Method):
    """ES at Scale, with mirrored pairs, subspaces (CoPES), corrections for staleness, momentum and Adam."""

    answerable = ("es.shaping", "es.lag_weight", "es.baseline", "es.alpha", "es.control")

    @property
    def cohort_size(self) -> int:
        return self.config.es.population

    @property
    def needs_centre(self) -> bool:  # type: ignore[override]
        return self.config.es.baseline == "centre"

    def assign(self, version: int, slot: int, update: int, pool: Mapping[str, Context] = NO_CONTEXTS) -> Assignment:
        """The member in a slot of `version`, planned for `update`, on that version's batch."""
        return self._assign(EvalId(version, slot), update, self.batch(version))

    def replacement(self, void: Assignment) -> Assignment:
        """A new seed for a member, on the same tasks."""
        if void.purpose == "train":
            return self._assign(void.eval_id.next_replacement, void.update, void.tasks)
        return super().replacement(void)

    def member_of(self, eval_id: EvalId, update: int) -> Member:
        """The noise of the member in this slot, planned for `update`."""
        es, run_seed, num_subspaces = self.config.es, self.config.run.seed, self.config.es.subspaces
        sigma = subspaces.scaled(self._scheduled(es.sigma, update), num_subspaces)
        return structs.replace(
            population.member(run_seed, eval_id, sigma=sigma, mirrored=es.mirrored),
            subspace=subspaces.subspace(eval_id.slot, num_subspaces, mirrored=es.mirrored),
            num_subspaces=num_subspaces,
            partition_seed=subspaces.partition_seed(run_seed, update, num_subspaces),
            rank=es.rank,
        )

    def commit(self, update: int, cohort: Cohort, centres: Mapping[int, float] | None = None) -> Commit:
        """The update from a full cohort. `centres`: for es.baseline=centre.

        A member with sigma 0 was not perturbed, so its weight is 0. An update is null if alpha or all coefficients are
        zero. Errors: VerifyError if a centre is missing.
        """
        es, members = self.config.es, [_member(assignment) for assignment, _ in cohort]
        alpha = self._scheduled(es.alpha, update)
        step = self._step(alpha, update)
        utilities = shaping.utilities(es.shaping, self._scores(update, cohort, centres or {}))
        weights = self._weights(update, members, [result for _, result in cohort])
        coefficients = shaping.coefficients(
            1.0 if step else alpha, utilities, [member.sign for member in members], weights, es.rank
        )
        terms = [
            Term(m.seed, m.sign, m.sigma, m.subspace, utility, c, m.partition_seed)
            for m, utility, c in zip(members, utilities, coefficients, strict=True)
        ]
        partition_seed = subspaces.partition_seed(self.config.run.seed, update, es.subspaces)
        return Commit(
            version=update,
            consumed=consumed(cohort),
            body=Seeds(alpha, tuple(terms), es.subspaces, partition_seed, step, es.rank),
            null=alpha == 0 or not any(coefficients),
        )

    def why_null(self, commit: Commit) -> str:
        if commit.seeds.alpha == 0:
            return "es.alpha is 0 at this update"
        if not any(term.sigma for term in commit.seeds.terms):
            return "es.sigma is 0 at this update, so all members are the same"
        return "all members of the cohort have the same fitness: raise es.sigma or es.tasks_per_member"

    def remark(self, commit: Commit) -> tuple[str, str] | None:
        """An event about members of mirrored pairs whose other half is not in the same update."""
        if not self.config.es.mirrored or not (orphans := num_orphans(commit)):
            return None
        what = f"update {commit.version} has {orphans} members of mirrored pairs without their other half"
        return what, "each stays valid on its own"

    def advice(self) -> str | None:
        return subspaces.advice(self.config.es.population, self.config.es.subspaces)

    # --- verify ----------------------------------------------------------------------------------------------------

    def faults_in_assignment(self, assignment: Assignment) -> list[str]:
        if assignment.member == self.member_of(assignment.eval_id, assignment.update):
            return []
        return ["its noise does not follow from the run seed and the schedule of sigma"]

    def faults_in_commit(self, commit: Commit, cohort: Cohort, centres: Mapping[int, float]) -> list[str]:
        """Check that the update uses the noise that was evaluated, and compute all its numbers again."""
        expected = self.commit(commit.version, cohort, centres)
        if not isinstance(commit.body, Seeds) or len(commit.body.terms) != len(cohort):
            return ["its body does not have one term for every consumed evaluation"]
        faults = []
        for each, got, right in zip(commit.consumed, commit.body.terms, expected.seeds.terms, strict=True):
            where = f"evaluation {each.eval_id}: "
            if _noise(got) != _noise(right):
                faults.append(f"{where}its noise is not the noise that was evaluated")
            faults += [where + text for text in _different(got, right, ("utility", "coefficient"))]
        faults += _different(commit.body, expected.seeds, ("alpha", "num_subspaces", "partition_seed", "step", "rank"))
        return faults + _different(commit, expected, ("null",))

    # --- the numbers of a commit -------------------------------------------------------------------------------------

    def _assign(self, eval_id: EvalId, update: int, tasks: tuple[int, ...]) -> Assignment:
        candidate = Candidate(eval_id.version, self.member_of(eval_id, update))
        return Assignment(eval_id, update, candidate, tasks, self.sampling_seed(eval_id.version))

    def _weights(self, update: int, members: Sequence[Member], results: Sequence[Result]) -> list[float]:
        """w_i: 1/N_k for the member's subspace k, times the weight of its lag."""
        by_lag = self.config.es.lag_weight
        shares = subspaces.weights([member.subspace for member in members])
        lags = [lag(result.eval_id.version, update) for result in results]
        return [
            share * remedies.lag_weight(by_lag.kind, behind, by_lag.rate) if member.sigma else 0.0
            for share, behind, member in zip(shares, lags, members, strict=True)
        ]

    def _scores(self, update: int, cohort: Cohort, centres: Mapping[int, float]) -> list[float]:
        """The scores to shape: fitness minus its baseline; with es.control=random-walk, random numbers."""
        config = self.config
        fitness = [result.fitness for _, result in cohort]
        versions = [result.eval_id.version for _, result in cohort]
        if config.es.control == "random-walk":
            return [remedies.random_score(config.run.seed, result.eval_id) for _, result in cohort]
        if config.es.baseline == "batch":
            return remedies.without_batch_means(fitness, versions)
        if config.es.baseline == "centre":
            if missing := sorted(set(versions) - centres.keys()):
                raise VerifyError(
                    f"update {update} needs the fitness of the centre at versions {missing}, which is not recorded"
                )
            return remedies.without_centres(fitness, versions, centres)
        return fitness

    def _step(self, alpha: float, update: int) -> OptimiserStep | None:
        chosen = self.config.es.optimiser
        scalars = {"beta1": chosen.beta1, "beta2": chosen.beta2, "epsilon": chosen.epsilon}
        return optimiser.step(chosen.kind, alpha=alpha, update=update, **scalars)

    def _scheduled(self, schedule: settings.Schedule, update: int) -> float:
        """The value of a schedule (of sigma or alpha) at an update."""
        num_updates = self.config.run.num_updates
        return schedules.value(schedule.kind, schedule.start, schedule.end, update=update, num_updates=num_updates)


def num_orphans(commit: Commit) -> int:
    """Number of members of mirrored pairs whose other half is not in this update."""
    pairs = zip(commit.consumed, commit.seeds.terms, strict=True)
    halves = Counter((each.eval_id.version, term.seed) for each, term in pairs)
    return sum(count == 1 for count in halves.values())


def _member(assignment: Assignment) -> Member:
    if assignment.member is None:
        raise VerifyError(f"evaluation {assignment.eval_id} is in an update, but has no perturbation")
    return assignment.member


def _noise(term: Term) -> tuple[Any, ...]:
    return term.seed, term.sign, term.sigma, term.subspace, term.partition_seed


def _different(got: Any, right: Any, names: Sequence[str]) -> list[str]:
    pairs = ((name, getattr(got, name), getattr(right, name)) for name in names)
    return [f"{name} is {value}, computed {expected}" for name, value, expected in pairs if value != expected]
