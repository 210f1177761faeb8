"""Evaluations of the unperturbed policy on held-out tasks: when, and in which batches. All methods use these rules."""

from collections.abc import Iterator

from hpc_es import seeds
from hpc_es.config.schema import Config
from hpc_es.records import Assignment, Candidate, EvalId


def eval_is_due(config: Config, version: int) -> bool:
    """Whether a version is evaluated: theta_0, the final theta, and every eval.every versions between."""
    every = config.eval.every
    return version in (0, config.run.num_updates) or (every > 0 and version % every == 0)


def plan_evaluation(config: Config, batch_size: int, num_tasks: int, version: int) -> Iterator[Assignment]:
    """Evaluation tasks 0..num_tasks-1, eval.repeats times, in batches: slots 0, 1, ... of purpose "eval"."""
    slot = 0
    for repeat in range(config.eval.repeats):
        for first in range(0, num_tasks, batch_size):
            sampling_seed = seeds.eval_sampling_seed(config.run.seed, repeat, first)
            batch = tuple(range(first, min(first + batch_size, num_tasks)))
            yield Assignment(EvalId(version, slot, 0, "eval"), 0, Candidate(version), batch, sampling_seed)
            slot += 1
