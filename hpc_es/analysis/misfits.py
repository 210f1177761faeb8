"""Whether a run's workers and its schedule fit: what the schedule's name promises, held against simulated lags.

Under `natural` the number of workers decides how stale results are: G workers make at most G - 1 of N results of a
cohort stale by one version (3 of 16 with 4 workers; Hoy et al., 2026). With one worker nothing is ever stale, and with
more than N much of the work comes too late. The real head decides in the simulation, so what is said here is what
`hpc-es simulate CONFIG` says. All other modes fix every cohort beforehand, whatever the number of workers.
"""

import math
from collections.abc import Iterator

from hpc_es.config.es import EsConfig, Natural, Sync
from hpc_es.config.schema import Config
from hpc_es.head.planning import schedule_of

DURATIONS = "lognormal:median=60,sigma=0.8"
"""Evaluations of agents, as `hpc-es simulate` takes them where nothing else is said."""
MAX_DISCARDED = 0.1
"""Share of the work that may come too late without a warning."""
MAX_UPDATES, MAX_POPULATION = 12, 32
"""So much is simulated, which takes a few hundredths of a second. A larger population is played at this size, with as
many workers per member: shares stay about the same."""
NEVER_S = 1e12


def misfits(config: Config, num_workers: int, durations: str = DURATIONS) -> list[str]:
    """What does not fit, in sentences that name the remedy; empty where all is well. `durations`: of evaluations, as
    `hpc-es simulate` reads them."""
    return [*_too_short(config), *_idle(config, num_workers), *_not_as_named(config, num_workers, durations)]


def most_at_once(config: Config) -> float:
    """Members under way together, as the schedules bound them; those of fixed lags are not looked at."""
    population = config.es.population
    match config.staleness:
        case Sync():
            return population
        case Natural(max_lag=max_lag):
            return population * (max_lag + 1)
        case _:
            return math.inf


def _too_short(config: Config) -> Iterator[str]:
    """A fixed lag is used as soon as that old a version exists; in a short run that may be never."""
    lag, num_updates = schedule_of(config).max_lag, config.run.num_updates
    if not isinstance(config.staleness, Natural) and lag and lag >= num_updates:
        yield (
            f"staleness.mode={config.staleness.mode} asks for results of lag {lag}, but run.num_updates={num_updates} "
            f"is over before any can be that old: make it more than {lag}, or the lag smaller"
        )


def _idle(config: Config, num_workers: int) -> Iterator[str]:
    if num_workers > (most := most_at_once(config)):
        yield (
            f"staleness.mode={config.staleness.mode} hands out at most {most} members at once: "
            f"{num_workers - most} of the {num_workers} workers would only ever idle or score held-out tasks"
        )


def _not_as_named(config: Config, num_workers: int, durations: str) -> Iterator[str]:
    staleness = config.staleness
    if not isinstance(staleness, Natural) or staleness.max_lag == 0 or config.run.num_updates == 1:
        return
    lag_max, discarded = _simulated(config, num_workers, durations)
    if lag_max == 0:
        yield (
            "staleness.mode=natural is asynchronous in name only with 1 worker: every result has lag 0, as with "
            "staleness.mode=sync. Set launch.workers (`run`) or slurm.workers (`submit`) to 4, as in the published "
            "study, or to any other number above 1"
        )
    if discarded >= MAX_DISCARDED:
        yield (
            f"with {num_workers} workers for es.population={config.es.population} and staleness.max_lag="
            f"{staleness.max_lag}, about {discarded:.0%} of the work would come too late and be discarded (simulated): "
            f"take at most about {_most_without_waste(config, num_workers, durations)} workers, or "
            "staleness.overdue=hold, or a larger staleness.max_lag or es.population"
        )


def _simulated(config: Config, num_workers: int, durations: str) -> tuple[int, float]:
    """The largest lag, and the share of the work that is discarded, in the run's first updates."""
    from hpc_es.analysis.durations import parse
    from hpc_es.analysis.simulate import simulate

    factor = config.es.population / min(config.es.population, MAX_POPULATION)
    # Only what decides about lags is kept; leases never end, since the durations may be made up.
    small = config.model_copy(
        update={
            "run": config.run.model_copy(update={"num_updates": min(config.run.num_updates, MAX_UPDATES)}),
            "es": EsConfig(population=min(config.es.population, MAX_POPULATION)),
            "eval": config.eval.model_copy(update={"num_tasks": 0}),
            "transport": config.transport.model_copy(update={"lease_timeout": NEVER_S}),
        }
    )
    num_played = max(min(num_workers, 2), round(num_workers / factor))
    played = simulate(small, parse(durations, population=small.es.population), num_workers=num_played)
    return played.lag_max, played.discarded_share


def _most_without_waste(config: Config, num_workers: int, durations: str) -> int:
    """By bisection: fewer workers waste less, apart from chance."""
    fits, wastes = 1, int(min(num_workers, most_at_once(config)))
    while wastes - fits > max(1, fits // 10):
        middle = (fits + wastes) // 2
        if _simulated(config, middle, durations)[1] < MAX_DISCARDED:
            fits = middle
        else:
            wastes = middle
    return fits
