"""Check whether a run fits into GPU memory, host memory and disk space, and find settings that make it fit.

Invariant: the parts of a Memory sum to its total, and every remedy is an override whose plan was checked to fit.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_es.config import yaml12
from hpc_es.config.schema import Config
from hpc_es.errors import ConfigError
from hpc_es.methods.es import optimiser as optimisers
from hpc_es.params.heads import possible_ranks
from hpc_es.params.room import gets_room, share_beside
from hpc_es.planner.assumptions import Assumptions
from hpc_es.planner.gradient import GradientMemory, gradient_memory
from hpc_es.planner.shape import Shape

GIB, MIB = 2.0**30, 2.0**20
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BASES: tuple[Literal["host"], Literal["device"]] = ("host", "device")
CPU_CACHE_MIB = 256
"""Default KV cache of the engine on a CPU."""
MIN_CACHE_MIB = 16
"""Smallest allowed engine.kv_cache_mib."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of GPU memory of one tensor-parallel rank; host memory if the engine runs on the host."""

    weights: float
    theta: float
    """theta in float32 with the optimiser's state, if it is kept on the device."""
    staging: float
    """Staging buffers for members; with theta on the device, the memory that the base leaves free."""
    reserve: float
    kv_cache: float
    """engine.kv_cache_mib, or the rest of vLLM's share of the memory."""
    available: float
    base: Literal["host", "device"]
    """Where theta is kept, from which members are written."""
    sequences: float | None
    """Number of sequences of full length that the cache holds at once; None if the size of a token is unknown."""
    sequences_wanted: int
    """Number of episodes that an evaluation plays at the same time."""

    @property
    def fixed(self) -> float:
        """Bytes of everything but the KV cache."""
        return self.weights + self.theta + self.staging + self.reserve

    @property
    def total(self) -> float:
        return self.fixed + self.kv_cache

    @property
    def fits(self) -> bool:
        """Whether everything fits, with at least one sequence of full length."""
        return self.total <= self.available and self.kv_cache > 0 and (self.sequences is None or self.sequences >= 1)

    @property
    def is_ample(self) -> bool:
        """Whether no episode waits for room in the cache, even if all reach full length."""
        return self.fits and (self.sequences is None or self.sequences >= self.sequences_wanted)


@dataclass(frozen=True)
class Memory:
    """Memory and disk space of a run, in bytes."""

    gpu: GpuMemory
    arena: float
    """theta in float32 and the optimiser's state; one in the head's job and one in each worker's job."""
    head_job: float
    worker_job: float
    """Host memory of one worker's job: its arena, which its ranks share, and its processes."""
    checkpoints: float
    """Disk space of the newest checkpoint.keep checkpoints, and of one that is being written."""
    gradient: GradientMemory
    """Memory of gradient methods for full fine-tuning."""
    remedies: tuple[str, ...]
    """Overrides that give every sequence room, or at least make the run fit; each is enough by itself, as one setting
    or a pair. Empty if every sequence has room, or if no override helps."""
    to_device: str | None
    """Override that keeps theta on the device; None if theta is there already or cannot be."""


def memory_of(config: Config, shape: Shape, assumed: Assumptions) -> Memory:
    gpu = gpu_memory(config, shape, assumed)
    arena = 4 * num_elements(config, shape)
    process = assumed.process_gib * GIB
    processes = (2 + config.engine.tensor_parallel) * process if config.engine.kind == "vllm" else process
    in_host = 0.0 if assumed.has_gpu else config.engine.tensor_parallel * gpu.total
    return Memory(
        gpu=gpu,
        arena=arena,
        head_job=arena + process,
        worker_job=arena + processes + in_host,
        checkpoints=(config.checkpoint.keep + 1) * arena,
        gradient=gradient_memory(shape.parameters, assumed),
        remedies=() if gpu.is_ample else _remedies(config, shape, assumed, gpu),
        to_device=_to_device(config, shape, assumed, gpu),
    )


def num_elements(config: Config, shape: Shape) -> float:
    """Number of elements of theta and of the optimiser's state."""
    return shape.parameters + shape.trained * len(optimisers.STATE[config.es.optimiser.kind])


def kv_bytes_per_token(config: Config, shape: Shape) -> float | None:
    """Bytes of the KV cache per token and rank. Heads are split over ranks; with more ranks than heads, they are
    copied."""
    if shape.kv_elements is None or shape.kv_heads is None:
        return None
    return BYTES[config.model.dtype] * shape.kv_elements / min(config.engine.tensor_parallel, shape.kv_heads)


def gpu_memory(config: Config, shape: Shape, assumed: Assumptions) -> GpuMemory:
    """GPU memory of a run. engine.base=auto keeps theta on the device if room is set aside for it (params/room.py) or
    is left over."""
    host, device = (_with_base(config, shape, assumed, base) for base in BASES)
    if not assumed.has_gpu or not config.engine.direct_map or config.engine.base == "host":
        return host
    return device if config.engine.base == "device" or device.total <= device.available else host


