"""Which workers may join a run: a worker that could change its bits is refused, with the reason."""

from hpc_es.config.schema import Config
from hpc_es.noise.reference import TABLE_CRC32
from hpc_es.transport import messages

NOISE_TABLE = f"{TABLE_CRC32:08x}"


def refusal(hello: messages.Hello, config: Config, *, base_digest: int, config_digest: str) -> str | None:
    """Why this worker must not join the run; None if it may."""
    if hello.protocol != messages.PROTOCOL:
        return f"it uses protocol {hello.protocol}, the head {messages.PROTOCOL}: install the same hpc_es everywhere"
    if hello.base_digest != base_digest:
        return (
            f"its base model has digest {hello.base_digest:016x}, the run's {base_digest:016x}: "
            f"{config.model.path} is not the same checkpoint everywhere"
        )
    if config.transport.backend == "nccl" and hello.collective != "nccl":
        return f"transport.backend=nccl needs CUDA at every worker; it supports {hello.collective}: use auto or gloo"
    ours = {"config": config_digest, "noise table": NOISE_TABLE}
    for key, value in ours.items():
        if hello.facts.get(key, value) != value:
            return f"its {key} is {hello.facts[key]}, the head's is {value}: both must use the same run folder"
    return None
