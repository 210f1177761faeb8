"""FLOPs of a run and of the gradient method that it is compared with. They depend on P and L, not on the GPU."""

from dataclasses import dataclass

from hpc_es.config.schema import Config
from hpc_es.methods.evaluation import eval_is_due
from hpc_es.planner.assumptions import Assumptions
from hpc_es.planner.gradient import FORWARD, GradientCompute, gradient_compute
from hpc_es.planner.shape import Shape
from hpc_es.planner.tokens import Tokens


@dataclass(frozen=True)
class Compute:
    """Nominal FLOPs: 2 P per token of a forward pass, and N T episodes of L tokens per update."""

    per_update: float
    in_all: float
    """FLOPs of all updates, without evaluations."""
    evaluations: float
    """FLOPs of the periodic evaluations, at the same L."""
    gradient: GradientCompute

    @property
    def ratio_per_update(self) -> float:
        """FLOPs per update divided by GRPO's."""
        return self.per_update / self.gradient.grpo_per_update

    @property
    def ratio_in_all(self) -> float:
        return self.in_all / self.gradient.grpo_in_all


def compute_of(config: Config, shape: Shape, tokens: Tokens, assumed: Assumptions) -> Compute:
    """FLOPs of a run: 2 N T P L per update, because members are only rolled out."""
    one = shape.active * tokens.total
    per_update = FORWARD * config.es.population * config.es.tasks_per_member * one
    return Compute(
        per_update=per_update,
        in_all=config.run.num_updates * per_update,
        evaluations=FORWARD * num_evaluations(config) * config.eval.num_tasks * config.eval.repeats * one,
        gradient=gradient_compute(one, assumed),
    )


def num_evaluations(config: Config) -> int:
    """Number of versions that are evaluated on held-out tasks."""
    if not config.eval.num_tasks:
        return 0
    return sum(eval_is_due(config, version) for version in range(config.run.num_updates + 1))
