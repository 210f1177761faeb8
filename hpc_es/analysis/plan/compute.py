"""FLOPs of a run, and of the GRPO run that it is held against. Only P and L count here, not how fast a GPU is."""

from dataclasses import dataclass

from hpc_es.analysis.plan.assumptions import Assumptions
from hpc_es.analysis.plan.shape import Shape
from hpc_es.analysis.plan.tokens import Tokens
from hpc_es.config.schema import Config
from hpc_es.head.planning import eval_is_due


@dataclass(frozen=True)
class Compute:
    """Nominal FLOPs: 2 P per token forwards; N T episodes of L tokens are an update."""

    per_update: float
    in_all: float
    """Of all updates, without evaluations."""
    evaluations: float
    """Of the periodic evaluations, at the same L."""
    grpo_per_update: float
    grpo_in_all: float

    @property
    def ratio_per_update(self) -> float:
        return self.per_update / self.grpo_per_update

    @property
    def ratio_in_all(self) -> float:
        return self.in_all / self.grpo_in_all


def compute_of(config: Config, shape: Shape, tokens: Tokens, assumed: Assumptions) -> Compute:
    """2 N T P L, and one GRPO update of `grpo_update` P L (Hoy et al., 2026: 0.20x, 0.75x and 2.34x follow)."""
    one = shape.active * tokens.total
    per_update = 2 * config.es.population * config.es.tasks_per_member * one
    grpo = assumed.grpo_update * one
    return Compute(
        per_update=per_update,
        in_all=config.run.num_updates * per_update,
        evaluations=2 * num_evaluations(config) * config.eval.num_tasks * config.eval.repeats * one,
        grpo_per_update=grpo,
        grpo_in_all=assumed.grpo_updates * grpo,
    )


def num_evaluations(config: Config) -> int:
    """Versions that are evaluated on held-out tasks."""
    if not config.eval.num_tasks:
        return 0
    return sum(eval_is_due(config, version) for version in range(config.run.num_updates + 1))
