"""What a plan takes for granted: the numbers of a GPU, and what a run reaches of them.

Every number has its unit in its name, a source or a reason, and can be set: by name (`--gpu h100`), from a YAML file
of one's own (`--gpu FILE`, which may begin with `gpu: h100`), and one by one (`--set prefill_share=0.3`).
Invariant: nothing in a plan rests on a constant that is not in here, and a plan shows them all.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from hpc_es.config import yaml12
from hpc_es.config.fields import Model
from hpc_es.errors import ConfigError

_HOPPER = {"bf16_tflops": 989, "fp32_tflops": 67, "link_gb_per_s": 64}
_AMPERE = {"bf16_tflops": 312, "fp32_tflops": 19.5, "link_gb_per_s": 32}
GPUS: dict[str, dict[str, float]] = {
    "h100": {"memory_gib": 79, "memory_gb_per_s": 3350, **_HOPPER},
    "h200": {"memory_gib": 139, "memory_gb_per_s": 4800, **_HOPPER},
    "b200": {
        "memory_gib": 178,
        "memory_gb_per_s": 8000,
        "bf16_tflops": 2250,
        "fp32_tflops": 75,
        "link_gb_per_s": 64,
    },
    "a100-80": {"memory_gib": 79, "memory_gb_per_s": 2039, **_AMPERE},
    "a100-40": {"memory_gib": 39, "memory_gb_per_s": 1555, **_AMPERE},
    "l40s": {"memory_gib": 44, "memory_gb_per_s": 864, "bf16_tflops": 362, "fp32_tflops": 91.6, "link_gb_per_s": 32},
    "a10": {"memory_gib": 22, "memory_gb_per_s": 600, "bf16_tflops": 125, "fp32_tflops": 31.2, "link_gb_per_s": 32},
}
"""NVIDIA's data sheets: the SXM models where there are several, dense (not sparse) tensor cores, float32 without them,
PCIe in one direction. Memory is what CUDA shows, rounded down: less than on the sheet."""


class Assumptions(Model):
    """Units are in the names: GB and TFLOPS are powers of ten, GiB and MiB of two."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    memory_gib: float = Field(gt=0)
    """Memory of a GPU or, where there is none, of the machine."""
    memory_gb_per_s: float = Field(gt=0)
    """Its bandwidth."""
    bf16_tflops: float = Field(gt=0)
    """Dense, also for float16."""
    fp32_tflops: float = Field(gt=0)
    """Without tensor cores."""
    link_gb_per_s: float | None = Field(gt=0)
    """Between host and GPU, each way. null: there is no GPU, the engine computes on the host's cores."""

    prefill_share: float = Field(0.4, gt=0, le=1)
    """Of the TFLOPS, in prompts and in decoding that is bound by them; a guess."""
    decode_share: float = Field(0.6, gt=0, le=1)
    """Of the memory's bandwidth, in decoding; a guess."""
    pass_share: float = Field(0.7, gt=0, le=1)
    """Of the memory's bandwidth, in passes over theta; the aim for the kernels, not measured on a GPU."""
    link_share: float = Field(0.8, gt=0, le=1)
    """Of the link, from pinned memory; a guess."""
    noise_g_per_s: float = Field(150, gt=0)
    """10^9 elements x members that a GPU's update adds in a second; the aim for the kernels, not measured."""
    core_noise_g_per_s: float = Field(1.1, gt=0)
    """The same of a CPU core; measured with AVX-512 (README, update of 16 members), half of it without."""
    host_gb_per_s: float = Field(100, gt=0)
    """Memory bandwidth of a node, for passes on its cores."""
    network_gbit_per_s: float = Field(100, gt=0)
    """Between two nodes."""
    disk_gb_per_s: float = Field(1, gt=0)
    """Writing and reading checkpoints on the shared file system."""

    engine_share: float = Field(0.92, gt=0, le=1)
    """Of the GPU's memory that vLLM takes; engine.extra.gpu_memory_utilization wins."""
    reserve_gib: float = Field(4, ge=0)
    """Of a rank, on the GPU: CUDA's context, activations, CUDA graphs, NCCL; a guess."""
    staging_mib: float = Field(256, ge=0)
    """Of a rank, on the GPU: the bound on buffers that members are written through."""
    spare_gib: float = Field(1, ge=0)
    """Of a rank, on the GPU: what a base on the device leaves free (params/device.py)."""
    process_gib: float = Field(3, ge=0)
    """Host memory of one process of an engine, or of the head, without arenas; a guess."""

    turn_s: float = Field(0.05, ge=0)
    """Of an episode's turn beside the model: environment, tokeniser, request; a guess."""
    member_s: float = Field(0.2, ge=0)
    """Of an evaluation beside weights and tokens: calls to the engine, prefix cache reset; a guess."""
    message_s: float = Field(0.01, ge=0)
    """An assignment or a result under way, the head's fsync included."""
    start_s: float = Field(120, ge=0)
    """Mean until a worker is connected, from the start of its job; a guess."""
    evaluation_cv: float = Field(0.3, ge=0, le=5)
    """Standard deviation of an evaluation's seconds over their mean (lognormal)."""
    answer_share: float = Field(0.25, gt=0, le=1)
    """Of an episode's tokens that are answers, where nothing says how many."""

    grpo_update: float = Field(2560, gt=0)
    """FLOPs of one GRPO update, in P x L: what the ratios of Hoy et al. (2026) come to."""
    grpo_updates: float = Field(100, gt=0)
    """Updates of the GRPO run (Hoy et al., 2026)."""
    training_bytes: float = Field(16, gt=0)
    """Per parameter in full fine-tuning: bf16 weights and gradients, float32 weights, Adam's m and v
    (Rajbhandari et al., 2020)."""

    @property
    def has_gpu(self) -> bool:
        return self.link_gb_per_s is not None

    def flops_of(self, dtype: str) -> float:
        """Per second, at most."""
        return 1e12 * (self.fp32_tflops if dtype == "float32" else self.bf16_tflops)


