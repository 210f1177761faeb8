"""FLOPs and memory that a gradient method would need for the same task, for comparison with a run.

FLOPs follow from the method's updates, episodes, passes and epochs; memory is the sum of its parts. One model covers
GRPO and PPO: PPO also has a critic of the size of the policy. assumptions.py says which numbers are published, fitted
or guessed; docs/planner.md compares predictions with published rows.
"""

from dataclasses import dataclass

from hpc_es.planner.assumptions import Assumptions

FORWARD, TRAINING = 2, 6
"""FLOPs per parameter and token of a forward pass, and of a forward and backward pass."""


@dataclass(frozen=True)
class GradientCompute:
    """FLOPs of gradient methods."""

    grpo_per_update: float
    ppo_per_update: float
    num_updates: int
    grpo_gpu_hours: float | None
    """None without a GPU."""

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
    """Frozen weights of the reference policy."""
    critic: float
    """Weights, gradients and optimiser of a value model."""

    @property
    def grpo(self) -> float:
        return self.weights + self.gradients + self.optimiser + self.reference

    @property
    def ppo(self) -> float:
        return self.grpo + self.critic


def gradient_compute(one: float, assumed: Assumptions) -> GradientCompute:
    """FLOPs of rollout, extra passes and training. `one` is P L (parameters times tokens of an episode) of the ES run.
    PPO's critic adds a pass and training."""
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
    """Bytes for full fine-tuning of a model with this many parameters."""
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