def _with_base(config: Config, shape: Shape, assumed: Assumptions, base: Literal["host", "device"]) -> GpuMemory:
    engine, available = config.engine, assumed.memory_gib * GIB
    weights = BYTES[config.model.dtype] * shape.parameters / engine.tensor_parallel
    theta = 4 * num_elements(config, shape) / engine.tensor_parallel if base == "device" else 0.0
    if assumed.has_gpu:
        staging = assumed.spare_gib * GIB if base == "device" else assumed.staging_mib * MIB
        reserve = assumed.reserve_gib * GIB
        share = _engine_share(config, assumed)
        if "gpu_memory_utilization" not in engine.extra and gets_room(engine.base, theta, weights, available) and theta:
            share = share_beside(theta, share, available)
        found = max(share * available - weights - reserve, 0.0)
    else:
        staging, reserve, found = 0.0, 0.0, CPU_CACHE_MIB * MIB
    cache = engine.kv_cache_mib * MIB if engine.kv_cache_mib else found
    token = kv_bytes_per_token(config, shape)
    return GpuMemory(
        weights=weights,
        theta=theta,
        staging=staging,
        reserve=reserve,
        kv_cache=cache,
        available=available,
        base=base,
        sequences=cache / (token * engine.max_model_len) if token else None,
        sequences_wanted=min(engine.max_concurrent, max(config.es.tasks_per_member, config.eval.batch or 1)),
    )


def _engine_share(config: Config, assumed: Assumptions) -> float:
    """Share of the GPU's memory that the engine takes. Errors: ConfigError."""
    given = config.engine.extra.get("gpu_memory_utilization", assumed.engine_share)
    if not isinstance(given, int | float) or not 0 < given <= 1:
        raise ConfigError(f"engine.extra.gpu_memory_utilization={given} must be a share above 0, at most 1")
    return given


def _remedies(config: Config, shape: Shape, assumed: Assumptions, now: GpuMemory) -> tuple[str, ...]:
    single = list(_changes(config, shape, now))
    for changes in (single, [" ".join(pair) for pair in itertools.combinations(single, 2) if _differ(*pair)]):
        tried = [(text, gpu_memory(_with(config, text), shape, assumed)) for text in changes]
        ample = [text for text, memory in tried if memory.is_ample]
        if found := ample or ([] if now.fits else [text for text, memory in tried if memory.fits]):
            return tuple(_one_of_each_kind(found))
    return ()


def _changes(config: Config, shape: Shape, now: GpuMemory) -> Iterator[str]:
    """Overrides that may help, the cheapest first."""
    engine = config.engine
    if now.base == "device":
        yield "engine.base=host"
    if size := _cache_mib(now):
        yield f"engine.kv_cache_mib={size}"
    if now.sequences and 1 <= (fewer := int(now.sequences)) < engine.max_concurrent:
        yield f"engine.max_concurrent={fewer}"
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    for ranks in possible_ranks(shape.heads, shape.kv_heads):
        if engine.kind == "vllm" and ranks > engine.tensor_parallel:
            yield f"engine.tensor_parallel={ranks}"


def _to_device(config: Config, shape: Shape, assumed: Assumptions, now: GpuMemory) -> str | None:
    if now.base == "device" or config.engine.base == "host" or not (assumed.has_gpu and config.engine.direct_map):
        return None
    size = _cache_mib(_with_base(config, shape, assumed, "device"))
    if size is None:
        return None
    change = f"engine.kv_cache_mib={size}"
    changed = gpu_memory(_with(config, change), shape, assumed)
    better = changed.base == "device" and changed.fits and (changed.is_ample or not now.is_ample)
    return change if better else None


def _cache_mib(memory: GpuMemory) -> int | None:
    """A KV cache in MiB for all sequences or, if there is not enough memory, for as many as fit."""
    room = int((memory.available - memory.fixed) // MIB)
    if memory.sequences:
        room = min(room, math.ceil(memory.sequences_wanted * memory.kv_cache / memory.sequences / MIB))
    return room if room >= MIN_CACHE_MIB else None


def _with(config: Config, overrides: str) -> Config:
    for override in overrides.split():
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        part = getattr(config, section).model_copy(update={name: yaml12.scalar(value)})
        config = config.model_copy(update={section: part})
    return config


def _keys(overrides: str) -> tuple[str, ...]:
    return tuple(override.partition("=")[0] for override in overrides.split())


def _differ(one: str, other: str) -> bool:
    return _keys(one) != _keys(other)


def _one_of_each_kind(found: Sequence[str]) -> Iterator[str]:
    """The first override of those with the same keys: two ranks, even if four would help too."""
    seen = set[tuple[str, ...]]()
    for text in found:
        if (keys := _keys(text)) not in seen:
            seen.add(keys)
            yield text
