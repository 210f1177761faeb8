"""Read safetensors files by memory map, and write them, without torch.

Invariant: `scan` returns each floating-point tensor of a checkpoint once, under its canonical name (its name in the
safetensors files; if the config ties the output head to the embedding, only the embedding is returned). Every returned
tensor lies inside its file. Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpc_es.errors import ModelError
from hpc_es.files import read_bytes
from hpc_es.noise import Array

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
"""Stored types that theta can hold exactly, with their numpy types; bfloat16 is kept as its bits."""

_SUFFIX = ".safetensors"
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_MAX_HEADER = 100 * 2**20
_MAX_SIZE = 2**48
_MAX_DIMENSIONS = 32
"""Maximum number of dimensions in numpy before version 2."""
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of one element. For types that are not listed, only the position of the tensor is checked."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file."""

    name: str
    dtype: str
    """Type as the format names it: F32, BF16, I64, ..."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Bytes from the start of the file."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def raw(self) -> Array:
        """The stored elements as a flat memory map; only for the types in FLOATS.

        Errors: ModelError when the file has vanished or shrunk since the scan, for example because the checkpoint was
        pruned.
        """
        if self.size == 0:
            return np.empty(0, FLOATS[self.dtype])
        try:
            return np.memmap(self.file, FLOATS[self.dtype], mode="r", offset=self.offset, shape=(self.size,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.file} can no longer be read ({error})") from error

    def read_into(self, out: Array) -> None:
        """Fill `out` (fp32, flat) with the exact values."""
        if self.dtype == "BF16":
            np.left_shift(self.raw(), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[:] = self.raw()


def scan(folder: Path) -> list[Stored]:
    """The floating-point tensors of a Hugging Face folder, sorted by name.

    Errors: ModelError when files are missing, truncated or quantised, or tied tensors differ.
    """
    config = read_config(folder)
    if quantisation := config.get("quantization_config") or text_config(config).get("quantization_config"):
        method = quantisation.get("quant_method", "unknown method") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"{folder} is quantised ({method}): noise cannot be added to such weights; use the original checkpoint"
        )
    found = [tensor for tensor in _listed(folder) if _is_weight(tensor, folder)]
    return sorted(_without_tied_head(found, config, folder), key=lambda tensor: tensor.name)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder. Errors: ModelError."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"model.path {folder} is not a directory; run `hpc-es model get`, or name a local model")
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; a Hugging Face model folder is needed") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); fetch the model again") from None
    config = _json_object(text, str(path))
    for part in (config, text_config(config)):
        if not isinstance(part.get("tie_word_embeddings"), (bool, type(None))):
            raise ModelError(
                f"{path}: tie_word_embeddings={reprlib.repr(part['tie_word_embeddings'])} must be true, false or null"
            )
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multi-modal config; empty if there is none."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def scan_file(path: Path) -> list[Stored]:
    """Every tensor of one safetensors file.

    Refuses what the safetensors library refuses: an invalid header, tensors that overlap or leave gaps, and sizes that
    do not match type and shape. Errors: ModelError naming the file and the tensor, also when the file is missing.
    """
    try:
        total = path.stat().st_size
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file; fetch the model again")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, total - 8):
                raise ModelError(f"{path} is truncated or not a safetensors file ({total} bytes); fetch it again")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); fetch the model again") from error
    if not text.startswith(b"{"):
        raise ModelError(f"the header of {path} is damaged (it begins with {text[:8]!r}); fetch it again")
    header = _json_object(text, f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"the header of {path} is damaged (__metadata__ holds more than text); fetch it again")
    places = [_entry(name, entry, path, 8 + length) for name, entry in header.items()]
    _refuse_gaps(places, path, 8 + length, total)
    return [tensor for tensor, _ in places]


def _entry(name: str, entry: Any, path: Path, begin: int) -> tuple[Stored, int]:
    """A tensor of a header, and its end in the file. Errors: ModelError."""

    def refuse(why: str) -> NoReturn:
        raise ModelError(f"{path} is damaged: {name[:200]!a} {why}; fetch it again")

    if not _is_text(name):
        refuse("is not valid text")
    if not isinstance(entry, dict):
        refuse(f"has {reprlib.repr(entry)} instead of type, shape and offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _is_text(dtype):
        refuse(f"has the type {reprlib.repr(dtype)}")
    if not isinstance(shape, list) or not all(_is_size(count) for count in shape) or len(shape) > _MAX_DIMENSIONS:
        refuse(f"has the shape {reprlib.repr(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        refuse(f"has the offsets {reprlib.repr(offsets)}")
    start, end = offsets
    tensor = Stored(name, dtype, tuple(shape), path, begin + start)
    if end < start:
        refuse(f"ends at byte {end}, before it starts at {start}")
    bits = _BITS.get(dtype)
    if bits is not None and tensor.size * bits != 8 * (end - start):
        refuse(f"has {end - start} bytes for {dtype} and shape {reprlib.repr(tensor.shape)}")
    return tensor, begin + end


def _refuse_gaps(places: Sequence[tuple[Stored, int]], path: Path, begin: int, total: int) -> None:
    """Refuse tensors that do not fill the file from byte `begin` to `total` without gap or overlap. Errors:
    ModelError."""
    at, before = begin, "the header"
    for tensor, end in sorted(places, key=lambda place: (place[0].offset, place[1])):
        if tensor.offset != at:
            where = f"overlaps {before!a}" if tensor.offset < at else f"leaves a gap after {before!a}"
            raise ModelError(f"{path} is damaged: {tensor.name[:200]!a} {where}; fetch it again")
        at, before = end, tensor.name[:200]
    if at != total:
        raise ModelError(
            f"{path} is truncated or damaged: the last tensor, {before!a}, ends at byte {at} of {total}; fetch it again"
        )


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. Errors: ModelError for anything else, and for a duplicate key."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is damaged ({str(error)[:200]}); fetch it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{what} is damaged: it must hold an object, not {type(found).__name__}; fetch it again")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:200]!a} appears twice")
        found[name] = value
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def _is_text(name: str) -> bool:
    """Whether a name has no lone surrogates, which cannot be encoded and so neither hashed nor written."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


