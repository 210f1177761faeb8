"""A member, a prompt, commits and settings for tests of engines on tiny models."""

from typing import Any

import numpy as np
from builders import Counted, built_commit

from hpc_es.config.schema import EngineConfig
from hpc_es.records import Commit, EvalId, Member

MEMBER = Member(seed=0x0123456789ABCDEF, sign=-1, sigma=0.02)
PROMPT = [1, *range(3, 97), *range(3, 30)]
"""All printable ASCII, and some of it again: longer than three cache blocks."""
BLOCK_SIZE, MAX_MODEL_LEN = 32, 256


def settings(kind: str, **others: Any) -> EngineConfig:
    common = {"max_model_len": MAX_MODEL_LEN, "max_concurrent": 4, "kv_cache_mib": 32, "block_size": BLOCK_SIZE}
    return EngineConfig.model_validate({"kind": kind, **common, **others})


def commit(version: int) -> Commit:
    members = tuple(
        Counted(EvalId(version - 1, slot), 77 * version + slot, 1, 0.01, 0, 0.5, 1.0, float(np.float32(1e-6 * slot)))
        for slot in range(1, 4)
    )
    return built_commit(version=version, alpha=0.01, members=members)
