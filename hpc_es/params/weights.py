"""Read and write safetensors files by memory map, without torch.

Invariant: `scan` returns each trainable-in-principle tensor of a checkpoint once, under its canonical name (the one
in the safetensors; where the config ties the output head to the embedding, only the embedding). What it returns is
known to lie inside its file. Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc_es.errors import ModelError
from hpc_es.noise import Array

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
"""Stored types that theta can hold exactly; bfloat16 as its bits."""

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file."""

    name: str
    dtype: str
    """As the format spells it: F32, BF16, I64, ..."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """In bytes, from the start of the file."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def raw(self) -> Array:
        """The stored elements, flat and mapped; only for the types in FLOATS. Errors: ModelError when the file has gone
        or shrunk since it was scanned, as a checkpoint does that is pruned meanwhile."""
        if self.size == 0:
            return np.empty(0, FLOATS[self.dtype])
        try:
            return np.memmap(self.file, FLOATS[self.dtype], mode="r", offset=self.offset, shape=(self.size,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.file} can no longer be read ({error})") from error

    def read_into(self, out: Array) -> None:
        """Fill out (fp32, flat) with the exact values."""
        if self.dtype == "BF16":
            np.left_shift(self.raw(), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        else:
            out[:] = self.raw()


def scan(folder: Path) -> list[Stored]:
    """Floating tensors of a Hugging Face folder, sorted by name.

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
    """config.json of a Hugging Face folder. Errors: ModelError."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"model.path {folder} is no folder; `hpc-es model get` fetches a model, or name a local one")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; a Hugging Face model folder is needed") from None
    except ValueError as error:
        raise ModelError(f"{path} is no JSON ({error}); fetch the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold an object; fetch the model again")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multi-modal config, or an empty one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def scan_file(path: Path) -> list[Stored]:
    """Every tensor of one safetensors file. Errors: ModelError when it is missing, damaged or truncated."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, total - 8):
                raise ModelError(f"{path} is truncated or no safetensors file ({total} bytes); fetch it again")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = [
            Stored(name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        ]
        ends = [8 + length + entry["data_offsets"][1] for entry in header.values()]
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); fetch the model again") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"the header of {path} is damaged ({error}); fetch it again") from error
    for tensor, end in zip(tensors, ends, strict=True):
        if not 8 + length <= tensor.offset <= end <= total:
            raise ModelError(
                f"{path} is truncated or damaged: {tensor.name} ends at byte {end} of {total}; fetch it again"
            )
        known = FLOATS.get(tensor.dtype)
        if known and end - tensor.offset != tensor.size * known.itemsize:
            raise ModelError(f"{path}: {tensor.name} has {end - tensor.offset} bytes for shape {tensor.shape}")
    return tensors


class Spec(NamedTuple):
    """One tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write(path: Path, specs: Sequence[Spec], elements: Callable[[str], Array]) -> None:
    """Write a safetensors file; elements(name) gives one tensor at a time, in its type. The caller syncs.

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
        weight_map: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be used ({error}); fetch the model again") from error
    tensors = {tensor.name: tensor for file in sorted(set(weight_map.values())) for tensor in scan_file(folder / file)}
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise ModelError(f"{folder}: {missing[0]} is in the index and in no file ({len(missing)} such tensors)")
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
    """Drop a stored head that is the embedding. A config that says nothing about tying leaves it to the bits."""
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
