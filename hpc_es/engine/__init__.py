"""Inference engines: language models whose weights are a member around theta_v, and frozen models behind endpoints."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpc_es.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from hpc_es.config.schema import EngineConfig, ModelConfig
    from hpc_es.engine.base import Engine, Generator
    from hpc_es.methods.es.optimiser import Kind

_REMEDY = {
    "vllm": "pip install 'hpc_es[gpu]' (CUDA) or 'hpc_es[cpu]', or set engine.kind: transformers",
    "transformers": "pip install 'hpc_es[worker]'",
}


async def start_engine(
    model: "ModelConfig",
    engine: "EngineConfig",
    *,
    threads: int,
    optimiser: "Kind" = "none",
    traces: bool = False,
) -> "Engine":
    """Start the engine that `engine.kind` names.

    `threads`: its share of this machine's CPU cores. `optimiser`: es.optimiser.kind of the run. `traces`: whether its
    completions contain the sampled tokens. Errors: EngineError when its package is not installed or it does not start,
    ModelError for an unusable checkpoint, ConfigError for an endpoint, which has no weights.
    """
    if engine.kind == "endpoint":
        raise ConfigError(
            f"engine.kind=endpoint: the weights behind {engine.url} are not accessible; `hpc-es eval {engine.url} "
            f"--model {model.path}` measures it"
        )
    if engine.kind == "lab":
        from hpc_es.engine.lab import LabEngine

        return await LabEngine.start(model, engine, threads=threads, optimiser=optimiser, traces=traces)
    if find_spec(engine.kind) is None:
        raise EngineError(f"engine.kind={engine.kind} is not installed here; {_REMEDY[engine.kind]}")
    if engine.kind == "vllm":
        from hpc_es.engine.vllm import VllmEngine

        return await VllmEngine.start(model, engine, threads=threads, optimiser=optimiser, traces=traces)
    from hpc_es.engine.transformers import TransformersEngine

    return await TransformersEngine.start(model, engine, threads=threads, optimiser=optimiser, traces=traces)


async def start_generator(
    model: "ModelConfig", engine: "EngineConfig", *, threads: int, optimiser: "Kind" = "none"
) -> "Generator":
    """Start the engine that `engine.kind` names, or the client of an endpoint. Errors: as `start_engine`; ConfigError
    when the package of the client is not installed."""
    if engine.kind != "endpoint":
        return await start_engine(model, engine, threads=threads, optimiser=optimiser)
    if find_spec("openai") is None:
        raise ConfigError("engine.kind=endpoint needs the package openai: pip install 'hpc_es[endpoint]'")
    from hpc_es.engine.endpoint import Endpoint

    return await Endpoint.start(model, engine)
