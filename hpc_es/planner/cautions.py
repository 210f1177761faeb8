"""Warnings about problems that a planned run would have."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_es.config.schema import Config
from hpc_es.planner.assumptions import Assumptions
from hpc_es.planner.memory import GIB
from hpc_es.planner.phases import Phases
from hpc_es.planner.shape import Shape
from hpc_es.planner.tokens import Tokens
from hpc_es.simulator.worker_count import worker_count_warnings

if TYPE_CHECKING:
    from hpc_es.planner import Plan

LONGEST_DEVIATIONS = 4
"""The longest evaluation of a run is assumed to be this many standard deviations above the mean."""
MAX_ARENA_SHARE = 0.05
"""Share of time that workers may idle while the head adds an update, without a warning."""
_SLURM_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 2**20}


def longest_evaluation(takes: Phases, assumed: Assumptions) -> float:
    """Seconds that a lease should allow, including catching up."""
    return takes.catch_up + takes.evaluation * (1 + LONGEST_DEVIATIONS * assumed.evaluation_cv)


def cautions_of(config: Config, made: "Plan", takes: Phases, assumed: Assumptions) -> Iterator[str]:
    """Warnings with the configuration key that helps. `takes` are the phases of the largest evaluation."""
    yield from _of_what_is_given(config, made.shape, made.tokens)
    needs, num_workers = made.memory, made.num_workers
    if not needs.gpu.fits:
        yield "the model does not fit; all times are those of a GPU with enough memory"
    if (longest := longest_evaluation(takes, assumed)) > config.transport.lease_timeout:
        yield (
            f"some evaluations would take {longest:,.0f} s and lose their lease after transport.lease_timeout="
            f"{config.transport.lease_timeout:g}: raise it (this plan assumes that), or lower es.tasks_per_member"
        )
    yield from worker_count_warnings(config, num_workers, made.durations)
    if made.simulated.arena_share > MAX_ARENA_SHARE:
        yield (
            f"workers idle {made.simulated.arena_share:.0%} of the time while the head adds an update, which takes "
            f"{made.phases.head_update:,.0f} s with slurm.head.cpus={config.slurm.head.cpus}: give it more, or a GPU "
            "(slurm.head.gres)"
        )
    if made.num_up < num_workers:
        yield (
            f"only {made.num_up} of {num_workers} workers connect before the run ends: use fewer for such a short run "
            f"(start_s={assumed.start_s:g})"
        )
    for role, job, needed in (
        ("head", config.slurm.head, needs.head_job),
        ("worker", config.slurm.worker, needs.worker_job),
    ):
        if job.memory is not None and 0 < _slurm_bytes(job.memory) < needed:
            yield f"slurm.{role}.memory={job.memory} is less than the {needed / GIB:.1f} GiB that this job needs"


def _of_what_is_given(config: Config, shape: Shape, tokens: Tokens) -> Iterator[str]:
    if shape.other_model:
        yield (
            f"--parameters is given, but the KV cache and heads are still those of {shape.other_model}: name the other "
            "model's config.json with --model-config FILE"
        )
    if tokens.with_cached:
        yield (
            "the prompts of --like include tokens that the run's prefix cache saved, so L and all figures that depend "
            "on it are too high: give --tokens-in without the cached part, and the measured "
            f"--tokens-out {tokens.answer:.4g} --turns {tokens.turns:.4g}"
        )
    answers, length = config.sampling.max_tokens, config.engine.max_model_len
    if tokens.answer > tokens.turns * answers:
        yield (
            f"{tokens.answer:,.0f} answer tokens are more than {tokens.turns:g} turns of sampling.max_tokens={answers} "
            "allow: no episode can be that long"
        )
    if tokens.total > tokens.turns * length:
        yield (
            f"L = {tokens.total:,.0f} tokens are more than {tokens.turns:g} turns of engine.max_model_len={length} "
            "allow: no episode can be that long"
        )


def _slurm_bytes(text: str) -> float:
    """Bytes of a memory setting as Slurm's --mem reads it, in megabytes by default; 0 for the whole node, and for any
    other text."""
    found = re.fullmatch(r"([0-9]{1,18})([KMGT]?)", text.upper().removesuffix("B"))
    return int(found[1]) * _SLURM_UNITS[found[2]] if found else 0
