"""How much of the fitness is noise, and how fast it becomes outdated: the statistics behind `hpc-es probe`.

Invariant: pure functions of scores. Intervals are 95 % percentile bootstraps over members with a fixed seed, and the
halves of a mirrored pair are drawn together, so that the same scores always give the same result. Members are few, so
intervals are somewhat narrow: on synthetic scores (tests/unit/test_probes.py) they covered the truth in 81-91 % of
trials with 8 members, and in 89-95 % with 24.

The model of one score (a two-way random-effects layout without replication; Searle, Casella & McCulloch, 1992):

    fitness(member i, batch b) = mean + member_i + batch_b + task_noise_ib + sampling_noise_ib

All members of a version share batch and sampling seeds, so batch_b shifts all of them equally and cancels in z. The
rest of z besides the member is noise; with T tasks per score its variance is tau^2 / T. Hence

    reliability  rho(T) = signal / (signal + tau^2 / T)             consistency ICC(C,1) of McGraw & Wong (1996)

    cosine of an update to the one of the same members with noise-free fitness = sqrt(rho(T))
    cosine of an update to the true gradient ~ sqrt(N * rho(T) / D) while N is far below the D parameters,

where noise vectors count as orthogonal. N * rho(T) is therefore the quantity to maximise within a budget.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

NUM_RESAMPLES = 2000
_SEED = 0
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the run's T that the table of trade-offs shows."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, which is NaN if no resample gave a number."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Repeatability:
    """How much the fitness of one member varies between evaluations on the same tasks, compared with members."""

    identical: bool
    sd_repeats: float
    """Standard deviation of a member's fitness from one evaluation to the next, pooled over members."""
    sd_members: float
    """Standard deviation over members of their mean fitness on these tasks."""


@dataclass(frozen=True)
class Trade:
    """Expected effect of T tasks per member. Gains are N * rho(T) relative to the run; above 1 is better."""

    num_tasks: int
    reliability: float
    cosine: float
    """Expected cosine to the update of the same members with noise-free fitness: sqrt(rho(T))."""
    members: float
    """Population N at the same number of episodes per update."""
    gain: float
    members_at_equal_seconds: float | None
    """Population N at the same worker-seconds per update; None if the run recorded no times."""
    gain_at_equal_seconds: float | None


@dataclass(frozen=True)
class NoiseFloor:
    """Variances of one score at the run's T, in reward^2. Being unbiased, estimates may be negative."""

    num_members: int
    num_batches: int
    """Number of batches on which every member was scored."""
    num_tasks: int
    signal: Estimate
    """Variance between members."""
    task_noise: Estimate
    """Variance of member by task batch: the ranking of members differs between batches."""
    sampling_noise: Estimate
    """Variance between sampling seeds on one batch."""
    batch: Estimate
    """Variance between batches. It is the same for every member, so it cancels in z."""
    reliability: Estimate
    """Share of the variance of z that is signal, in [0, 1]."""
    best_num_tasks: float | None
    """sqrt(overhead per member / seconds per episode * tau^2 / signal), in tasks, at least 1: the T that
    maximises N * rho(T) at equal worker-seconds. None without signal or times."""
    trades: tuple[Trade, ...]
    """Empty without signal."""


def repeatability(same: Sequence[Sequence[float]]) -> Repeatability:
    """Compute repeatability from scores [M][k] of M members on one batch, each evaluated k times; M, k >= 2."""
    means = [statistics.fmean(row) for row in same]
    within = statistics.fmean(statistics.variance(row) for row in same)
    return Repeatability(all(len(set(row)) == 1 for row in same), math.sqrt(within), statistics.stdev(means))


