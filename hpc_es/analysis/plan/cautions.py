"""What would go wrong in a run that is made as it is planned."""

import math
import re
from collections.abc import Iterator

from hpc_es.analysis.plan.assumptions import Assumptions
from hpc_es.analysis.plan.memory import GIB, Memory
from hpc_es.analysis.plan.phases import Phases
from hpc_es.config.es import Natural, Sync
from hpc_es.config.schema import Config

LONGEST_DEVIATIONS = 4
"""So many standard deviations above the mean, the longest evaluations of a run are looked for."""
_SLURM_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 2**20}


def longest_evaluation(takes: Phases, assumed: Assumptions) -> float:
    """Seconds that a lease should allow, catching up included."""
    return takes.catch_up + takes.evaluation * (1 + LONGEST_DEVIATIONS * assumed.evaluation_cv)


def cautions_of(
    config: Config, needs: Memory, takes: Phases, assumed: Assumptions, *, num_workers: int
) -> Iterator[str]:
    """Sentences with the key that helps."""
    if not needs.gpu.fits:
        yield "the model does not fit, so seconds and all that follows from them are those of a GPU on which it would"
    if (longest := longest_evaluation(takes, assumed)) > config.transport.lease_timeout:
        yield (
            f"some evaluations would take {longest:,.0f} s and lose their lease after transport.lease_timeout="
            f"{config.transport.lease_timeout:g}: raise it (planned as if it were), or lower es.tasks_per_member"
        )
    if num_workers > (most := _most_at_once(config)):
        yield (
            f"staleness.mode={config.staleness.mode} hands out at most {most} members at once: "
            f"{num_workers - most} of the {num_workers} workers would only ever idle or score held-out tasks"
        )
    for role, job, needed in (
        ("head", config.slurm.head, needs.head_job),
        ("worker", config.slurm.worker, needs.worker_job),
    ):
        if job.memory is not None and 0 < _slurm_bytes(job.memory) < needed:
            yield f"slurm.{role}.memory={job.memory} is less than the {needed / GIB:.1f} GiB that this job needs"


def _most_at_once(config: Config) -> float:
    """Members under way together, as the schedules bound them; those of fixed lags are not looked at."""
    population = config.es.population
    match config.staleness:
        case Sync():
            return population
        case Natural(max_lag=max_lag):
            return population * (max_lag + 1)
        case _:
            return math.inf


def _slurm_bytes(text: str) -> float:
    """As --mem reads it: megabytes where nothing else is said; 0, which is all of a node, also for other text."""
    found = re.fullmatch(r"(\d+)([KMGT]?)", text.upper().removesuffix("B"))
    return int(found[1]) * _SLURM_UNITS[found[2]] if found else 0
