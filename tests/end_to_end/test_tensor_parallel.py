"""One member has the same weights however many tensor-parallel ranks share it: put together again from the memory of
all ranks, by the rules of vLLM's Llama and not by the map that wrote them, they are the arena's to the bit."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import MEMBER, PROMPT, commit, settings
from tiny_families import write_family

from hpc_es.config.schema import ModelConfig
from hpc_es.engine.lifetime import shared_memory
from hpc_es.params.arena import Arena
from hpc_es.params.tiny_llama import HEAD_DIM, HEADS, KV_HEADS

VOCAB = 301
"""Padded to 320, so that the last of four ranks has rows of no token."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = write_family("llama_untied", tmp_path_factory.mktemp("tiny") / "model", vocab_size=VOCAB)
    return ModelConfig(path=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def arena(model: ModelConfig) -> Arena:
    """At version 1."""
    arena = Arena.from_pretrained(model.path)
    arena.apply([commit(1)])
    return arena


LOGITS = dict[int, list[float]]()
"""Logits of the member by number of ranks, from the tests that have run."""


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_ranks_together_hold_the_member_that_the_arena_makes(
    model: ModelConfig, arena: Arena, num_ranks: int
) -> None:
    from hpc_es.engine.vllm import VllmEngine

    class Shown(VllmEngine):
        extension = "corruptible_extension.CorruptibleExtension"

    async def scenario() -> tuple[list[Any], list[float]]:
        engine = await Shown.start(model, settings("vllm", tensor_parallel=num_ranks), threads=1)
        try:
            assert engine.info.facts["weights"] == "direct"
            await engine.update([commit(1)])
            assert engine.digest == arena.digest()
            await engine.perturb(MEMBER)
            assert engine.digest == arena.digest()
            await engine.probe()
            shared.update(*map(shared_memory, engine._processes))
            return await engine._rpc("es_show"), await engine.logits(PROMPT)
        finally:
            await engine.close()

    shared = set[Path]()
    shown, logits = asyncio.run(scenario())
    assert shared
    assert not [path for path in shared if path.exists()], "a closed engine leaves no shared memory"
    ranks = [{name: as_array(*each) for name, each in rank.items()} for rank in shown]
    whole = put_together(ranks)
    assert whole.keys() == set(arena.names)
    for name in arena.names:
        expected = arena.perturbed(name, MEMBER, "float32")
        assert np.array_equal(whole[name].view(np.uint32), expected.view(np.uint32)), name
    LOGITS[num_ranks] = logits
    np.testing.assert_allclose(logits, next(iter(LOGITS.values())), rtol=1e-4)


def as_array(shape: list[int], bits: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(bits), np.float32).reshape(shape)


def put_together(ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Canonical tensors from vLLM's: rows of q, k and v of each rank in one, gate and up likewise; rows of heads and
    neurons shared out, columns where they come in; a head of the keys on several ranks where there are fewer."""
    whole = dict[str, np.ndarray]()
    for name, first in ranks[0].items():
        shards = [rank[name] for rank in ranks]
        if "qkv_proj" in name:
            q = HEAD_DIM * HEADS // len(ranks)
            kv = HEAD_DIM * max(1, KV_HEADS // len(ranks))
            step = max(1, len(ranks) // KV_HEADS)
            for part, rows, of in (
                ("q", slice(0, q), shards),
                ("k", slice(q, q + kv), shards[::step]),
                ("v", slice(q + kv, q + 2 * kv), shards[::step]),
            ):
                whole[name.replace("qkv", part)] = np.concatenate([shard[rows] for shard in of])
            assert all(np.array_equal(shards[i][q:], shards[i - i % step][q:]) for i in range(len(ranks)))
        elif "gate_up_proj" in name:
            for part, half in (("gate", 0), ("up", 1)):
                whole[name.replace("gate_up", part)] = np.concatenate([np.split(shard, 2)[half] for shard in shards])
        elif "norm" in name:
            assert all(np.array_equal(first, shard) for shard in shards)
            whole[name] = first
        elif "o_proj" in name or "down_proj" in name:
            whole[name] = np.concatenate(shards, axis=1)
        else:
            table = np.concatenate(shards)
            assert not table[VOCAB:].any()
            whole[name] = table[:VOCAB]
    return whole