def noise_floor(
    same: Sequence[Sequence[float]],
    fresh: Sequence[Sequence[float]],
    *,
    num_tasks: int,
    population: int,
    seeds: Sequence[int],
    costs: tuple[float, float] | None = None,
) -> NoiseFloor:
    """Decompose the variance of scores [M][k] on one batch with k seeds, and [M][b] on b batches; M, k, b >= 2.

    `seeds` identifies each member's noise: members with equal seeds are resampled together. `costs` are the
    worker-seconds of a member before its first episode, and of an episode.
    """
    import numpy as np

    on_one, on_fresh = np.asarray(same, float), np.asarray(fresh, float)
    found, resampled = _components(on_one, on_fresh), _resample(on_one, on_fresh, seeds)
    variances = [Estimate(float(value), *_interval(resampled[:, i])) for i, value in enumerate(found)]
    signal, task_noise, sampling_noise, batch = variances
    reliability = Estimate(_reliability(found), *_interval(np.array([_reliability(row) for row in resampled])))
    noise = task_noise.value + sampling_noise.value
    return NoiseFloor(
        num_members=on_fresh.shape[0],
        num_batches=on_fresh.shape[1],
        num_tasks=num_tasks,
        signal=signal,
        task_noise=task_noise,
        sampling_noise=sampling_noise,
        batch=batch,
        reliability=reliability,
        best_num_tasks=_best_num_tasks(signal.value, num_tasks * noise, costs),
        trades=_trades(signal.value, num_tasks * noise, num_tasks, population, costs),
    )


def verdict(floor: NoiseFloor) -> str:
    """State the result in words, and what to change."""
    if floor.signal.value <= 0 or floor.signal.low <= 0:
        return (
            f"no signal shows above the noise with {floor.num_members} members on {floor.num_batches} batches: the "
            "interval of the variance between members reaches zero; score more members, or raise es.sigma"
        )
    share = f"{floor.reliability.value:.0%} of the variance of z is signal"
    if floor.best_num_tasks is None:
        return f"{share}; at equal episodes more members with fewer tasks each pay more"
    best, now = floor.best_num_tasks, floor.num_tasks
    if best > 1.5 * now:
        return f"{share}; at equal worker-seconds more tasks per member pay, up to about {best:.0f} (now {now})"
    if best < now / 1.5:
        return f"{share}; at equal worker-seconds more members pay, with about {best:.0f} tasks each (now {now})"
    return f"{share}; {now} tasks per member is near the best at equal worker-seconds (about {best:.0f})"


@dataclass(frozen=True)
class Agreement:
    """How well the fitness of stale members predicts their fitness now. None: one side has no spread."""

    lag: int
    version: int
    num_members: int
    rank_correlation: Estimate | None
    """Spearman's correlation, with ties averaged."""
    correlation: Estimate | None
    """Pearson's correlation: the cosine between the stale update and the update from the new scores."""
    share_of_ceiling: float | None
    """rank_correlation relative to that at lag 0."""
    mean_then: float
    mean_now: float
    num_logged: int


def agreement(
    then: Sequence[float],
    now: Sequence[float],
    *,
    seeds: Sequence[int],
    lag: int,
    version: int,
    num_logged: int = 0,
    ceiling: "Agreement | None" = None,
) -> Agreement:
    """Compare two scores of the same members, [M] each, M >= 3. `ceiling` is the agreement at lag 0."""
    rank = _estimate(spearman, then, now, seeds)
    top = ceiling.rank_correlation.value if ceiling and ceiling.rank_correlation else 0.0
    return Agreement(
        lag=lag,
        version=version,
        num_members=len(then),
        rank_correlation=rank,
        correlation=_estimate(pearson, then, now, seeds),
        share_of_ceiling=rank.value / top if rank and top > 0 else None,
        mean_then=math.fsum(then) / len(then),
        mean_now=math.fsum(now) / len(now),
        num_logged=num_logged,
    )


def spearman(x: "Array", y: "Array") -> float:
    """Rank correlation with ties averaged; NaN if one side has no spread. Shape [n] each."""
    return pearson(_ranks(x), _ranks(y))


def pearson(x: "Array", y: "Array") -> float:
    """Linear correlation; NaN if one side has no spread. Shape [n] each."""
    if x.min() == x.max() or y.min() == y.max():
        return math.nan
    a, b = x - x.mean(), y - y.mean()
    return float((a @ b) / math.sqrt((a @ a) * (b @ b)))


def _ranks(values: "Array") -> "Array":
    below = (values[:, None] > values[None, :]).sum(axis=1)
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    return below + (equal - 1) / 2


# --- variance components ----------------------------------------------------------------------------------------


def _components(same: "Array", fresh: "Array") -> "Array":
    """Signal, task noise, sampling noise and batch, from scores [M, k] on one batch and [M, b] on fresh ones."""
    import numpy as np

    _, _, sampling = _mean_squares(same)
    members, batches, residual = _mean_squares(fresh)
    num_members, num_batches = fresh.shape
    signal = (members - residual) / num_batches
    return np.array([signal, residual - sampling, sampling, (batches - residual) / num_members])


