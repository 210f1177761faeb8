"""Checkpoints and exported folders: complete or not there at all, and the same bits as the run had."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
from small_disk import small_disk

from hpc_es.errors import ConfigError, ModelError, StoreError
from hpc_es.params import Arena, checkpoint, weights
from hpc_es.params.export import export
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model")


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


@pytest.fixture
def arena(model: Path) -> Arena:
    return Arena.from_pretrained(model)


def advance(arena: Arena, versions: int) -> list[int]:
    """Apply as many updates; the digests of the new versions."""
    return [arena.update([(arena.version, 1e-6)]).digest for _ in range(versions)]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_gives_back_the_same_bits(run: RunPaths, arena: Arena, model: Path) -> None:
    advance(arena, 3)
    folder = checkpoint.write(run, arena)
    assert folder == run.checkpoint(3)
    other = Arena.from_pretrained(model)
    other.reload(folder)
    assert other.version == 3
    assert other.memory.tobytes() == arena.memory.tobytes()
    manifest = checkpoint.read_manifest(folder)
    assert (manifest.version, manifest.digest, manifest.base_digest) == (3, arena.digest(), arena.base_digest)


def test_theta_0_comes_back_from_the_base_model(arena: Arena) -> None:
    advance(arena, 2)
    arena.reload(None)
    assert (arena.version, arena.digest()) == (0, arena.base_digest)


def test_a_base_model_that_has_changed_is_refused(arena: Arena, model: Path) -> None:
    damage(model / "model.safetensors")
    with pytest.raises(ModelError, match="changed"):
        arena.reload(None)


@pytest.mark.parametrize("what", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_checkpoint_is_refused_and_an_older_one_serves(
    run: RunPaths, arena: Arena, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    advance(arena, 1)
    checkpoint.write(run, arena)
    first = arena.digest()
    digests = {1: first, 2: advance(arena, 1)[0]}
    folder = checkpoint.write(run, arena)
    theta = folder / checkpoint.THETA
    if what == "flip":
        damage(theta)
    elif what == "cut":
        theta.write_bytes(theta.read_bytes()[:-100])
    elif what == "remove":
        theta.unlink()
    else:
        (folder / checkpoint.MANIFEST).write_text("{")
    with pytest.raises(StoreError):
        arena.reload(folder)
    assert checkpoint.restore(run, arena, 9, digests) == 1
    assert (arena.version, arena.digest()) == (1, first)
    assert "skipping it" in caplog.text


def test_a_checkpoint_of_another_base_is_refused(run: RunPaths, arena: Arena, tmp_path: Path) -> None:
    advance(arena, 1)
    folder = checkpoint.write(run, arena)
    other = Arena.from_pretrained(small_checkpoint.make(tmp_path / "other", small_checkpoint.values(seed=1)))
    with pytest.raises(StoreError, match="another base"):
        other.reload(folder)


@pytest.mark.parametrize(("version", "expected"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (100, 6)])
def test_restore_takes_the_newest_at_or_before(run: RunPaths, arena: Arena, version: int, expected: int) -> None:
    digests = [arena.base_digest]
    for _ in range(3):
        digests += advance(arena, 2)
        checkpoint.write(run, arena)
    assert checkpoint.restore(run, arena, version, dict(enumerate(digests))) == expected
    assert (arena.version, arena.digest()) == (expected, digests[expected])


def test_prune_keeps_the_newest_and_clears_interrupted_writes(run: RunPaths, arena: Arena) -> None:
    for _ in range(4):
        advance(arena, 1)
        checkpoint.write(run, arena)
    (run.checkpoints / ".writing-v00000009-123").mkdir()
    checkpoint.prune(run, 2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["v00000003", "v00000004"]


def test_writing_the_same_version_again_keeps_it_and_another_theta_replaces_it(run: RunPaths, arena: Arena) -> None:
    advance(arena, 1)
    folder = checkpoint.write(run, arena)
    written = (folder / checkpoint.THETA).stat().st_ino
    assert checkpoint.write(run, arena) == folder
    assert (folder / checkpoint.THETA).stat().st_ino == written
    arena.tensor("model.norm.weight")[0] += 1
    checkpoint.write(run, arena)
    assert checkpoint.read_manifest(folder).digest == arena.digest()
    arena.reload(folder)


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_an_interrupted_write_leaves_nothing_that_counts(
    run: RunPaths, arena: Arena, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    advance(arena, 1)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if step == "write":
            patched.setattr(checkpoint, "write_manifest", fail)
        elif step == "fsync":
            patched.setattr(os, "fsync", fail)
        else:
            patched.setattr(Path, "rename", fail)
        with pytest.raises(StoreError, match="No space left"):
            checkpoint.write(run, arena)
    assert list(run.checkpoints.iterdir()) == []
    checkpoint.write(run, arena)
    assert [version for version, _ in run.written_checkpoints()] == [1]


def test_a_full_disk_is_a_store_error_and_leaves_room_again(tmp_path: Path) -> None:
    big = {"w": np.ones(200_000, np.float32)}
    arena = Arena.from_pretrained(small_checkpoint.make(tmp_path / "model", big))
    advance(arena, 1)
    with small_disk(tmp_path) as disk:
        run = RunPaths(disk)
        with pytest.raises(StoreError, match="cannot be written"):
            checkpoint.write(run, arena)
        assert list(run.checkpoints.iterdir()) == []
        (disk / "ballast").unlink()
        arena.reload(checkpoint.write(run, arena))


def test_a_folder_that_cannot_be_made_is_a_store_error(run: RunPaths, arena: Arena) -> None:
    advance(arena, 1)
    run.checkpoints.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot be written"):
        checkpoint.write(run, arena)


# --- export -------------------------------------------------------------------------------------------------------


def test_an_exported_folder_has_the_bits_of_the_run(arena: Arena, model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    (model / "config.json").write_text(
        '{"model_type": "llama", "torch_dtype": "bfloat16", "text_config": {"dtype": "x"}}'
    )
    (model / "pytorch_model.bin").write_text("old weights")
    advance(arena, 2)
    manifest = export(arena, model, tmp_path / "out")
    again = Arena.from_pretrained(tmp_path / "out")
    assert again.memory.tobytes() == arena.memory.tobytes()
    assert (
        manifest.digest == again.base_digest == json.loads((tmp_path / "out" / "manifest.json").read_text())["digest"]
    )
    assert manifest.version == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["text_config"]["dtype"] == "float32"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "manifest.json", "model.safetensors", "tokenizer.json"),
    }


def test_serving_weights_have_the_types_of_the_base_and_the_digest_of_fp32(tmp_path: Path) -> None:
    tensors = small_checkpoint.values()
    brain = (tensors["model.embed_tokens.weight"].view(np.uint32) >> 16).astype(np.uint16)
    half = tensors["model.layers.0.q_proj.weight"].astype(np.float16)
    mixed = {**tensors, "model.embed_tokens.weight": brain, "model.layers.0.q_proj.weight": half}
    model = small_checkpoint.make(tmp_path / "model", mixed, torch_dtype="bfloat16")
    arena = Arena.from_pretrained(model)
    advance(arena, 2)
    manifest = export(arena, model, tmp_path / "out", "base")
    served = Arena.from_pretrained(tmp_path / "out")
    assert manifest.digest == arena.digest()
    types = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    for name in arena.names:
        assert served.stored_dtype(name) == arena.stored_dtype(name)
        rounded = arena.perturbed(name, None, types[arena.stored_dtype(name)])  # type: ignore[arg-type]
        assert np.array_equal(served.perturbed(name, None, types[arena.stored_dtype(name)]), rounded)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_export_never_overwrites(arena: Arena, model: Path) -> None:
    before = sorted(path.name for path in model.iterdir())
    with pytest.raises(ConfigError, match="already exists"):
        export(arena, model, model)
    assert sorted(path.name for path in model.iterdir()) == before


@pytest.mark.slow
def test_transformers_loads_an_export_with_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = write_tiny_llama(tmp_path / "tiny")
    arena = Arena.from_pretrained(model)
    advance(arena, 2)
    export(arena, model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tensors = loaded.state_dict()
    assert all(np.array_equal(tensors[name].numpy(), arena.tensor(name)) for name in arena.names)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")


def test_a_checkpoint_whose_file_is_gone_or_cut_is_written_again(run: RunPaths, arena: Arena) -> None:
    advance(arena, 1)
    theta = checkpoint.write(run, arena) / checkpoint.THETA
    whole = theta.read_bytes()
    theta.unlink()
    checkpoint.write(run, arena)
    assert theta.read_bytes() == whole
    theta.write_bytes(whole[:-4])
    checkpoint.write(run, arena)
    assert theta.read_bytes() == whole


@pytest.mark.parametrize("fault", ["removed", "cut"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_passed_over(
    run: RunPaths, arena: Arena, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    advance(arena, 1)
    theta = checkpoint.write(run, arena) / checkpoint.THETA

    def scan_and_lose(path: Path) -> list[weights.Stored]:
        found = weights.scan_file(path)
        theta.unlink() if fault == "removed" else os.truncate(theta, 10)
        return found

    monkeypatch.setattr("hpc_es.params.arena.scan_file", scan_and_lose)
    with pytest.raises(StoreError, match="can no longer be read"):
        arena.reload(theta.parent)
    assert checkpoint.restore(run, arena, 1, {1: arena.digest()}) == 0