class Spec(NamedTuple):
    """One tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write(path: Path, specs: Sequence[Spec], elements: Callable[[str], Array]) -> None:
    """Write a safetensors file; elements(name) returns one tensor at a time, in its type. The caller syncs the file.

    Errors: OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in specs:
        begin, end = end, end + math.prod(shape) * FLOATS[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, *_ in specs:
            file.write(np.ascontiguousarray(elements(name)).reshape(-1).view(np.uint8).data)


def _listed(folder: Path) -> list[Stored]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ModelError(
                f"{folder} has no model.safetensors and no model.safetensors.index.json; "
                "save the model with save_pretrained(..., safe_serialization=True)"
            )
        return scan_file(single)
    try:
        text = read_bytes(index)
    except OSError as error:
        raise ModelError(f"{index} cannot be read ({error.strerror}); fetch the model again") from error
    weight_map = _json_object(text, str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is damaged: weight_map must map tensors to files; fetch it again")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not _is_text(file)
            or "\0" in file
            or Path(file).name != file
            or not file.endswith(_SUFFIX)
        ):
            place = reprlib.repr(file)
            raise ModelError(f"{index}: {name[:200]!a} must be in a {_SUFFIX} file of this folder, not in {place}")
    tensors = dict[str, Stored]()
    for file in sorted(set(weight_map.values())):
        for tensor in scan_file(folder / file):
            if (other := tensors.setdefault(tensor.name, tensor)) is not tensor:
                raise ModelError(f"{folder}: {tensor.name} is in {other.file.name} and in {file}; save the model again")
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise ModelError(
            f"{folder}: {missing[0]!a} is in the index but in no file ({len(missing)} such tensors); fetch it again"
        )
    return list(tensors.values())


def _is_weight(tensor: Stored, folder: Path) -> bool:
    if tensor.dtype in FLOATS:
        return True
    if tensor.dtype.startswith(("F", "BF")) or "weight" in tensor.name.rpartition(".")[2]:
        raise ModelError(
            f"{folder}: {tensor.name} is stored as {tensor.dtype}; theta needs F32, BF16 or F16: "
            "use the unquantised checkpoint, or convert it"
        )
    return False


def _without_tied_head(tensors: list[Stored], config: dict[str, Any], folder: Path) -> list[Stored]:
    """Drop a stored output head that equals the embedding, unless config.json says that they are not tied."""
    tied = text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
    head = next((t for t in tensors if t.name == _HEAD or t.name.endswith("." + _HEAD)), None)
    if head is None or tied is False:
        return tensors
    embedding = next((t for t in tensors if t.name.endswith(_EMBEDDINGS) and t.shape == head.shape), None)
    if embedding is not None and _equal(head, embedding):
        return [tensor for tensor in tensors if tensor is not head]
    if tied:
        other = embedding.name if embedding else "any embedding"
        raise ModelError(
            f"{folder}: config.json ties the head to the embedding, but {head.name} differs from {other}; "
            "set tie_word_embeddings to false, or save the model again with one of them"
        )
    return tensors


def _equal(one: Stored, other: Stored) -> bool:
    values = np.empty((2, one.size), np.float32)
    one.read_into(values[0])
    other.read_into(values[1])
    return bool(np.array_equal(values[0].view(np.uint32), values[1].view(np.uint32)))
