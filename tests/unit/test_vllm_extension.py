"""How the extension takes to models that load in unusual ways: written directly only where that is proven, loaded
anew where weights are repacked, refused where noise would be lost. The models are a few lines each; vLLM is not run."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from hpc_es.config.schema import EngineConfig
from hpc_es.engine.direct_map import regions
from hpc_es.engine.fingerprints import fingerprint
from hpc_es.errors import EngineError
from hpc_es.params.arena import Arena
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.records import Member

pytestmark = pytest.mark.vllm
MEMBER = Member(seed=3, sign=1, sigma=0.05)
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


class Plain(torch.nn.Module):
    """Every tensor as it is, the embedding with padding."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.live = torch.nn.ParameterDict()
        for name in arena.names:
            shape = [arena.shape(name)[0] + 8 * (name == EMBEDDING), *arena.shape(name)[1:]]
            self.live[name.replace(".", "/")] = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(8), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.load(name, self.live[name.replace(".", "/")].data, tensor)
        self.scale.data.fill_(3)

    def load(self, name: str, live: torch.Tensor, tensor: torch.Tensor) -> None:
        live[: len(tensor)].copy_(tensor)
        live[len(tensor) :].fill_(0)


class HalfWide(Plain):
    """bfloat16, but for one tensor: as state-space models keep a few."""

    dtype = torch.bfloat16

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        for name, live in self.live.items():
            live.data = live.data.to(torch.float32 if name == NORM.replace(".", "/") else self.dtype)


class Computes(Plain):
    """A tensor is changed on its way."""

    def load(self, name: str, live: torch.Tensor, tensor: torch.Tensor) -> None:
        super().load(name, live, tensor + 1 if name == NORM else tensor)


class Derives(Plain):
    """Besides, a parameter is computed from another, by no copy."""

    def load(self, name: str, live: torch.Tensor, tensor: torch.Tensor) -> None:
        super().load(name, live, tensor)
        if name == NORM:
            self.norm = float(tensor.sum())

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(tensors)
        self.scale.data.fill_(self.norm)


class Repacks(Plain):
    """Once loaded, the embedding is turned over; loading is not enough."""

    def process(self) -> None:
        live = self.live[EMBEDDING.replace(".", "/")].data
        live.copy_(live.flip(0))


class Ignores(Plain):
    """A tensor of the checkpoint is not used."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        del self.live[NORM.replace(".", "/")]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in tensors if name != NORM)


class Moves(Plain):
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(tensors)
        self.scale.data = self.scale.data.clone()


class Ties(Plain):
    """Two tensors of the checkpoint in one memory."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.live[NORM.replace(".", "/")] = self.live["model/layers/0/input_layernorm/weight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


def attached(folder: Path, kind: type[Plain], **scope: Any) -> tuple[Any, Plain, dict[str, Any]]:
    """A worker with a model that was loaded, and what es_attach says."""
    from hpc_es.engine.vllm_extension import WorkerExtension

    arena = Arena.from_pretrained(folder, shared=True, **scope)
    model = kind(arena)
    process = getattr(model, "process", lambda: None)

    def load(weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights_iterator)
        process()

    load((name, torch.from_numpy(arena.tensor(name))) for name in arena.names)

    class Worker(WorkerExtension):
        model_runner = SimpleNamespace(get_model=lambda: model)
        model_config = SimpleNamespace(dtype=getattr(kind, "dtype", torch.float32))
        parallel_config = SimpleNamespace(world_size=1)
        rank = 0
        reload_weights = staticmethod(load)
        keep = arena

    worker = Worker()
    shared = {"memory_path": str(arena.memory_path), "model_path": str(folder), **scope}
    said = worker.es_attach(shared | {"version": 0, "base_digest": arena.base_digest}, 1)
    return worker, model, said


def directly(worker: Any, *unheld: str) -> dict[str, Any]:
    return worker.es_write_directly([[True] * len(worker.es_targets)], "auto", unheld)


