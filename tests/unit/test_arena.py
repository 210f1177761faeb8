"""The arena: what it loads and refuses, and that theta is the same bits however it got there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
from builders import Counted, built_commit
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_es.errors import ModelError, StoreError
from hpc_es.noise import noise, reference, tensor_id
from hpc_es.params import Arena, check_memory, combine, layout, num_bytes
from hpc_es.params.arena import Dtype
from hpc_es.records import Commit, EvalId, Member

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model")


def commit(version: int, *, num_subspaces: int = 1, null: bool = False) -> Commit:
    members = tuple(
        Counted(
            *(EvalId(version - 1, slot), 2**63 + 100 * version + slot, 1, 1e-3, slot % num_subspaces, 0.0, 0.0),
            0.0 if null else float(np.float32(1e-6 * (slot - 1.3))),
            99 + version,
        )
        for slot in range(4)
    )
    return built_commit(version, 5e-4, members, null, num_subspaces, 99 + version)


COMMITS = [commit(1), commit(2, num_subspaces=3), commit(3, null=True), commit(4), commit(5)]


# --- loading ------------------------------------------------------------------------------------------------------


def test_theta_0_is_the_checkpoint_in_the_order_of_names(model: Path) -> None:
    arena = Arena.from_pretrained(model)
    assert arena.names == sorted(small_checkpoint.SHAPES)
    assert arena.num_parameters == sum(int(np.prod(shape)) for shape in small_checkpoint.SHAPES.values())
    for name, expected in small_checkpoint.values().items():
        assert arena.tensor(name).dtype == np.float32
        assert np.array_equal(arena.tensor(name), expected)
        offset = arena.tensor(name).ctypes.data - arena.memory.ctypes.data
        assert offset % 32 == 0
    assert arena.version == 0


def test_the_digest_is_that_of_the_reference(model: Path) -> None:
    expected = sum(
        reference.digest(tensor.ravel(), tensor_id(name)) for name, tensor in small_checkpoint.values().items()
    )
    arena = Arena.from_pretrained(model)
    assert arena.digest() == arena.base_digest == expected % 2**64


def test_half_types_are_widened_exactly(tmp_path: Path) -> None:
    half = np.array([1.0, -0.0, 6e-8, 65504.0], np.float16)
    brain = np.array([0x3F80, 0x8000, 0x0001, 0x7F7F], np.uint16)
    arena = Arena.from_pretrained(small_checkpoint.make(tmp_path, {"half": half, "brain": brain}))
    assert np.array_equal(arena.tensor("half"), half.astype(np.float32))
    assert arena.tensor("brain").view(np.uint32).tolist() == [bits << 16 for bits in brain.tolist()]


def test_shards_make_the_same_arena_as_one_file(model: Path, tmp_path: Path) -> None:
    tensors, sharded = small_checkpoint.values(), small_checkpoint.make(tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    files = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        small_checkpoint.save(sharded, {name: t for name, t in tensors.items() if files[name] == file}, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert Arena.from_pretrained(sharded).digest() == Arena.from_pretrained(model).digest()
    (sharded / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match="model-2-of-2"):
        Arena.from_pretrained(sharded)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}, {}])
def test_a_stored_head_that_is_the_embedding_is_dropped(tmp_path: Path, config: dict[str, object]) -> None:
    tensors = small_checkpoint.values()
    folder = small_checkpoint.make(tmp_path, {**tensors, HEAD: tensors[EMBEDDING]}, **config)
    assert HEAD not in Arena.from_pretrained(folder).names


def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    tensors = small_checkpoint.values()
    other = tensors[EMBEDDING].copy()
    other[-1, -1] += 1
    with pytest.raises(ModelError, match="differs"):
        Arena.from_pretrained(small_checkpoint.make(tmp_path, {**tensors, HEAD: other}, tie_word_embeddings=True))


def test_an_untied_head_is_a_tensor_of_its_own_even_when_equal(tmp_path: Path) -> None:
    tensors = small_checkpoint.values()
    folder = small_checkpoint.make(tmp_path, {**tensors, HEAD: tensors[EMBEDDING]}, tie_word_embeddings=False)
    assert HEAD in Arena.from_pretrained(folder).names


def with_dtype(folder: Path, name: str, dtype: str) -> None:
    """Claim another type for a tensor; offsets count from the end of the header, so the data stay where they are."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, end = header[name]["data_offsets"]
    header[name].update(dtype=dtype, shape=[(end - start) // (8 if dtype == "I64" else 1)])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_tensors_for_multi_token_prediction_are_not_trained_but_count_for_the_digest(tmp_path: Path) -> None:
    tensors = small_checkpoint.values() | {"mtp.fc.weight": np.ones((8, 8), np.float32)}
    arena = Arena.from_pretrained(small_checkpoint.make(tmp_path / "model", tensors))
    assert "mtp.fc.weight" in set(arena.names) - set(arena.trained)
    arena.apply(COMMITS)
    assert (arena.tensor("mtp.fc.weight") == 1).all()
    others = [name for name in arena.names if name != "mtp.fc.weight"]
    assert (arena.digest_of(others) + arena.digest_of(["mtp.fc.weight"])) % 2**64 == arena.digest()
    assert arena.digest_of(["mtp.fc.weight"]) != 0
    with pytest.raises(ModelError, match=r"mtp\.\* is never trained"):
        Arena.from_pretrained(tmp_path / "model", include=["mtp.*"])


def test_integer_buffers_are_skipped_but_integer_weights_refused(tmp_path: Path) -> None:
    extra = {"model.position_ids": np.zeros(4, np.float32), "model.layers.0.v_proj.weight": np.zeros(4, np.float32)}
    folder = small_checkpoint.make(tmp_path, {**small_checkpoint.values(), **extra})
    with_dtype(folder, "model.position_ids", "I64")
    assert "model.position_ids" not in Arena.from_pretrained(folder).names
    with_dtype(folder, "model.layers.0.v_proj.weight", "U8")
    with pytest.raises(ModelError, match=r"v_proj\.weight is stored as U8"):
        Arena.from_pretrained(folder)


def test_float8_is_refused(model: Path) -> None:
    with_dtype(model, EMBEDDING, "F8_E4M3")
    with pytest.raises(ModelError, match="F8_E4M3"):
        Arena.from_pretrained(model)


def test_a_quantised_checkpoint_is_refused_by_its_config(tmp_path: Path) -> None:
    folder = small_checkpoint.make(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match=r"quantised \(awq\)"):
        Arena.from_pretrained(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(model: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        Arena.from_pretrained(model)


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hpc-es model get"):
        Arena.from_pretrained(tmp_path / "nowhere")


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0, 0.999))
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    folder = small_checkpoint.make(tmp_path_factory.mktemp("model"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ModelError):
        Arena.from_pretrained(folder)


def test_two_names_with_one_id_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "tensor_id", lambda name: 1)
    with pytest.raises(ModelError, match="same 64-bit id"):
        Arena.from_pretrained(model)


def test_an_unknown_tensor_name_gets_a_suggestion(model: Path) -> None:
    with pytest.raises(ModelError, match=EMBEDDING):
        Arena.from_pretrained(model).tensor("model.embed_token.weight")


# --- updates ------------------------------------------------------------------------------------------------------


def test_update_adds_the_noise_of_each_member_in_turn(model: Path) -> None:
    arena, theta = Arena.from_pretrained(model), small_checkpoint.values()
    members = [(2**64 - 1, float(np.float32(3e-7))), (5, float(np.float32(-1e-6)))]
    report = arena.update(members)
    for name, tensor in theta.items():
        total = np.zeros(tensor.size, np.float32)
        for seed, coefficient in members:
            total += np.float32(coefficient) * noise(seed, name, 0, tensor.size).astype(np.float32)
        assert np.array_equal(arena.tensor(name).ravel(), tensor.ravel() + total)
    assert arena.version == 1
    assert report.digest == arena.digest() != arena.base_digest


def test_many_commits_at_once_give_the_bits_of_one_by_one(model: Path) -> None:
    at_once, one_by_one = Arena.from_pretrained(model), Arena.from_pretrained(model)
    report = at_once.apply(COMMITS)
    singles = [one_by_one.apply([commit]) for commit in COMMITS]
    assert at_once.memory.tobytes() == one_by_one.memory.tobytes()
    assert report.digests == tuple(single.digest for single in singles)
    assert report.update_norms == pytest.approx([single.update_norm for single in singles])
    assert at_once.version == 5
    assert report.digest == at_once.digest()


def test_the_update_norm_is_the_length_of_the_change(model: Path) -> None:
    arena = Arena.from_pretrained(model)
    before = arena.memory.astype(np.float64)
    assert arena.apply([COMMITS[0]]).update_norm == pytest.approx(np.linalg.norm(arena.memory - before), rel=1e-6)


def test_a_null_commit_advances_the_version_and_leaves_theta_alone(model: Path) -> None:
    arena = Arena.from_pretrained(model)
    report = arena.apply([commit(1, null=True)])
    assert (arena.version, report.digest, report.update_norm) == (1, arena.base_digest, 0.0)


@pytest.mark.parametrize("versions", [[2], [1, 3], [1, 1], [0]])
def test_commits_that_do_not_follow_on_are_refused_and_change_nothing(model: Path, versions: list[int]) -> None:
    arena = Arena.from_pretrained(model)
    with pytest.raises(StoreError, match="do not continue"):
        arena.apply([commit(version) for version in versions])
    assert (arena.version, arena.digest()) == (0, arena.base_digest)


def test_tensors_outside_the_scope_stay_as_they_are_and_count_in_the_digest(model: Path) -> None:
    arena = Arena.from_pretrained(model, include=("*.weight",), exclude=("*norm*", "*embed*"))
    assert arena.trained == ["model.layers.0.k_proj.weight", "model.layers.0.q_proj.weight"]
    report = arena.apply(COMMITS)
    theta = small_checkpoint.values()
    for name in arena.names:
        assert np.array_equal(arena.tensor(name), theta[name]) == (name not in arena.trained)
        changed = not np.array_equal(arena.perturbed(name, Member(3, 1, 1e-2), "float32"), arena.tensor(name))
        assert changed == (name in arena.trained)
    assert report.digest == arena.digest()
    arena.tensor(EMBEDDING)[0, 0] += 1
    assert report.digest != arena.digest()


def test_a_scope_that_trains_nothing_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="select none of the"):
        Arena.from_pretrained(model, include=("transformer.*",))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_update_disjoint_slices_of_one_memory(
    model: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_es.params.arena.CHUNK", 1024)
    whole, owner = Arena.from_pretrained(model), Arena.from_pretrained(model, shared=True)
    assert owner.memory_path is not None
    others = [
        Arena.attach(owner.memory_path, model, version=0, base_digest=owner.base_digest) for _ in range(num_ranks - 1)
    ]
    reports = [arena.apply(COMMITS, rank=r, num_ranks=num_ranks) for r, arena in enumerate([owner, *others])]
    expected = whole.apply(COMMITS)
    assert combine(reports).digests == expected.digests
    assert combine(reports).update_norms == pytest.approx(expected.update_norms)
    assert all(arena.digest() == whole.digest() and arena.version == 5 for arena in [owner, *others])


# --- perturbing ---------------------------------------------------------------------------------------------------


def test_a_perturbation_of_other_bits_says_so(model: Path) -> None:
    arena = Arena.from_pretrained(model, include=["*norm*"])
    arena.tensor(arena.names[0])[...].flat[0] += 1e-6
    stream = arena.stream(Member(5, 1, 1e-3), "bfloat16")
    assert len(list(stream)) == len(arena.names)
    assert stream.digest == arena.digest() != arena.base_digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("member", [None, Member(5, 1, 1e-3), Member(5, -1, 1e-3), Member(5, 1, 1e-2, 1, 3, 8)])
def test_perturbed_tensors_are_those_of_the_reference(model: Path, dtype: Dtype, member: Member | None) -> None:
    arena = Arena.from_pretrained(model)
    noisy = None
    if member is not None:
        scale = float(np.float32(member.sigma * member.sign / 4096))
        noisy = reference.Perturbation(member.seed, scale, member.subspace, member.num_subspaces, member.partition_seed)
    stream = arena.stream(member, dtype, buffer_bytes=8000)
    streamed = {name: out.copy() for name, out in stream}
    assert stream.digest == arena.base_digest
    assert list(streamed) == arena.names
    for name in arena.names:
        out = arena.perturbed(name, member, dtype)
        expected = np.empty(out.size, out.dtype)
        reference.perturb(arena.tensor(name).ravel(), expected, tensor_id(name), noisy)
        assert out.tobytes() == expected.tobytes() == streamed[name].tobytes()
        assert out.shape == streamed[name].shape == arena.shape(name)
    assert arena.digest() == arena.base_digest


def test_perturbed_fills_a_given_array_and_refuses_an_unsuitable_one(model: Path) -> None:
    arena, name = Arena.from_pretrained(model), EMBEDDING
    out = np.empty(arena.shape(name), np.uint16)
    assert np.shares_memory(arena.perturbed(name, Member(1, 1, 1e-3), "bfloat16", out), out)
    assert np.array_equal(out, arena.perturbed(name, Member(1, 1, 1e-3), "bfloat16"))
    for bad in (out[:, ::2], out.astype(np.float64), out[:-1].copy()):
        with pytest.raises(ModelError):
            arena.perturbed(name, None, "bfloat16", bad)


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_given_buffer_is_used_and_a_small_one_refused(model: Path) -> None:
    buffer = bytearray(num_bytes(model) + 64)
    arena = Arena.from_pretrained(model, buffer=buffer)
    assert np.shares_memory(arena.memory, np.frombuffer(buffer, np.uint8))
    assert arena.digest() == Arena.from_pretrained(model).digest()
    with pytest.raises(ModelError, match="writable bytes"):
        Arena.from_pretrained(model, buffer=bytearray(64))


def test_another_process_sees_the_same_memory_which_is_freed_afterwards(model: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    code = (
        "import sys, time; from hpc_es.params import Arena\n"
        f"arena = Arena.from_pretrained({str(model)!r}, shared=True)\n"
        "print(arena.memory_path, arena.base_digest, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        path, digest = owner.stdout.readline().split()
        arena = Arena.attach(path, model, version=0, base_digest=int(digest))
        assert arena.digest() == int(digest)
        arena.apply(COMMITS)
        again = Arena.attach(path, model, version=5, base_digest=int(digest))
        assert again.digest() == arena.digest() != int(digest)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    for _ in range(100):
        if not Path(path).exists():
            break
        time.sleep(0.05)
    with pytest.raises(ModelError, match="cannot be attached"):
        Arena.attach(path, model, version=0, base_digest=0)
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_arenas_that_do_not_fit_are_refused_with_the_number_that_would(model: Path) -> None:
    each = num_bytes(model)
    check_memory(model, 3, limit=3 * each)
    with pytest.raises(ModelError, match="2 would fit"):
        check_memory(model, 3, limit=3 * each - 1)
    check_memory(model)
