"""Inference engines: language models whose weights are a member around theta_v. `start_engine` picks one."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpc_es.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from hpc_es.config.schema import EngineConfig, ModelConfig
    from hpc_es.engine.base import Engine
    from hpc_es.methods.es.optimiser import Kind

_REMEDY = {
    "vllm": "pip install 'hpc_es[gpu]' (CUDA) or 'hpc_es[cpu]', or set engine.kind: transformers",
    "transformers": "pip install 'hpc_es[worker]'",
}


async def start_engine(
    model: "ModelConfig", engine: "EngineConfig", *, threads: int, optimiser: "Kind" = "none"
) -> "Engine":
    """Start the engine that `engine.kind` names; `threads` is its share of this machine's CPU cores,
    `optimiser` the es.optimiser.kind of the run.

    Errors: EngineError when its package is not installed or it does not start, ModelError for an unusable checkpoint,
    ConfigError where the package of an endpoint's client is missing.
    """
    if engine.kind == "endpoint":
        if find_spec("openai") is None:
            raise ConfigError("engine.kind=endpoint needs the package openai: pip install 'hpc_es[endpoint]'")
        from hpc_es.engine.endpoint import EndpointEngine

        return await EndpointEngine.start(model, engine, threads=threads, optimiser=optimiser)
    if engine.kind == "lab":
        from hpc_es.engine.lab import LabEngine

        return await LabEngine.start(model, engine, threads=threads, optimiser=optimiser)
    if find_spec(engine.kind) is None:
        raise EngineError(f"engine.kind={engine.kind} is not installed here; {_REMEDY[engine.kind]}")
    if engine.kind == "vllm":
        from hpc_es.engine.vllm import VllmEngine

        return await VllmEngine.start(model, engine, threads=threads, optimiser=optimiser)
    from hpc_es.engine.transformers import TransformersEngine

    return await TransformersEngine.start(model, engine, threads=threads, optimiser=optimiser)
