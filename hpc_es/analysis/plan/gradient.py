"""What a gradient method would take for the same task, as something to hold a run against.

FLOPs follow from its own updates, episodes, passes and epochs; memory from its parts. One model serves GRPO and PPO:
PPO has a critic besides, as large as the policy. Which of the numbers behind it are published, fitted or guessed is
said in assumptions.py; how far predictions are from published rows is in docs/planner.md.
"""

from dataclasses import dataclass

from hpc_es.analysis.plan.assumptions import Assumptions

FORWARD, TRAINING = 2, 6
"""FLOPs per parameter and token: of a pass forwards, and of one forwards and backwards."""


@dataclass(frozen=True)
class GradientCompute:
    """FLOPs, where an episode of the run it is held against takes `one` = P L per pass and FLOP."""

    grpo_per_update: float
    ppo_per_update: float
    num_updates: int
    grpo_gpu_hours: float | None
    """None where there is no GPU."""

    @property
    def grpo_in_all(self) -> float:
        return self.num_updates * self.grpo_per_update

    @property
    def ppo_in_all(self) -> float:
        return self.num_updates * self.ppo_per_update


@dataclass(frozen=True)
class GradientMemory:
    """Bytes over all GPUs, without activations and without an engine for rollouts."""

    weights: float
    gradients: float
    optimiser: float
    reference: float
    """Frozen weights that the policy is kept near."""
    critic: float
    """Weights, gradients and optimiser of a value model."""

    @property
    def grpo(self) -> float:
        return self.weights + self.gradients + self.optimiser + self.reference

    @property
    def ppo(self) -> float:
        return self.grpo + self.critic


def gradient_compute(one: float, assumed: Assumptions) -> GradientCompute:
    """`one`: P L of the run. Rollout, extra passes and training for each episode; a critic values and learns too."""
    episodes = assumed.grpo_episodes * assumed.grpo_length * one
    learning = TRAINING * assumed.grpo_epochs
    grpo = episodes * (FORWARD + FORWARD * assumed.grpo_extra_passes + learning)
    rate = 1e12 * assumed.bf16_tflops * assumed.training_share
    return GradientCompute(
        grpo_per_update=grpo,
        ppo_per_update=grpo + episodes * (FORWARD + learning),
        num_updates=assumed.grpo_updates,
        grpo_gpu_hours=assumed.grpo_updates * grpo / rate / 3600 if assumed.has_gpu else None,
    )


def gradient_memory(parameters: float, assumed: Assumptions) -> GradientMemory:
    weights, gradients, optimiser = (
        size * parameters for size in (assumed.weight_bytes, assumed.gradient_bytes, assumed.optimiser_bytes)
    )
    return GradientMemory(
        weights=weights,
        gradients=gradients,
        optimiser=optimiser,
        reference=weights,
        critic=weights + gradients + optimiser,
    )