class Front:
    """The calls that VllmEngine makes to its one rank."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._arena = worker, worker.es_arena
        self._engine, self._digest = EngineConfig(), worker.es_arena.base_digest

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._worker, method)(*args)]


def test_a_trained_tensor_that_vllm_ignores_is_refused_by_name(folder: Path) -> None:
    from hpc_es.engine.vllm import VllmEngine

    worker, _, said = attached(folder, Ignores)
    assert said["unseen"] == [NORM]
    with pytest.raises(EngineError, match=r"nothing with model\.norm\.weight .*model\.exclude"):
        asyncio.run(VllmEngine._refuse_ignored(cast(Any, Front(worker)), [said]))
    assert worker.es_ignored([NORM, EMBEDDING]) == [NORM]


def test_a_tensor_that_is_changed_on_its_way_is_not_taken_for_ignored(folder: Path) -> None:
    from hpc_es.engine.vllm import VllmEngine

    worker, _, said = attached(folder, Computes)
    assert said["unseen"] == [NORM]
    asyncio.run(VllmEngine._refuse_ignored(cast(Any, Front(worker)), [said]))


def test_an_untrained_tensor_that_vllm_ignores_does_not_bar_the_direct_map(folder: Path) -> None:
    from hpc_es.engine.vllm import VllmEngine

    worker, _, said = attached(folder, Ignores, exclude=[NORM])
    assert said["unseen"] == []
    assert asyncio.run(VllmEngine._write_directly(cast(Any, Front(worker)), [said])) == ""
    assert worker.es_base is not worker.es_loaded
    assert worker.es_base.write(MEMBER) == worker.es_arena.base_digest


def test_a_model_of_copied_tensors_is_written_directly_without_its_padding(folder: Path) -> None:
    worker, model, said = attached(folder, Plain)
    assert not said["obstacle"]
    assert len(said["regions"]) == len(worker.es_arena.names)
    assert directly(worker) == {"obstacle": "", "share": worker.es_arena.base_digest}
    assert worker.es_base is not worker.es_loaded
    worker.es_base.write(MEMBER)
    table = model.live[EMBEDDING.replace(".", "/")]
    assert torch.equal(table[:-8], torch.from_numpy(worker.es_arena.perturbed(EMBEDDING, MEMBER, "float32")))
    assert not table[-8:].any()


def test_a_tensor_that_the_model_keeps_in_float32_takes_noise_in_float32(folder: Path) -> None:
    worker, model, said = attached(folder, HalfWide)
    assert not said["obstacle"]
    wide, table = model.live[NORM.replace(".", "/")], model.live[EMBEDDING.replace(".", "/")][:-8]

    def is_the_member() -> bool:
        bits = worker.es_arena.perturbed(EMBEDDING, MEMBER, "bfloat16")
        norm = torch.from_numpy(worker.es_arena.perturbed(NORM, MEMBER, "float32"))
        return torch.equal(wide, norm) and torch.equal(table, torch.from_numpy(bits).view(torch.bfloat16))

    worker.es_loaded.write(MEMBER)
    assert is_the_member()
    worker.es_loaded.write(None)
    assert directly(worker) == {"obstacle": "", "share": worker.es_arena.base_digest}
    worker.es_base.write(MEMBER)
    assert is_the_member()


def test_a_probe_sees_a_flipped_bit_also_where_no_member_is_written(folder: Path) -> None:
    worker, model, _ = attached(folder, Plain)
    directly(worker)
    member = msgspec.msgpack.encode(MEMBER)
    worker.es_write(member)
    assert worker.es_probe(member) == []
    model.live[EMBEDDING.replace(".", "/")].data.view(torch.int32)[-1, 0] ^= 1
    model.scale.data.view(torch.int32)[3] ^= 1
    assert sorted(worker.es_probe(member)) == ["live.model/embed_tokens/weight", "scale"]


def test_a_tensor_computed_while_loading_is_an_obstacle(folder: Path) -> None:
    worker, _, said = attached(folder, Computes)
    assert "computed" in said["obstacle"]
    assert worker.es_base is worker.es_loaded


def test_an_unobserved_parameter_fails_the_proof_and_load_weights_stays_in_use(folder: Path) -> None:
    worker, model, said = attached(folder, Derives)
    assert not said["obstacle"]
    assert "scale" in directly(worker)["obstacle"]
    assert worker.es_base is worker.es_loaded
    worker.es_base.write(MEMBER)
    assert model.scale[0] == pytest.approx(worker.es_arena.perturbed(NORM, MEMBER, "float32").sum(), rel=1e-5)


def test_a_map_that_is_wrong_fails_the_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any) -> Any:
        return ((region, offset + 64 * (region.name == EMBEDDING)) for region, offset in regions(*args))

    monkeypatch.setattr("hpc_es.engine.direct_map.regions", shifted)
    worker, _, _ = attached(folder, Plain)
    assert "embed_tokens" in directly(worker)["obstacle"]


def test_where_a_device_fails_in_the_proof_load_weights_stays_in_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("hpc_es.engine.vllm_extension.make_base", broken)
    worker, _, _ = attached(folder, Plain)
    assert "no kernel image" in directly(worker)["obstacle"]
    assert worker.es_base is worker.es_loaded


def test_a_repacked_model_is_reloaded_for_each_member(folder: Path) -> None:
    worker, model, said = attached(folder, Repacks)
    assert "repacks" in said["obstacle"]
    worker.es_base.write(MEMBER)
    table = model.live[EMBEDDING.replace(".", "/")].flip(0)
    assert torch.equal(table[:-8], torch.from_numpy(worker.es_arena.perturbed(EMBEDDING, MEMBER, "float32")))


@pytest.mark.parametrize(("kind", "message"), [(Moves, "moved the storage of scale"), (Ties, "in the same memory")])
def test_a_model_that_would_lose_noise_is_refused(folder: Path, kind: type[Plain], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        attached(folder, kind)


def test_a_fingerprint_goes_by_bits_and_places_over_all_chunks() -> None:
    values = torch.arange(2**16 + 5, dtype=torch.float32)
    bits = values.numpy().view("int32").tolist()
    assert fingerprint(values) == sum((2 * i + 1) * each for i, each in enumerate(bits)) % 2**64