def assume(gpu: str, changes: Sequence[str] = ()) -> Assumptions:
    """The numbers of a GPU by name, or of a YAML file; then `key=value` changes. Errors: ConfigError."""
    origin = f"--gpu {gpu}"
    values: dict[str, Any] = dict(_read(Path(gpu)) if gpu.endswith((".yaml", ".yml")) else _named(gpu, origin))
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: must be KEY=VALUE, e.g. prefill_share=0.3")
        values[key.strip()] = yaml12.plain(yaml12.parse(text, f"--set {key}"))
    try:
        return Assumptions.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explained(error.errors(), origin))) from None


def _named(name: str, origin: str) -> Mapping[str, Any]:
    if name in GPUS:
        return GPUS[name]
    close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"{origin} is unknown: {hint}known: {', '.join(GPUS)}; or name a YAML file with its numbers")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml12.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--gpu {path}: cannot be read: {error}") from None
    values = yaml12.plain(tree)
    if not isinstance(values, dict):
        raise ConfigError(f"--gpu {path}: must be a mapping, e.g. gpu: h100 and prefill_share: 0.3")
    base = values.pop("gpu", None)
    return values if base is None else {**_named(str(base), f"gpu: {base} in {path}"), **values}


def _explained(faults: Sequence[Any], origin: str) -> Iterator[str]:
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]:
        yield f"{origin} misses {', '.join(missing)}: give them there, or with --set {missing[0]}=VALUE"
    for fault in faults:
        key = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, Assumptions.model_fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(Assumptions.model_fields)}"
            yield f"{key} is no assumption of a plan: {hint}"
        elif fault["type"] != "missing":
            yield f"{key}={fault['input']}: {fault['msg']}"
