"""Damaged model folders: each is refused with file and tensor, and nothing that safetensors refuses is read."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_checkpoint
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.errors import ModelError
from hpc_es.params import Arena
from hpc_es.params.layout import lay_out
from hpc_es.params.tiny_llama import write_tiny_llama

NAME = "model.layers.0.k_proj.weight"
DEEP = "[" * 100_000
BIG = 10**30
Header = dict[str, Any]
Change = Callable[[Header], object]


def read(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: Header | bytes, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + body)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_checkpoint.make(tmp_path / "model")


def entry(key: str, value: object) -> Change:
    return lambda header: header[NAME].__setitem__(key, value)


def moved(by: tuple[int, int]) -> Change:
    def move(header: Header) -> None:
        header[NAME]["data_offsets"] = [
            place + change for place, change in zip(header[NAME]["data_offsets"], by, strict=True)
        ]

    return move


def header_changes() -> Iterator[tuple[str, Change]]:
    """(what is changed, the change)."""
    wrong = (
        None,
        True,
        "a",
        -1,
        1.5,
        BIG,
        [],
        {},
        [1, [2]],
        "40",
        [40],
        [-40, -40],
        [True, 1600],
        ["40", "40"],
        [40.0, 40],
    )
    for value in (*wrong, [BIG, 1], [1] * 70 + [40, 40], [0, BIG], [40, 40, 40], [40, 41], [2**63, 2**63]):
        yield f"shape={str(value)[:30]}", entry("shape", value)
    for value in (*wrong, [0], [0, 1, 2], [6400, 0], [0, BIG], [-8, 6392], [0, 6400.0], [None, None], {"0": 1}):
        yield f"data_offsets={str(value)[:30]}", entry("data_offsets", value)
    for value in (None, True, 4, [], {}, "", "F31", "f32", "F64", "BF16", "I64", "BOOL", "F4", "\ud800"):
        yield f"dtype={value!a}", entry("dtype", value)
    for by in (
        (1, 0),
        (0, 1),
        (1, 1),
        (-1, -1),
        (4, 4),
        (8, 8),
        (-8, -8),
        (6400, 6400),
        (0, 4),
        (4, 0),
        (10**9, 10**9),
        (2, 0),
    ):
        yield f"offsets moved by {by}", moved(by)
    for value in (None, True, 1, "F32", [], {}, {"dtype": "F32"}, [["dtype", "F32"]]):
        yield f"entry={value!r}", lambda header, value=value: header.__setitem__(NAME, value)
    for value in (1, [], "pt", {"format": 1}, {"format": None}, {"a": {}}):
        yield f"__metadata__={value!r}", lambda header, value=value: header.__setitem__("__metadata__", value)
    yield "a tensor less", lambda header: header.pop(NAME)
    yield "a tensor twice under two names", lambda header: header.__setitem__("copy", dict(header[NAME]))
    yield "half a character as a name", lambda header: header.__setitem__("\ud800", header.pop(NAME))
    yield (
        "an empty tensor outside",
        lambda header: header.__setitem__("a", {"dtype": "F32", "shape": [0], "data_offsets": [10**9, 10**9]}),
    )


@pytest.mark.parametrize(
    ("what", "change"), list(header_changes()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_header_that_lies_is_refused_by_file_and_tensor(model: Path, what: str, change: Change) -> None:
    path = model / "model.safetensors"
    header, body = read(path)
    change(header)
    write(path, header, body)
    with pytest.raises(ModelError) as caught:
        lay_out(model)
    assert "model" in str(caught.value)
    assert len(str(caught.value)) < 1000
    if what not in ("a tensor less",) and "metadata" not in what and "name" not in what and "outside" not in what:
        assert NAME in str(caught.value) or "model.layers.0.q_proj" in str(caught.value) or "gap" in str(caught.value)


def text_changes() -> Iterator[tuple[str, bytes, int | None]]:
    """(what, the header's text or b"" to keep it, its stated length)."""
    for text in (
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"a"',
        b"{}{}",
        b" {}",
        b"\xff{}",
        b'{"a": 1e999}',
        b"{'a': 1}",
        b"\0" * 8,
    ):
        yield f"header {text!r}", text, None
    yield "deep JSON", DEEP.encode(), None
    yield "deep JSON in an entry", b'{"a": {"dtype": ' + DEEP.encode(), None
    yield "deep and whole JSON in metadata", b'{"__metadata__": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", None
    yield "5,000 digits", b'{"a": {"dtype": "F32", "data_offsets": [0, ' + b"9" * 5000 + b'], "shape": [1]}}', None
    yield "one name twice", b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": {}}', None
    for length in (0, 1, 2, 7, 100, 2**31, 2**63, 2**64 - 1):
        yield f"length {length}", b"", length


@pytest.mark.parametrize(
    ("what", "text", "length"), list(text_changes()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_header_that_is_none_is_refused(model: Path, what: str, text: bytes, length: int | None) -> None:
    path = model / "model.safetensors"
    header, body = read(path)
    write(path, text or header, body, length)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        lay_out(model)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1, -4, -6400])
def test_a_file_that_was_cut_is_refused(model: Path, size: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors .*truncated"):
        lay_out(model)


def test_bytes_behind_the_last_tensor_are_refused(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ModelError, match="truncated or damaged: the last tensor"):
        lay_out(model)


CONFIGS = ("", "[]", "null", "{", DEEP, "\0", '{"a": ' + "[" * 5000 + "]" * 5000 + "}", '{"tie_word_embeddings": "no"}',
           '{"tie_word_embeddings": []}', '{"text_config": {"tie_word_embeddings": 1}}', '{"a": 1, "a": 2}',
           '{"quantization_config": 4}', '{"x": ' + "9" * 5000 + "}", '{"x": "\udc80"}')  # fmt: skip


@pytest.mark.parametrize("text", CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_that_cannot_be_one_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json|is quantised"):
        lay_out(model)


@pytest.mark.parametrize("heads", [None, True, -1, "8", 1.5, [], BIG, {}])
def test_numbers_of_the_wrong_type_in_a_config_end_no_command_with_a_traceback(model: Path, heads: object) -> None:
    config = {"model_type": "llama", "num_attention_heads": heads, "num_hidden_layers": heads, "hidden_size": heads}
    config |= {"layer_types": heads, "text_config": heads, "max_position_embeddings": heads, "head_dim": heads}
    (model / "config.json").write_text(json.dumps(config))
    path = model.parent / "config.yaml"
    path.write_text(f"run: {{name: a, num_updates: 1}}\nmodel: {{path: {model}}}\ntask: {{env: lab}}\n")
    done = CliRunner().invoke(app, ["plan", str(path), "--tokens-per-episode", "100"])
    assert done.exit_code == 0, done.output


INDICES = ("", "[]", "{}", DEEP, '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}',
           '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}',
           '{"weight_map": {"a": "x/model.safetensors"}}', '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": ""}}',
           '{"weight_map": {"a": "config.json"}}', '{"weight_map": {"a": "none.safetensors"}}',
           '{"weight_map": {"a": "model.safetensors"}}', '{"weight_map": {"a": "\\ud800.safetensors"}}',
           '{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}',
           '{"weight_map": {"a": "a\\u0000.safetensors"}}', '{"weight_map": {"a": "folder.safetensors"}}')  # fmt: skip


@pytest.mark.parametrize("text", INDICES, ids=range(len(INDICES)))
def test_an_index_that_points_elsewhere_is_refused(model: Path, text: str) -> None:
    (model / "folder.safetensors").mkdir()
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index|none\.safetensors|folder\.safetensors"):
        lay_out(model)


def test_a_tensor_in_two_files_is_refused(model: Path) -> None:
    small_checkpoint.save(model, small_checkpoint.values(), "other.safetensors")
    files = {NAME: "model.safetensors", "model.norm.weight": "other.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"is in model\.safetensors and in other\.safetensors"):
        lay_out(model)


# --- beside the library -------------------------------------------------------------------------------------------


def library_reads(path: Path) -> bool:
    from safetensors import SafetensorError, deserialize

    try:
        deserialize(path.read_bytes())
    except (SafetensorError, ValueError, TypeError):
        return False
    return True


def test_every_file_we_accept_is_accepted_by_the_safetensors_library(tmp_path: Path) -> None:
    """400 files with one to three changes anywhere in length, header and the first of the data."""
    pytest.importorskip("safetensors")
    write_tiny_llama(tmp_path)
    path, rng = tmp_path / "model.safetensors", random.Random(1)
    header, body = read(path)
    few = dict(list(header.items())[:4])  # a short header, so that every part of it is hit
    names = sorted((name for name in few if name != "__metadata__"), key=lambda name: few[name]["data_offsets"])
    end = 0
    for name in names:
        begin, stop = few[name]["data_offsets"]
        few[name]["data_offsets"] = [end, end := end + stop - begin]
    write(path, few, body[:end])
    whole = path.read_bytes()
    num_read = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(8 + len(json.dumps(few)) + 4)
            change = rng.choice(["flip", "digit", "cut", "insert"])
            if change == "flip":
                data[place] ^= 1 << rng.randrange(8)
            elif change == "digit":
                data[place] = rng.choice(b'0123456789",:[]{}- ')
            elif change == "cut":
                del data[place]
            else:
                data.insert(place, rng.choice(b'0123456789",:[]{}- '))
        path.write_bytes(data)
        try:
            lay_out(tmp_path)
        except ModelError:
            continue
        num_read += 1
        assert library_reads(path), bytes(data[:400])
    assert 5 < num_read < 200  # changed names are read, as the library reads them


def test_a_file_that_the_library_writes_is_read_whatever_it_holds(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    values = small_checkpoint.values()
    import numpy as np

    extra = {"a.position_ids": np.arange(7), "b.mask": np.ones(3, bool), "empty.bias": np.zeros((0, 5), np.float32)}
    (tmp_path / "config.json").write_text("{}")
    numpy.save_file({**values, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    arena = Arena.from_pretrained(tmp_path)
    assert set(arena.names) == {*values, "empty.bias"}
    assert all(np.array_equal(arena.tensor(name), value) for name, value in values.items())
