"""Checks whether a result is possible for its assignment; used by worker, head and `verify`."""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

from hpc_es.bounds import fault
from hpc_es.records import Assignment, Episode, Result


def fitness_of(episodes: Sequence[Episode]) -> float:
    """Mean reward of an evaluation's episodes; NaN if there are none."""
    return _mean([episode.reward for episode in episodes]) if episodes else math.nan


def why_unbelievable(assignment: Assignment, result: Result) -> str | None:
    """Why this result is impossible for the assignment; None if it is possible."""
    return str(found) if (found := fault(result)) else contradiction(assignment, result)


def contradiction(assignment: Assignment, result: Result) -> str | None:
    """The same as `why_unbelievable`, for a result whose fields are known to be within their bounds."""
    if result.error is not None:
        is_empty = not result.episodes and math.isnan(result.fitness)
        return None if is_empty else "it has both an error and measurements"
    if not math.isfinite(result.fitness):
        return f"fitness {result.fitness} is not a finite number"
    played = tuple([episode.task for episode in result.episodes])
    if played != assignment.tasks:
        return f"its episodes are of tasks {_few(played)}; the assignment has {_few(assignment.tasks)}"
    rewards = [episode.reward for episode in result.episodes]
    if result.fitness != _mean(rewards) and result.fitness not in _other_means(rewards):
        return f"fitness is {result.fitness!r}; the mean of its episodes' rewards is {_mean(rewards)!r}"
    return None


def _mean(rewards: Sequence[float]) -> float:
    """Mean with plain left-to-right addition, because Python's `sum` gives other bits since 3.12."""
    return reduce(add, rewards, 0.0) / len(rewards)


def _other_means(rewards: Sequence[float]) -> tuple[float, float]:
    """Means as the first release recorded them on Python 3.12 and later, whose `sum` compensates rounding errors."""
    return sum(rewards) / len(rewards), math.fsum(rewards) / len(rewards)


def _few(tasks: Iterable[int]) -> str:
    first = list(tasks)
    return ", ".join(map(str, first[:8])) + (f", ... ({len(first)} in total)" if len(first) > 8 else "") or "none"
