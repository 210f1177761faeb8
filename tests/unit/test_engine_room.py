"""How much of a GPU's memory vLLM is left, where theta shall lie beside it."""

from pathlib import Path
from typing import Any

import pytest
import small_checkpoint

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.params.arena import Arena
from hpc_es.params.room import RESERVE, gets_room, share_beside

GIB = 2**30


def test_theta_has_room_where_half_of_the_memory_is_left_for_the_rest() -> None:
    assert gets_room("auto", 16 * GIB, 8 * GIB, 48 * GIB)
    assert not gets_room("auto", 16 * GIB, 8 * GIB + 1, 48 * GIB)
    assert gets_room("device", 47 * GIB, 8 * GIB, 48 * GIB), "whoever says so gets it, and vLLM what is left"
    assert not gets_room("host", 1, 1, 48 * GIB)


def test_vllms_share_leaves_room_for_theta_and_a_reserve() -> None:
    share = share_beside(16 * GIB, 0.9, 80 * GIB)
    assert share * 80 * GIB + 16 * GIB + RESERVE == pytest.approx(0.9 * 80 * GIB)
    assert share_beside(80 * GIB, 0.9, 80 * GIB) > 0, "vLLM refuses what is too little, in its own words"


@pytest.mark.parametrize(
    ("engine", "leaves"),
    [
        ({}, True),
        ({"base": "device"}, True),
        ({"base": "host"}, False),
        ({"direct_map": False}, False),
        ({"kv_cache_mib": 512}, False),
    ],
)
def test_vllm_is_started_with_the_share_that_leaves_room(
    engine: dict[str, Any], leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_launch = pytest.importorskip("hpc_es.engine.vllm_launch")
    arena = Arena.from_pretrained(small_checkpoint.make(tmp_path / "model", small_checkpoint.values({"w": (64, 64)})))

    class Gpu:
        @staticmethod
        def is_cpu() -> bool:
            return False

        @staticmethod
        def get_device_total_memory() -> int:
            return 80 * GIB

    monkeypatch.setattr(vllm_launch, "current_platform", Gpu)
    given = vllm_launch.arguments(ModelConfig(path="model"), EngineConfig(**engine), "extension", arena)
    usual = vllm_launch.AsyncEngineArgs.gpu_memory_utilization
    assert ("gpu_memory_utilization" in given) == leaves
    if leaves:
        assert given["gpu_memory_utilization"] == pytest.approx(usual - (arena.num_bytes + RESERVE) / (80 * GIB))
    ours = {**engine, "extra": {"gpu_memory_utilization": 0.5}}
    given = vllm_launch.arguments(ModelConfig(path="model"), EngineConfig(**ours), "extension", arena)
    assert given["gpu_memory_utilization"] == 0.5, "the user's own wins"
