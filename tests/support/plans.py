"""Inputs of the planner's tests: models given only by numbers, an episode, and GPUs by name."""

from typing import Any

from repository import CONFIGS
from theatre import make_config

from hpc_es.config import Config, load
from hpc_es.planner import Plan, Shape, Tokens, assume, make_plan
from hpc_es.planner.assumptions import Assumptions

H100 = assume("h100")
EPISODE = Tokens(3000, 600, 15, "given")
QWEN_4B, QWEN_27B = 4.515e9, 27.78e9
"""Parameters whose bf16 weights take the published GiB: computed from these, not published."""


def of(parameters: float, **changes: Any) -> Shape:
    """A model given by numbers, with the KV cache of Qwen3-4B."""
    known = {"trained": parameters, "active": parameters, "kv_elements": 2 * 36 * 8 * 128, "kv_heads": 8}
    return Shape(**{"parameters": parameters, "source": "given", **known, **changes})


def config_of(**sections: dict[str, Any]) -> Config:
    eval_, checkpoint = {"num_tasks": 0}, {"every": 1000}
    return make_config(**{"eval": eval_, "checkpoint": checkpoint, **sections})


def preset(name: str) -> Config:
    """A fragment of configs/ together with the required settings."""
    return load(CONFIGS / "quickstart.yaml", [str(CONFIGS / name), "engine.max_model_len=4096"]).config


def planned(config: Config, shape: Shape, *, workers: int = 2, assumed: Assumptions = H100) -> Plan:
    return make_plan(config, shape, EPISODE, assumed, num_workers=workers)
