"""Score members of a run again with one engine, to measure how noisy their fitness is and how it ages with theta.

Invariant: members, task batches and sampling seeds are the run's own wherever it has them; additional scores use seeds
derived from the run's, so that a probe can be repeated. A probe does not change the run. The scores are analysed in
analysis/statistics/probes.py.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from hpc_es import methods, seeds
from hpc_es.envs.manifest import count_tasks
from hpc_es.errors import ConfigError
from hpc_es.methods.base import Tasks
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.records import Assignment

Say = Callable[[str], None]
DEFAULT_LAGS = (1, 4, 8)
DEFAULT_MEMBERS = 8
MAX_LINES = 20
"""Most lines of progress; the result has every score."""


@dataclass(frozen=True)
class Cost:
    """Mean worker-seconds, measured in the run itself."""

    seconds_per_member: float
    """Bringing the parameters to the version and perturbing them."""
    seconds_per_episode: float
    """Rollout seconds per episode."""


@dataclass(frozen=True)
class NoiseScores:
    """Repeated scores of M members: [M][k] fitness. The first column of `same` and `fresh` is the run's own batch and
    seeds."""

    version: int
    num_tasks: int
    """Episodes per score, T."""
    population: int
    seeds: tuple[int, ...]
    """Member seeds; halves of a mirrored pair share one."""
    same: tuple[tuple[float, ...], ...]
    """Scores on one task batch with different sampling seeds; when greedy, two, to show whether repeats are
    identical."""
    fresh: tuple[tuple[float, ...], ...]
    """Scores on different task batches, each with its own sampling seed; when greedy, also those that repeats would
    have taken."""
    greedy: bool
    """sampling.temperature is 0."""
    cost: Cost | None
    """None if the run has no results yet."""

    @property
    def repeats_are_identical(self) -> bool:
        return all(len(set(row)) == 1 for row in self.same)


@dataclass(frozen=True)
class LagScores:
    """Scores of the members of one version, there and again around a later version."""

    lag: int
    version: int
    """Version at which the members were dispatched."""
    seeds: tuple[int, ...]
    then: tuple[float, ...]
    """Fitness around theta_version; the run's own if it has one."""
    now: tuple[float, ...]
    """Fitness of the same noise around theta_{version + lag}, on the same tasks, with another sampling seed."""
    num_logged: int
    """Number of scores in `then` that come from the run."""


@dataclass(frozen=True)
class StaleScores:
    version: int
    num_tasks: int
    lags: tuple[LagScores, ...]
    """Scores by lag. Lag 0 comes first: the same members twice at one version, which shows the highest correlation that
    repeat noise allows."""
    greedy: bool
    """sampling.temperature is 0."""

    @property
    def repeats_are_identical(self) -> bool:
        """Whether repeats are identical. The correlation at lag 0 is then always 1 and means nothing."""
        return self.lags[0].then == self.lags[0].now


def noise_scores(
    recorded: Recorded, *, version: int | None = None, members: int | None = None, repeats: int = 4, say: Say = print
) -> NoiseScores:
    """Score `members` members of theta_version `repeats` times on one batch, and on `repeats` different batches.

    `members` defaults to 8, or all of a smaller population. The probe takes members * (2 * repeats - 1) evaluations;
    when greedy, all but two per member are on fresh batches. Errors: ConfigError for a version or number that does not
    exist, DigestMismatch, EngineError, EnvError.
    """
    version = recorded.version(version)
    if repeats < 2:
        raise ConfigError(f"--repeats {repeats} must be at least 2: a single score does not show its noise")
    tasks = count_tasks(recorded.config)
    assignments = members_of(recorded, tasks, version, members)
    greedy = recorded.config.sampling.temperature == 0
    num_same = 2 if greedy else repeats
    num_fresh = 2 * repeats - num_same
    plans = [_repeats(recorded, tasks, assignment, num_same, num_fresh) for assignment in assignments]
    scores = asyncio.run(_play(recorded, [(version, plan) for plan in plans], say))
    same = [row[:num_same] for row in scores]
    fresh = [row[:1] + row[num_same:] for row in scores]
    return NoiseScores(
        version=version,
        num_tasks=recorded.config.es.tasks_per_member,
        population=recorded.config.es.population,
        seeds=_seeds(assignments),
        same=tuple(map(tuple, same)),
        fresh=tuple(map(tuple, fresh)),
        greedy=greedy,
        cost=logged_cost(recorded),
    )


