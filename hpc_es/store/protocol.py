"""By what a policy was measured: which tasks, and how its answers were drawn.

Invariant: two evaluations have the same digest exactly when one configuration cannot be told from the other by what an
episode on an evaluation task may see: environment and options, prompt, decoding, and room for prompt and answer. How
many tasks were played, how often, and by which engine does not count; nor does what changes no bit of a result.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpc_es.config import from_record
from hpc_es.errors import ConfigError

_ROOM = 2048
"""engine.max_model_len, where a record does not say."""
_DEFAULTS = {"top_p": 1.0, "top_k": 0, "presence_penalty": 0.0, "max_tokens": 64, "stop": [], "choice_score": "mean"}


@dataclass(frozen=True)
class EvalProtocol:
    label: str
    """For people: `sudoku blanks=10, T=0.7 top_p=0.8`."""
    digest: int
    """64 bits."""


@lru_cache(maxsize=64)
def protocol_of(config_json: str) -> EvalProtocol:
    """The protocol of evaluations under a configuration, as a journal's first record has it."""
    settings = _settings(config_json)
    task, sampling, evaluation = (settings.get(section) or {} for section in ("task", "sampling", "eval"))
    env = str(task.get("env", ""))
    options = {**task.get("options", {}), **evaluation.get("options", {})}
    counted = {
        "env": env,
        "options": options,
        "chat": task.get("chat", True),
        "chat_options": task.get("chat_options", {}),
        "sampling": sampling,
        "max_model_len": settings.get("engine", {}).get("max_model_len", _ROOM),
    }
    text = json.dumps(counted, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return EvalProtocol(_label(env, options, sampling), int.from_bytes(digest, "little"))


def _settings(config_json: str) -> dict[str, Any]:
    """With the defaults of today, so that older records compare; as recorded where another hpc_es wrote it."""
    try:
        return from_record(config_json).model_dump(mode="json")
    except ConfigError:
        recorded = json.loads(config_json or "{}")
        return recorded if isinstance(recorded, dict) else {}


def _label(env: str, options: dict[str, Any], sampling: dict[str, Any]) -> str:
    temperature = sampling.get("temperature", 0.0)
    decoding = [f"T={temperature:g}" if temperature else "greedy"]
    changed = {key: value for key, value in sampling.items() if _DEFAULTS.get(key, value) != value}
    return f"{' '.join([env, *map(_pair, options.items())])}, {' '.join([*decoding, *map(_pair, changed.items())])}"


def _pair(item: tuple[str, Any]) -> str:
    key, value = item
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
