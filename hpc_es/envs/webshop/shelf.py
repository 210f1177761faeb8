"""A catalogue's products as arrays, in memory or mapped from disk, so that all processes of a node share them.

Invariant: arrays on disk are complete (they are renamed into place) and belong to exactly the files they were made from
(the folder's name is a digest of the files' names, sizes and times). A small catalogue is never written to disk.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpc_es.envs.webshop import products
from hpc_es.envs.webshop.products import MAX_ASIN, Files, Product

Arrays = dict[str, NDArray[Any]]

FORMAT = 1
"""Version of the files on disk; increase it when their contents change."""
SMALL_BYTES = 32 << 20
"""A catalogue with a smaller item file is kept in memory, without a cache on disk."""
_NUM_CACHED_PRODUCTS = 1024


def cache_folder(files: Files, cache_dir: Path | None) -> Path | None:
    """The folder of these files' arrays; None if they are small enough for each process to build its own."""
    if files.items.stat().st_size < SMALL_BYTES:
        return None
    identity = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = blake2b(repr((FORMAT, identity)).encode(), digest_size=8).hexdigest()
    return (cache_dir or Path.home() / ".cache" / "hpc_es" / "webshop") / digest


def kept(folder: Path | None, name: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes: built in memory without a folder, else mapped from it and built only once."""
    if folder is None:
        return build()
    final = folder / name
    if not final.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():
                _write(final, build())
    return {path.stem: np.load(path, mmap_mode="r") for path in final.glob("*.npy")}


def _write(final: Path, arrays: Arrays) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=final.name, dir=final.parent))
    try:
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        os.rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Shelf:
    """All products, by their number in file order."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._decode = msgspec.msgpack.Decoder(Product).decode
        self.product = lru_cache(_NUM_CACHED_PRODUCTS)(self._product)

    def _product(self, number: int) -> Product:
        ends = self.arrays["record_ends"]
        start = int(ends[number - 1]) if number else 0
        return self._decode(self.arrays["records"][start : int(ends[number])].tobytes())

    def __len__(self) -> int:
        return len(self.arrays["asins"])

    def __iter__(self) -> Iterator[Product]:
        return (self._product(number) for number in range(len(self)))

    def asin(self, number: int) -> str:
        return str(self.arrays["asins"][number])

    def number(self, asin: str) -> int | None:
        """The number of the product with this ASIN."""
        asins, order = self.arrays["asins"], self.arrays["by_asin"]
        place = int(np.searchsorted(asins, asin, sorter=order))
        if place == len(order) or asins[order[place]] != asin:
            return None
        return int(order[place])

    def rank(self) -> NDArray[np.int32]:
        """Each product's position in the order of ASINs."""
        rank = np.empty(len(self), np.int32)
        rank[self.arrays["by_asin"]] = np.arange(len(self), dtype=np.int32)
        return rank


def open_shelf(files: Files, folder: Path | None) -> Shelf:
    """The products of these files. Errors: ConfigError."""
    return Shelf(kept(folder, "products", lambda: build(products.read(files))))


def build(found: Iterable[Product]) -> Arrays:
    """Build the columns of all products.

    A draw is one price limit, for one goal or for all goals of one product: `<kind>_draws` holds the product's number
    and `<kind>_goals` the number of goals that share the limit.
    """
    records, ends, asins = bytearray(), [], []
    low, high = [], []
    draws: dict[str, list[int]] = {"synthetic": [], "human": []}
    goals: dict[str, list[int]] = {"synthetic": [], "human": []}
    attributes: Counter[str] = Counter()
    for number, product in enumerate(found):
        records += _encoded(product)
        ends.append(len(records))
        asins.append(product.asin)
        low.append(product.prices[0])
        high.append(product.prices[-1] if len(product.prices) > 1 else np.nan)
        if product.instruction is not None:
            num_goals = int(np.prod([len(values) for values in product.options.values()], dtype=np.int64))
            draws["synthetic"].append(number)
            goals["synthetic"].append(num_goals)
            for attribute in product.instruction_attributes:
                attributes[attribute] += num_goals
        num_human = sum(bool(one.attributes) for one in product.human)
        draws["human"] += [number] * num_human
        goals["human"] += [1] * num_human
    arrays: Arrays = {
        "records": np.frombuffer(records, np.uint8),
        "record_ends": np.array(ends, np.int64),
        "asins": np.array(asins, f"U{MAX_ASIN}"),
        "by_asin": np.argsort(np.array(asins, f"U{MAX_ASIN}"), kind="stable").astype(np.int32),
        "low": np.array(low, np.float64),
        "high": np.array(high, np.float64),
        "attribute_counts": np.frombuffer(msgspec.msgpack.encode(dict(attributes)), np.uint8),
    }
    for kind in draws:
        arrays[f"{kind}_draws"] = np.array(draws[kind], np.int32)
        arrays[f"{kind}_goals"] = np.array(goals[kind], np.int32)
    return arrays


def _encoded(product: Product) -> bytes:
    try:
        return msgspec.msgpack.encode(product)
    except UnicodeEncodeError:  # half an emoji at the end of a shortened text becomes a question mark
        whole = json.dumps(msgspec.to_builtins(product), ensure_ascii=False).encode(errors="replace")
        return msgspec.msgpack.encode(msgspec.json.decode(whole, type=Product))
