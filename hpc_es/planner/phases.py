"""Predict how long each part of an update takes, by a roofline model over the assumptions.

A pass over theta takes the longest of three times: its bytes through memory, its bytes through the host link (with
theta in host memory, both directions at once), and its noise. Each decoding step takes the longer of reading weights
and cache and of computing. Communication between tensor-parallel ranks and waiting for the last episode are not
modelled; the factor `pace` on a rollout, fitted to a measured run, covers them.
"""

from dataclasses import dataclass
from typing import Literal

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.planner.assumptions import Assumptions
from hpc_es.planner.memory import BYTES, GpuMemory, kv_bytes_per_token, num_elements
from hpc_es.planner.shape import Shape
from hpc_es.planner.tokens import Tokens

Place = Literal["device", "stream", "cores"]
"""Where a pass over theta runs: on the GPU that holds theta, streamed through the GPU from host memory, or on the
host's cores."""


@dataclass(frozen=True)
class Phases:
    """Seconds of each part of an update."""

    catch_up: float
    """A worker applies an update; at most once per version."""
    perturb: float
    """A worker writes a member into the live model."""
    prompts: float
    answers: float
    turns: float
    """Environment, tokenizer and requests of all turns."""
    member: float
    """Everything else in an evaluation."""
    head_update: float
    """The head applies an update. Workers continue meanwhile, but the next commit waits for it."""
    checkpoint: float
    base: Place
    """Where the workers keep theta."""
    head: Place
    concurrent: float
    """Number of episodes that run at the same time."""

    @property
    def rollout(self) -> float:
        return self.prompts + self.answers + self.turns

    @property
    def evaluation(self) -> float:
        """Seconds of evaluating a member: perturbation and rollout."""
        return self.perturb + self.member + self.rollout


def phases_of(
    config: Config, shape: Shape, tokens: Tokens, gpu: GpuMemory, assumed: Assumptions, *, num_episodes: int
) -> Phases:
    """Phases of an update whose evaluations play `num_episodes` each."""
    ranks = config.engine.tensor_parallel
    base: Place = "device" if gpu.base == "device" else "stream"
    if not (assumed.has_gpu and config.engine.direct_map):  # weights for load_weights are computed on the host
        base = "cores"
    head: Place = "stream" if head_has_gpu(config, assumed) else "cores"
    rollout = _rollout(config, shape, tokens, gpu, assumed, num_episodes)
    cast = BYTES[config.model.dtype] * shape.parameters
    cores = config.slurm.worker.cpus
    return Phases(
        catch_up=_update(config, shape, assumed, base, ranks=ranks, cores=cores),
        perturb=_pass(
            assumed, base, reads=4 * shape.parameters, live=cast, noise=shape.trained, ranks=ranks, cores=cores
        ),
        member=assumed.member_s,
        head_update=_update(config, shape, assumed, head, ranks=1, cores=config.slurm.head.cpus),
        checkpoint=4 * num_elements(config, shape) / (1e9 * assumed.disk_gb_per_s),
        base=base,
        head=head,
        **rollout,
    )


def head_has_gpu(config: Config, assumed: Assumptions) -> bool:
    """Whether the head's job requests a GPU and may use it."""
    asks = config.slurm.head.gres is not None or config.slurm.head.gpus_per_task is not None
    return assumed.has_gpu and (config.head.device == "cuda" or (config.head.device == "auto" and asks))


def _update(config: Config, shape: Shape, assumed: Assumptions, place: Place, *, ranks: int, cores: int) -> float:
    """Seconds to apply an update. With K subspaces, a member changes only 1/K of the parameters."""
    bytes_each_way = 4 * num_elements(config, shape)
    noise = shape.trained * config.es.population / config.es.subspaces
    return _pass(assumed, place, reads=bytes_each_way, writes=bytes_each_way, noise=noise, ranks=ranks, cores=cores)


def _pass(
    assumed: Assumptions,
    place: Place,
    *,
    reads: float,
    noise: float,
    writes: float = 0.0,
    live: float = 0.0,
    ranks: int,
    cores: int,
) -> float:
    """Seconds of one pass, in which each rank does its share.

    `reads` and `writes` are bytes of theta and state; `live` is bytes written into the model; `noise` is elements times
    members.
    """
    moved = reads + writes + live
    if place == "cores":
        return max(moved / (1e9 * assumed.host_gb_per_s), noise / (1e9 * assumed.core_noise_g_per_s * cores))
    seconds = [moved / (1e9 * assumed.memory_gb_per_s * assumed.pass_share), noise / (1e9 * assumed.noise_g_per_s)]
    if place == "stream":
        assert assumed.link_gb_per_s is not None, "streamed through a GPU"
        seconds.append(max(reads, writes) / (1e9 * assumed.link_gb_per_s * assumed.link_share))
    return max(seconds) / ranks


def _rollout(
    config: Config, shape: Shape, tokens: Tokens, gpu: GpuMemory, assumed: Assumptions, num_episodes: int
) -> dict[str, float]:
    ranks = config.engine.tensor_parallel
    flops = ranks * assumed.flops_of(config.model.dtype) * assumed.prefill_share
    bandwidth = 1e9 * assumed.memory_gb_per_s * assumed.decode_share
    context, kv = _mean_context(config, tokens), kv_bytes_per_token(config, shape) or 0.0
    concurrent = float(min(num_episodes, config.engine.max_concurrent))
    if kv and gpu.kv_cache:
        concurrent = max(min(concurrent, gpu.kv_cache / (kv * context)), 1.0)
    rounds = num_episodes / concurrent
    weights = BYTES[config.model.dtype] * min(shape.parameters, shape.active * concurrent) / ranks
    step = max((weights + concurrent * context * kv) / bandwidth, 2 * shape.active * concurrent / flops)
    return {
        "prompts": assumed.pace * 2 * shape.active * num_episodes * tokens.prompt / flops,
        "answers": assumed.pace * rounds * tokens.answer * step,
        "turns": assumed.pace * rounds * tokens.turns * assumed.turn_s,
        "concurrent": concurrent,
    }


def _mean_context(config: Config, tokens: Tokens) -> float:
    """Mean tokens in the cache while an answer is generated, with half of the answer there on average.

    If prompts contain all turns, the conversation grows evenly from turn to turn; otherwise only one turn counts.
    """
    turns = max(tokens.turns, 1.0)
    grows = envs.keeps_all_turns(config.task.env)
    total = tokens.total * (turns + 1) / 2 if grows else tokens.total
    return max(min((total - tokens.answer / 2) / turns, config.engine.max_model_len), 1.0)