def stale_scores(
    recorded: Recorded,
    *,
    version: int | None = None,
    lags: Sequence[int] | None = None,
    members: int | None = None,
    say: Say = print,
) -> StaleScores:
    """Score the members of theta_{version - lag} around theta_version, for each lag and for lag 0.

    `lags` are at least 1; by default, those of 1, 4 and 8 that the run has. `members` is as in `noise_scores`. The
    probe takes `members` evaluations per lag, and twice as many if the run has no results. Errors: see `noise_scores`.
    """
    version = recorded.version(version)
    wanted = [lag for lag in DEFAULT_LAGS if lag <= version] if lags is None else sorted(set(lags))
    for lag in wanted:
        if lag < 1:
            raise ConfigError(f"--lags {lag} must be at least 1; lag 0 is always scored as well")
        if lag > version:
            raise ConfigError(f"--lags {lag}: members that are {lag} versions old at version {version} do not exist")
    tasks = count_tasks(recorded.config)
    groups = [(lag, members_of(recorded, tasks, version - lag, members)) for lag in (0, *wanted)]
    again = [(version, [_again(assignment)]) for _, group in groups for assignment in group]
    unknown = [a for _, group in groups for a in group if a.eval_id not in recorded.results]
    missing = [(assignment.version, [assignment]) for assignment in unknown]
    played = [row[0] for row in asyncio.run(_play(recorded, [*missing, *again], say))]
    then = {eval_id: result.fitness for eval_id, result in recorded.results.items()}
    then |= {a.eval_id: fitness for a, fitness in zip(unknown, played[: len(missing)], strict=True)}
    now = iter(played[len(missing) :])
    return StaleScores(
        version=version,
        num_tasks=recorded.config.es.tasks_per_member,
        lags=tuple(
            LagScores(
                lag=lag,
                version=version - lag,
                seeds=_seeds(group),
                then=tuple(then[a.eval_id] for a in group),
                now=tuple(next(now) for _ in group),
                num_logged=sum(a.eval_id in recorded.results for a in group),
            )
            for lag, group in groups
        ),
        greedy=recorded.config.sampling.temperature == 0,
    )


def members_of(recorded: Recorded, tasks: Tasks, version: int, count: int | None) -> list[Assignment]:
    """The first `count` members, in slot order, that the run planned at a version or would have planned there.

    `count` defaults to 8, or all of a smaller population. Errors: ConfigError if it is below 3 or above the population.
    """
    config = recorded.config
    if config.es.population < 3:
        raise ConfigError(
            f"es.population={config.es.population} is too small for a probe: the spread of fewer than 3 members cannot "
            "be estimated"
        )
    count = min(DEFAULT_MEMBERS, config.es.population) if count is None else count
    if not 3 <= count <= config.es.population:
        raise ConfigError(
            f"--members {count} must be from 3, the fewest whose spread can be estimated, to es.population="
            f"{config.es.population}"
        )
    planned = {eval_id.slot: a for eval_id, a in sorted(recorded.members.items()) if eval_id.version == version}
    chosen = list(planned.values())[:count]
    unplanned = (slot for slot in itertools.count() if slot not in planned)
    while len(chosen) < count:
        chosen.append(methods.make(config, tasks).assign(version, next(unplanned), version + 1))
    return chosen


def logged_cost(recorded: Recorded) -> Cost | None:
    """Mean cost of evaluating members in the run; None if it has no results."""
    results = list(recorded.results.values())
    if not results:
        return None
    overhead = sum(result.seconds_update + result.seconds_perturb for result in results) / len(results)
    episodes = sum(len(recorded.members[result.eval_id].tasks) for result in results)
    return Cost(overhead, sum(result.seconds_rollout for result in results) / episodes)


def _repeats(
    recorded: Recorded, tasks: Tasks, assignment: Assignment, num_same: int, num_fresh: int
) -> list[Assignment]:
    """The run's own evaluation, which counts in both numbers; then its batch with other sampling seeds; then other
    batches."""
    own, version, size = assignment.sampling_seed, assignment.version, len(assignment.tasks)
    seed = seeds.derive(recorded.config.run.seed, "probe", version)
    same = [replace(assignment, sampling_seed=seeds.derive(own, "probe", n)) for n in range(1, num_same)]
    fresh = [
        replace(
            assignment,
            tasks=seeds.task_batch(seed, n, size, tasks.train),
            sampling_seed=seeds.derive(own, "probe batch", n),
        )
        for n in range(1, num_fresh)
    ]
    return [assignment, *same, *fresh]


def _again(assignment: Assignment) -> Assignment:
    """The same member and tasks with another sampling seed, so that the score is an independent sample of the
    fitness."""
    return replace(assignment, sampling_seed=seeds.derive(assignment.sampling_seed, "probe again"))


async def _play(recorded: Recorded, work: Sequence[tuple[int, list[Assignment]]], say: Say) -> list[list[float]]:
    """Fitness of every assignment in the given order. Each list is for one member, which is perturbed only once."""
    fitness: list[list[float]] = [[] for _ in work]
    total, step = sum(len(assignments) for _, assignments in work), math.ceil(len(work) / MAX_LINES)
    say(f"{total} evaluations of {len(work[0][1][0].tasks)} episodes each")
    async with Solo.start(recorded) as solo:
        for number, place in enumerate(sorted(range(len(work)), key=lambda place: work[place][0]), start=1):
            version, assignments = work[place]
            await solo.become(version, assignments[0].member)
            fitness[place] = [(await solo.play(assignment)).fitness for assignment in assignments]
            if number % step and number < len(work):
                continue
            scores = " ".join(f"{score:.4f}" for score in fitness[place])
            say(f"{number} of {len(work)}: member {assignments[0].eval_id} around theta_{version}: {scores}")
    return fitness


def _seeds(assignments: Sequence[Assignment]) -> tuple[int, ...]:
    return tuple(a.member.seed for a in assignments if a.member is not None)
