"""Assumptions of a plan: the specifications of a GPU, and the share of them that a run reaches.

Every number has its unit in its name and a source or a reason. Choose all numbers by GPU name (`--gpu h100`) or from
your own YAML file (`--gpu FILE`, which may begin with `gpu: h100`), or set single ones (`--set prefill_share=0.3`).
Invariant: a plan uses only constants from this module, and shows each with its basis: a data sheet, a measurement, a
fit to published numbers (docs/planner.md), or a guess.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

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
"""Numbers from NVIDIA's data sheets: SXM models if there are several, dense (not sparse) tensor cores, float32 without
tensor cores, PCIe in one direction. Memory is what CUDA reports, rounded down, which is less than on the data sheet."""


class Basis(StrEnum):
    """Basis of a number in a plan."""

    prediction = "prediction"
    """Follows from the configuration and the assumptions."""
    fit = "fit"
    """Chosen so that a prediction matches a published number."""
    published = "published"
    """Taken from a paper, a data sheet or a manual."""
    measured = "measured"
    """Measured in this project, on the named machine."""
    guess = "guess"
    """Used where nothing better is known; includes performance targets."""
    given = "given"
    """Set by the user."""


class Assumptions(Model):
    """The assumptions of a plan. Units are in the names: GB and TFLOPS are powers of ten, GiB and MiB powers of two."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    memory_gib: Annotated[float, Basis.published] = Field(gt=0)
    """Memory of a GPU or, without a GPU, of the machine."""
    memory_gb_per_s: Annotated[float, Basis.published] = Field(gt=0)
    """Bandwidth of that memory."""
    bf16_tflops: Annotated[float, Basis.published] = Field(gt=0)
    """Dense TFLOPS in bfloat16 and float16."""
    fp32_tflops: Annotated[float, Basis.published] = Field(gt=0)
    """TFLOPS in float32 without tensor cores."""
    link_gb_per_s: Annotated[float | None, Basis.published] = Field(gt=0)
    """Bandwidth between host and GPU in each direction; null without a GPU, when the engine runs on the host's
    cores."""

    prefill_share: Annotated[float, Basis.guess] = Field(0.4, gt=0, le=1)
    """Share of the TFLOPS reached in prefill and in compute-bound decoding."""
    decode_share: Annotated[float, Basis.guess] = Field(0.6, gt=0, le=1)
    """Share of the memory bandwidth reached in decoding."""
    pace: Annotated[float, Basis.fit] = Field(1.9, gt=0)
    """Factor on the seconds of a rollout computed from prefill_share, decode_share and turn_s; fitted to 3.1 h of
    Sudoku with H* 5 on four H100 (Zheng et al., 2026). That run used other code, so prefer your own measurement."""
    pass_share: Annotated[float, Basis.guess] = Field(0.7, gt=0, le=1)
    """Share of the memory bandwidth reached in passes over theta; the target of the kernels, not measured on a GPU."""
    link_share: Annotated[float, Basis.guess] = Field(0.8, gt=0, le=1)
    """Share of the link's bandwidth reached from pinned memory."""
    noise_g_per_s: Annotated[float, Basis.guess] = Field(150, gt=0)
    """Noise added by an update on a GPU, in 10^9 elements x members per second; the target of the kernels, not
    measured."""
    core_noise_g_per_s: Annotated[float, Basis.measured] = Field(1.1, gt=0)
    """The same for one CPU core with AVX-512 (docs/measurements.md, update of 16 members); half as much without."""
    host_gb_per_s: Annotated[float, Basis.guess] = Field(100, gt=0)
    """Memory bandwidth of a node, for passes over theta on its cores."""
    network_gbit_per_s: Annotated[float, Basis.guess] = Field(100, gt=0)
    """Bandwidth between two nodes."""
    disk_gb_per_s: Annotated[float, Basis.guess] = Field(1, gt=0)
    """Bandwidth of reading and writing checkpoints on the shared file system."""

    engine_share: Annotated[float, Basis.published] = Field(0.92, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes by default; engine.extra.gpu_memory_utilization overrides it."""
    reserve_gib: Annotated[float, Basis.guess] = Field(4, ge=0)
    """GPU memory per rank for CUDA's context, activations, CUDA graphs and NCCL."""
    staging_mib: Annotated[float, Basis.guess] = Field(256, ge=0)
    """GPU memory per rank for staging buffers; their upper bound."""
    spare_gib: Annotated[float, Basis.guess] = Field(1, ge=0)
    """GPU memory per rank that stays free if theta is kept on the device (params/device.py)."""
    process_gib: Annotated[float, Basis.guess] = Field(3, ge=0)
    """Host memory of one process of an engine or of the head, without arenas."""

    turn_s: Annotated[float, Basis.guess] = Field(0.05, ge=0)
    """Seconds per turn of an episode outside the model: environment, tokenizer, request."""
    member_s: Annotated[float, Basis.guess] = Field(0.2, ge=0)
    """Seconds per evaluation besides writing weights and generating tokens: calls to the engine, prefix cache reset."""
    message_s: Annotated[float, Basis.guess] = Field(0.01, ge=0)
    """Seconds to deliver an assignment or a result, including the head's fsync."""
    start_s: Annotated[float, Basis.guess] = Field(120, ge=0)
    """Mean seconds from the start of a worker's job until it is connected."""
    evaluation_cv: Annotated[float, Basis.guess] = Field(0.3, ge=0, le=5)
    """Coefficient of variation of an evaluation's duration (lognormal): standard deviation divided by mean."""
    answer_share: Annotated[float, Basis.guess] = Field(0.25, gt=0, le=1)
    """Share of an episode's tokens that are answer tokens, if their number is not given."""

    grpo_updates: Annotated[int, Basis.published] = Field(100, gt=0)
    """Number of updates of the gradient method that the run is compared with (Hoy et al., 2026)."""
    grpo_episodes: Annotated[int, Basis.fit] = Field(256, gt=0)
    """Episodes per update of a gradient method. With one extra pass and one epoch this gives 2,560 P L, which matches
    the published ratios 0.20, 0.75 and 2.34 (Hoy et al., 2026)."""
    grpo_extra_passes: Annotated[int, Basis.fit] = Field(1, ge=0)
    """Forward passes over finished episodes besides training, for old log-probabilities or a reference; fitted together
    with grpo_episodes."""
    grpo_epochs: Annotated[int, Basis.fit] = Field(1, gt=0)
    """Number of times that a gradient method trains on each episode; fitted together with grpo_episodes."""
    grpo_length: Annotated[float, Basis.guess] = Field(1, gt=0)
    """Tokens per episode of the gradient method, divided by L; the published GRPO rows of Sudoku would need 0.83, 0.98
    and 0.94."""
    training_share: Annotated[float, Basis.fit] = Field(0.042, gt=0, le=1)
    """Share of the TFLOPS reached over a whole GRPO run; fitted to 3.2 EFLOPs in 5.4 h on four H100, Sudoku with H* 5
    (Zheng et al., 2026)."""
    weight_bytes: Annotated[float, Basis.fit] = Field(2, gt=0)
    """Bytes per parameter of a model in training and of its frozen reference. With gradient_bytes and optimiser_bytes,
    GRPO needs 14, the published 7.00 times the weights (Zheng et al., 2026)."""
    gradient_bytes: Annotated[float, Basis.fit] = Field(2, ge=0)
    """Bytes of gradients per trained parameter; fitted together with weight_bytes."""
    optimiser_bytes: Annotated[float, Basis.fit] = Field(8, ge=0)
    """Bytes of Adam's m and v in float32 per trained parameter; fitted together with weight_bytes."""

    _given: frozenset[str] = PrivateAttr(frozenset())

    def basis(self, name: str) -> Basis:
        """The basis of one assumption."""
        stated = next(each for each in type(self).model_fields[name].metadata if isinstance(each, Basis))
        return Basis.given if name in self._given else stated

    @property
    def has_gpu(self) -> bool:
        return self.link_gb_per_s is not None

    def flops_of(self, dtype: str) -> float:
        """Peak FLOPs per second in a dtype."""
        return 1e12 * (self.fp32_tflops if dtype == "float32" else self.bf16_tflops)


def assume(gpu: str, changes: Sequence[str] = ()) -> Assumptions:
    """The assumptions for a GPU name or a YAML file, with `key=value` changes applied. Errors: ConfigError."""
    origin = f"--gpu {gpu}"
    is_file = gpu.endswith((".yaml", ".yml"))
    given = _read(Path(gpu)) if is_file else {"gpu": gpu}
    base = given.pop("gpu", None)
    sheet = {} if base is None else _named(str(base), f"gpu: {base} in {gpu}" if is_file else origin)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: must be KEY=VALUE, e.g. prefill_share=0.3")
        given[key.strip()] = yaml12.plain(yaml12.parse(text, f"--set {key}"))
    try:
        assumed = Assumptions.model_validate({**sheet, **given})
    except ValidationError as error:
        raise ConfigError("; ".join(_explained(error.errors(), origin))) from None
    assumed._given = frozenset(given)
    return assumed


def _named(name: str, origin: str) -> Mapping[str, Any]:
    if name in GPUS:
        return GPUS[name]
    close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"{origin} is unknown: {hint}known: {', '.join(GPUS)}; or name a YAML file with its numbers")


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml12.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--gpu {path}: cannot be read: {error}") from None
    values = yaml12.plain(tree)
    if not isinstance(values, dict):
        raise ConfigError(f"--gpu {path}: must be a mapping, e.g. gpu: h100 and prefill_share: 0.3")
    return values


def _explained(faults: Sequence[Any], origin: str) -> Iterator[str]:
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]:
        yield f"{origin} lacks {', '.join(missing)}: add them there, or use --set {missing[0]}=VALUE"
    for fault in faults:
        key = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, Assumptions.model_fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(Assumptions.model_fields)}"
            yield f"{key} is not an assumption of a plan: {hint}"
        elif fault["type"] != "missing":
            yield f"{key}={fault['input']}: {fault['msg']}"
