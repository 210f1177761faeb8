"""Predict what a run needs before it starts: memory, network traffic, seconds, GPU-hours and FLOPs.

A plan follows from a configuration, the shape of a model, the length of an episode and stated assumptions. Invariant:
the simulator computes the wall-clock time from the seconds predicted here, so `hpc-es simulate CONFIG --durations
PLAN.durations` gives the same time. Every figure is a prediction, a fit to published numbers, or published itself
(assumptions.py, published.py).
"""

import math
from dataclasses import dataclass, replace

from hpc_es.config.schema import Config
from hpc_es.errors import ConfigError
from hpc_es.params.heads import check_ranks
from hpc_es.planner.assumptions import GPUS, Assumptions, assume
from hpc_es.planner.cautions import cautions_of, longest_evaluation
from hpc_es.planner.compute import Compute, compute_of
from hpc_es.planner.memory import Memory, memory_of
from hpc_es.planner.phases import Phases, head_has_gpu, phases_of
from hpc_es.planner.published import Published, published_of
from hpc_es.planner.shape import Shape, shape_of
from hpc_es.planner.tokens import Tokens
from hpc_es.planner.wire import Wire, wire_of
from hpc_es.simulator.durations import parse
from hpc_es.simulator.result import SimulationResult
from hpc_es.simulator.simulate import simulate

__all__ = ["GPUS", "Assumptions", "Plan", "Published", "Shape", "Tokens", "assume", "make_plan", "shape_of"]

NO_LEASE_S = 1e12


@dataclass(frozen=True)
class Plan:
    num_workers: int
    num_up: int
    """Number of workers that connect before the run ends."""
    shape: Shape
    tokens: Tokens
    memory: Memory
    wire: Wire
    phases: Phases
    compute: Compute
    durations: str
    """The predicted seconds in the format of `hpc-es simulate --durations`."""
    simulated: SimulationResult
    num_gpus: int
    """GPUs of all workers, and of the head if it uses one."""
    published: Published | None = None
    """The published row of the run that this configuration repeats; None if there is none."""
    cautions: tuple[str, ...] = ()

    @property
    def gpu_hours_per_update(self) -> float:
        """GPU-hours per update from the first lease to the last commit, including evaluations on held-out tasks."""
        return self.num_gpus * self.simulated.seconds_per_update / 3600

    @property
    def gpu_hours(self) -> float:
        """GPU-hours from the start of the jobs to the end of the run."""
        return self.num_gpus * self.simulated.total_s / 3600


def make_plan(
    config: Config, shape: Shape, tokens: Tokens, assumed: Assumptions, *, num_workers: int, seed: int = 0
) -> Plan:
    """Plan a run. Errors: ConfigError for an engine without local weights, or for ranks that cannot share the model."""
    if config.engine.kind == "endpoint":
        raise ConfigError("engine.kind=endpoint has no local weights, so there is no run to plan; use engine.kind=vllm")
    if not shape.other_model:
        check_ranks(config.engine.tensor_parallel, shape.heads)
    needs = memory_of(config, shape, assumed)

    def playing(num_episodes: int) -> Phases:
        return phases_of(config, shape, tokens, needs.gpu, assumed, num_episodes=num_episodes)

    takes = playing(config.es.tasks_per_member)
    batch = min(config.eval.batch or config.es.tasks_per_member, max(config.eval.num_tasks, 1))
    longest = playing(max(batch, config.es.tasks_per_member))
    durations = _durations(takes, playing(batch).evaluation / takes.evaluation, assumed)
    lasts = parse(durations, population=config.es.population, seed=seed)
    simulated = simulate(
        _with_long_leases(config, longest_evaluation(longest, assumed)), lasts, num_workers=num_workers
    )
    made = Plan(
        num_workers=num_workers,
        num_up=sum(lasts.start(number, 0) < simulated.total_s for number in range(num_workers)),
        shape=shape,
        tokens=tokens,
        memory=needs,
        wire=wire_of(config, shape, tokens, num_workers=num_workers),
        phases=takes,
        compute=compute_of(config, shape, tokens, assumed),
        durations=durations,
        simulated=simulated,
        num_gpus=(num_workers * config.engine.tensor_parallel + head_has_gpu(config, assumed)) * assumed.has_gpu,
        published=published_of(config),
    )
    return replace(made, cautions=tuple(cautions_of(config, made, longest, assumed)))


def _with_long_leases(config: Config, longest: float) -> Config:
    """The configuration with leases long enough for the longest evaluation, because otherwise the simulated run would
    never end."""
    if longest <= config.transport.lease_timeout:
        return config
    transport = config.transport.model_copy(update={"lease_timeout": NO_LEASE_S})
    return config.model_copy(update={"transport": transport})


def _durations(takes: Phases, eval_factor: float, assumed: Assumptions) -> str:
    """Durations for the simulator: lognormal evaluations with the planned mean."""
    variance = math.log1p(assumed.evaluation_cv**2)
    values = {
        "median": takes.evaluation / math.exp(variance / 2),
        "sigma": math.sqrt(variance),
        "eval": eval_factor,
        "update": takes.catch_up,
        "dispatch": assumed.message_s,
        "report": assumed.message_s,
        "start": assumed.start_s,
        "head_update": takes.head_update,
        "checkpoint": takes.checkpoint,
    }
    return "lognormal:" + ",".join(f"{key}={value:.6g}" for key, value in values.items())