def _mean_squares(scores: "Array") -> tuple[float, float, float]:
    """Mean squares of rows, of columns, and of the residual; scores [M, k]."""
    num_rows, num_columns = scores.shape
    mean = scores.mean()
    rows, columns = scores.mean(axis=1), scores.mean(axis=0)
    residual = scores - rows[:, None] - columns[None, :] + mean
    return (
        num_columns * float(((rows - mean) ** 2).sum()) / (num_rows - 1),
        num_rows * float(((columns - mean) ** 2).sum()) / (num_columns - 1),
        float((residual**2).sum()) / ((num_rows - 1) * (num_columns - 1)),
    )


def _reliability(components: "Array") -> float:
    """Signal divided by signal plus noise. A negative estimate counts as zero."""
    signal, task, sampling = (float(value) for value in components[:3])
    signal, noise = max(signal, 0.0), max(task + sampling, 0.0)
    return signal / (signal + noise) if signal + noise > 0 else 0.0


def _resample(same: "Array", fresh: "Array", seeds: Sequence[int]) -> "Array":
    """Components of members drawn with replacement, [resamples, 4].

    Drawing G groups from G with replacement shrinks every mean square over members by (G - 1) / G; this undoes it.
    """
    import numpy as np

    drawn = list(_draws(seeds))
    groups = len(set(seeds))
    components = np.array([_components(same[rows], fresh[rows]) for rows in drawn])
    components[:, :3] *= groups / (groups - 1)
    return components


def _best_num_tasks(signal: float, tau2: float, costs: tuple[float, float] | None) -> float | None:
    if signal <= 0 or costs is None or costs[1] <= 0:
        return None
    overhead, episode = costs
    return max(1.0, math.sqrt(overhead / episode * max(tau2, 0.0) / signal))


def _trades(
    signal: float, tau2: float, num_tasks: int, population: int, costs: tuple[float, float] | None
) -> tuple[Trade, ...]:
    """The table of trade-offs; tau2 is the noise variance of a single task."""
    if signal <= 0:
        return ()
    tau2 = max(tau2, 0.0)
    now = population * signal / (signal + tau2 / num_tasks)
    trades = []
    for tasks in dict.fromkeys(max(1, round(num_tasks * factor)) for factor in FACTORS):
        reliability = signal / (signal + tau2 / tasks)
        members, at_seconds = population * num_tasks / tasks, None
        if costs is not None and costs[0] + costs[1] > 0:
            overhead, episode = costs
            at_seconds = population * (overhead + num_tasks * episode) / (overhead + tasks * episode)
        trades.append(
            Trade(
                num_tasks=tasks,
                reliability=reliability,
                cosine=math.sqrt(reliability),
                members=members,
                gain=members * reliability / now,
                members_at_equal_seconds=at_seconds,
                gain_at_equal_seconds=None if at_seconds is None else at_seconds * reliability / now,
            )
        )
    return tuple(trades)


# --- intervals --------------------------------------------------------------------------------------------------


def _estimate(
    statistic: "Callable[[Array, Array], float]", then: Sequence[float], now: Sequence[float], seeds: Sequence[int]
) -> Estimate | None:
    """Estimate a statistic with its interval; None if its value on the scores themselves is NaN."""
    import numpy as np

    x, y = np.asarray(then, float), np.asarray(now, float)
    value = statistic(x, y)
    if math.isnan(value):
        return None
    return Estimate(value, *_interval(np.array([statistic(x[rows], y[rows]) for rows in _draws(seeds)])))


def _draws(seeds: Sequence[int]) -> "list[Array]":
    """Row numbers of resampled members: groups of one seed drawn with replacement, at least two different ones."""
    import numpy as np

    groups = [np.flatnonzero([seed == other for other in seeds]) for seed in dict.fromkeys(seeds)]
    generator = np.random.default_rng(_SEED)
    draws = [generator.integers(0, len(groups), len(groups)) for _ in range(NUM_RESAMPLES)]
    return [np.concatenate([groups[g] for g in draw]) for draw in draws if len(set(draw.tolist())) > 1]


def _interval(values: "Array") -> tuple[float, float]:
    import numpy as np

    known = values[~np.isnan(values)]
    if len(known) == 0:
        return math.nan, math.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)
