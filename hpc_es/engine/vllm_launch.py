"""Starts vLLM: its arguments, and the environment of its processes.

Invariant: every setting has one place. Arguments that belong to other settings are refused, and environment variables
are replaced.
"""

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.errors import ConfigError, EngineError
from hpc_es.params.arena import CAST, Arena
from hpc_es.params.room import gets_room, share_beside
from hpc_es.params.weights import read_config, text_config
from hpc_es.quoting import quote_error

log = logging.getLogger(__name__)

_CPU_KV_CACHE_MIB = 256


def environment(engine: EngineConfig, threads: int, scratch: Path) -> dict[str, str]:
    """Environment variables of the engine's processes. Inherited values would override the config, so all are set."""
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of this process would carry its threads' locks along
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would put two engines of one node on the same cores
        "OMP_NUM_THREADS": str(threads),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "TMPDIR": str(scratch),
        "VLLM_HOST_IP": "127.0.0.1",  # one engine never spans nodes; the right interface need not be guessed
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if not engine.enforce_eager:  # compile caches race when engines share them
        for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            variables[name] = str(scratch / name.lower())
    return variables


def arguments(
    model: ModelConfig, engine: EngineConfig, extension: str, arena: Arena, traces: bool = False
) -> dict[str, Any]:
    """The arguments of vLLM's engine. They leave room on a GPU for `arena`, if theta is kept there.

    Errors: ConfigError for a key of engine.extra that vLLM lacks or that another setting owns.
    """
    kv_cache_mib = engine.kv_cache_mib or (_CPU_KV_CACHE_MIB if current_platform.is_cpu() else None)
    ours: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "seed": 0,  # unused: every request carries its own
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_concurrent,
        "enforce_eager": engine.enforce_eager,
        "tensor_parallel_size": engine.tensor_parallel,
        "enable_prefix_caching": engine.prefix_cache,
        "worker_extension_cls": extension,
        "max_logprobs": -1,
        "disable_log_stats": True,
        "additional_config": {},
    }
    if kv_cache_mib is not None:
        ours["kv_cache_memory_bytes"] = kv_cache_mib * 2**20
    if traces:  # by default, vLLM's log-probabilities are those of the model, before temperature, top-k and top-p
        ours["logprobs_mode"] = "processed_logprobs"
    if engine.block_size is not None:
        ours["block_size"] = engine.block_size
    if current_platform.is_cpu():
        if has_gated_delta_nets(read_config(Path(model.path))):
            _fit_gated_delta_nets(model, ours)
        # A prompt that is computed in two steps makes vLLM rewind its request's generator, which a CPU's cannot: the
        # engine dies. Unsplit prompts also keep an answer independent of how many prompts came at once.
        ours["enable_chunked_prefill"] = False
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in engine.extra:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"engine.extra.{key} is not an argument of vLLM {vllm.__version__}{hint}")
        if key in ours:
            raise ConfigError(f"engine.extra.{key} is set by other settings of `engine` and `model`; change it there")
    if kv_cache_mib is None and (share := _gpu_share(model, engine, arena)) is not None:
        ours["gpu_memory_utilization"] = share
    return ours | engine.extra


def has_gated_delta_nets(described: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model with linear attention as in Qwen3-Next and Qwen3.5."""
    return "linear_key_head_dim" in (text_config(dict(described)) or described)


def _fit_gated_delta_nets(model: ModelConfig, ours: dict[str, Any]) -> None:
    """Change arguments to what vLLM's CPU backend can do. Errors: ConfigError for model.dtype."""
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={model.dtype}: vLLM's CPU backend computes the linear attention of this model in bfloat16 "
            "alone; set model.dtype=bfloat16, or engine.kind=transformers for other types"
        )
    if ours["enable_prefix_caching"]:
        log.warning("no prefixes are cached: vLLM's CPU backend cannot for linear attention while prompts are unsplit")
        ours["enable_prefix_caching"] = False


def _gpu_share(model: ModelConfig, engine: EngineConfig, arena: Arena) -> float | None:
    """Share of a GPU's memory for vLLM; None: vLLM's default."""
    theta, weights = arena.num_bytes, arena.num_parameters * CAST[model.dtype].itemsize
    memory = current_platform.get_device_total_memory() * engine.tensor_parallel
    if not engine.direct_map or not gets_room(engine.base, theta, weights, memory):
        return None
    return share_beside(theta, AsyncEngineArgs.gpu_memory_utilization, memory)


def launch(arguments: dict[str, Any], environment: dict[str, str]) -> AsyncLLM:
    try:
        with _inherited(environment):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except Exception as error:  # configuration, memory, a worker that died: vLLM has no common base for them
        hint = ""
        if "failed to be inspected" in str(error) and find_spec("torchvision") is None:
            hint = (
                ". Qwen3.5 and most models that see images need torchvision, which is missing: docs/model-families.md"
            )
        raise EngineError(f"vLLM did not start: {quote_error(error)}. Its log above has the cause{hint}") from error


@contextmanager
def _inherited(environment: dict[str, str]) -> Iterator[None]:
    """Set variables for processes that start inside, and restore this process's own variables afterwards."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
