"""Score members of a run again, with one engine: what their fitness is worth, and what becomes of it as theta moves on.

Invariant: members, task batches and sampling seeds are the run's own wherever the run has them; whatever is scored
beyond that draws seeds of its own, derived from the run's, so that a probe can be repeated. A probe changes nothing in
the run. The numbers are judged in analysis/statistics/probes.py.
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
"""Most lines of progress; the return value has every score."""


@dataclass(frozen=True)
class Cost:
    """Mean worker-seconds in the run's own log."""

    seconds_per_member: float
    """Bringing the parameters to the version and perturbing them."""
    seconds_per_episode: float
    """Rollout seconds of an evaluation / its episodes."""


@dataclass(frozen=True)
class NoiseScores:
    """M members scored several times: [M][k] fitness; the first column of both is the run's own batch and seeds."""

    version: int
    num_tasks: int
    """Episodes per score, T."""
    population: int
    seeds: tuple[int, ...]
    """Member seeds; halves of a mirrored pair share one."""
    same: tuple[tuple[float, ...], ...]
    """On one task batch, with as many sampling seeds; greedy: twice, which shows whether repeats are identical."""
    fresh: tuple[tuple[float, ...], ...]
    """On different task batches, each with a sampling seed of its own; greedy: all that repeats would have taken."""
    greedy: bool
    """sampling.temperature is 0."""
    cost: Cost | None
    """None: the run has no results yet."""

    @property
    def repeats_are_identical(self) -> bool:
        return all(len(set(row)) == 1 for row in self.same)


@dataclass(frozen=True)
class LagScores:
    """The members of one version scored where they were dispatched, and again at the version under probe."""

    lag: int
    version: int
    """At which they were dispatched."""
    seeds: tuple[int, ...]
    then: tuple[float, ...]
    """Fitness around theta_version: the run's own where it has one."""
    now: tuple[float, ...]
    """Fitness of the same noise around theta_{version + lag}, on the same tasks, with another sampling seed."""
    num_logged: int
    """How many of `then` the run had logged."""


@dataclass(frozen=True)
class StaleScores:
    version: int
    num_tasks: int
    lags: tuple[LagScores, ...]
    """Lag 0 first: the same members twice at one version, the ceiling that repeat noise sets."""
    greedy: bool
    """sampling.temperature is 0."""

    @property
    def repeats_are_identical(self) -> bool:
        """Lag 0 then says nothing: its correlation is 1 whatever the fitness is worth."""
        return self.lags[0].then == self.lags[0].now


def noise_scores(
    recorded: Recorded, *, version: int | None = None, members: int | None = None, repeats: int = 4, say: Say = print
) -> NoiseScores:
    """Score `members` members of theta_version `repeats` times on one batch and on as many fresh ones.

    members: default 8, or all of a smaller population. Takes members * (2 * repeats - 1) evaluations; greedy, all but
    two of a member's are on fresh batches. Errors: ConfigError for a version or number that does not exist,
    DigestMismatch, EngineError, EnvError.
    """
    version = recorded.version(version)
    if repeats < 2:
        raise ConfigError(f"--repeats {repeats} must be at least 2: one score says nothing about its noise")
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

    lags: each at least 1; default those of 1, 4, 8 that the run has. members: as for `noise_scores`. Takes
    `members` evaluations per lag, and as many again where the run has no result. Errors: as `noise_scores`.
    """
    version = recorded.version(version)
    wanted = [lag for lag in DEFAULT_LAGS if lag <= version] if lags is None else sorted(set(lags))
    for lag in wanted:
        if lag < 1:
            raise ConfigError(f"--lags {lag} must be at least 1; lag 0 is scored beside them in any case")
        if lag > version:
            raise ConfigError(f"--lags {lag}: members that are {lag} versions old at version {version} do not exist")
    tasks = count_tasks(recorded.config)
    groups = [(lag, members_of(recorded, tasks, version - lag, members)) for lag in (0, *wanted)]
    again = [(version, [_again(assignment)]) for _, group in groups for assignment in group]
    unknown = [a for _, group in groups for a in group if a.eval_id not in recorded.results]
    anew = [(assignment.version, [assignment]) for assignment in unknown]
    played = [row[0] for row in asyncio.run(_play(recorded, [*anew, *again], say))]
    then = {eval_id: result.fitness for eval_id, result in recorded.results.items()}
    then |= {a.eval_id: fitness for a, fitness in zip(unknown, played[: len(anew)], strict=True)}
    now = iter(played[len(anew) :])
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
    """The first `count` members that the run planned at a version, in slot order, or would have planned there.

    count: default 8, or all of a smaller population. Errors: ConfigError when it is below 3 or above the population.
    """
    config = recorded.config
    if config.es.population < 3:
        raise ConfigError(
            f"es.population={config.es.population} is too small for a probe: nothing can be said of the spread of "
            "fewer than 3 members"
        )
    count = min(DEFAULT_MEMBERS, config.es.population) if count is None else count
    if not 3 <= count <= config.es.population:
        raise ConfigError(
            f"--members {count} must be from 3, below which nothing can be said of a spread, to es.population="
            f"{config.es.population}"
        )
    planned = {eval_id.slot: a for eval_id, a in sorted(recorded.members.items()) if eval_id.version == version}
    chosen = list(planned.values())[:count]
    unplanned = (slot for slot in itertools.count() if slot not in planned)
    while len(chosen) < count:
        chosen.append(methods.make(config, tasks).assign(version, next(unplanned), version + 1))
    return chosen


def logged_cost(recorded: Recorded) -> Cost | None:
    """What evaluations of members cost in the run; None when it has no results."""
    results = list(recorded.results.values())
    if not results:
        return None
    overhead = sum(result.seconds_update + result.seconds_perturb for result in results) / len(results)
    episodes = sum(len(recorded.members[result.eval_id].tasks) for result in results)
    return Cost(overhead, sum(result.seconds_rollout for result in results) / episodes)


def _repeats(
    recorded: Recorded, tasks: Tasks, assignment: Assignment, num_same: int, num_fresh: int
) -> list[Assignment]:
    """The run's own evaluation, which both numbers count; its batch with other sampling seeds; other batches."""
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
    """The same member and tasks, with a sampling seed of its own: what is asked is the fitness, not its draw."""
    return replace(assignment, sampling_seed=seeds.derive(assignment.sampling_seed, "probe again"))


async def _play(recorded: Recorded, work: Sequence[tuple[int, list[Assignment]]], say: Say) -> list[list[float]]:
    """Fitness of every assignment, in the order given; each list is one member, perturbed once around a version."""
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
