"""Check whether the number of workers fits the staleness schedule, by simulating the lags.

In the mode `natural`, the number of workers decides how stale results are: with G workers, at most G - 1 of the N
results of a cohort are stale by one version (3 of 16 with 4 workers; Hoy et al., 2026). With one worker no result is
stale, and with more than N workers much of the work comes too late. The simulation uses the real head, so its answer
agrees with `hpc-es simulate CONFIG`. All other modes fix the lags of every cohort in advance, whatever the number of
workers.
"""

import math
from collections.abc import Iterator

from hpc_es import methods
from hpc_es.config.es import EsConfig, Natural, Sync
from hpc_es.config.schema import Config

DURATIONS = "lognormal:median=60,sigma=0.8"
"""Durations of evaluations: the default of `hpc-es simulate`."""
MAX_DISCARDED = 0.1
"""Share of the work that may be discarded without a warning."""
MAX_UPDATES, MAX_POPULATION = 12, 32
"""Size of the simulation, which takes a few hundredths of a second. A larger population is simulated at this size, with
the same number of workers per member: the shares stay about the same."""
NEVER_S = 1e12


def worker_count_warnings(config: Config, num_workers: int, durations: str = DURATIONS) -> list[str]:
    """Warnings about what does not fit, with the remedy; empty if all is well.

    `durations` are the durations of evaluations, in the format of `hpc-es simulate`."""
    return [*_too_short(config), *_idle(config, num_workers), *_not_as_named(config, num_workers, durations)]


def most_at_once(config: Config) -> float:
    """Most members that the schedule allows to run at once; infinite for schedules of fixed lags."""
    population = config.es.population
    match config.staleness:
        case Sync():
            return population
        case Natural(max_lag=max_lag):
            return population * (max_lag + 1)
        case _:
            return math.inf


def _too_short(config: Config) -> Iterator[str]:
    """A fixed lag is used as soon as a version that old exists, which a short run may never reach."""
    lag, num_updates = methods.make(config).schedule().max_lag, config.run.num_updates
    if not isinstance(config.staleness, Natural) and lag and lag >= num_updates:
        yield (
            f"staleness.mode={config.staleness.mode} asks for results of lag {lag}, but run.num_updates={num_updates} "
            f"ends before any result can be that old: set it above {lag}, or make the lag smaller"
        )


def _idle(config: Config, num_workers: int) -> Iterator[str]:
    if num_workers > (most := most_at_once(config)):
        yield (
            f"staleness.mode={config.staleness.mode} assigns at most {most} members at once: {num_workers - most} of "
            f"the {num_workers} workers would only idle or score held-out tasks, so use fewer"
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
            f"use at most about {_most_without_waste(config, num_workers, durations)} workers, or "
            "staleness.overdue=hold, or a larger staleness.max_lag or es.population"
        )


def _simulated(config: Config, num_workers: int, durations: str) -> tuple[int, float]:
    """Simulate the first updates; return the largest lag and the share of the work that is discarded."""
    from hpc_es.simulator.durations import parse
    from hpc_es.simulator.simulate import simulate

    factor = config.es.population / min(config.es.population, MAX_POPULATION)
    # Keep only the settings that decide about lags. Leases never expire, since the durations may be made up.
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
    """Largest number of workers that wastes little, by bisection: fewer workers waste less, apart from chance."""
    fits, wastes = 1, int(min(num_workers, most_at_once(config)))
    while wastes - fits > max(1, fits // 10):
        middle = (fits + wastes) // 2
        if _simulated(config, middle, durations)[1] < MAX_DISCARDED:
            fits = middle
        else:
            wastes = middle
    return fits
