"""The products of a data folder, read from WebShop's own files.

Files, by the original's names, each plain or with `.gz`: `items_shuffle.json` and `items_ins_v2.json`, or the same with
`_1000`; optionally `items_human_ins.json` with human instructions. Products are read one at a time, because the full
file has five gigabytes. Invariant: for repeated ASINs the first product in the file counts; ASINs of more than ten
characters are dropped. Source: WebShop's `engine/engine.py` (Yao et al., 2022).
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any

import msgspec

from hpc_es.errors import ConfigError

_CHUNK = 1 << 22
"""Characters read at a time."""
_MAX_ITEM = 1 << 26
"""Most characters of one product; anything longer means that the file is damaged."""
MAX_ASIN = 10
_UNREADABLE = (OSError, EOFError, ValueError, zlib.error, RecursionError)


class HumanInstruction(msgspec.Struct, frozen=True, array_like=True):
    text: str
    attributes: list[str]
    options: list[str]


class Product(msgspec.Struct, frozen=True, array_like=True):
    asin: str
    category: str
    query: str
    """Lower case; the original compares it to decide whether two products are of the same kind."""
    product_category: str
    """Path of categories, separated by `›`."""
    title: str
    description: str
    bullets: list[str]
    prices: list[float]
    """One price, or the two ends of a range."""
    price_tag: str
    options: dict[str, list[str]]
    """Values by option name, both in lower case."""
    attributes: list[str]
    instruction: str | None
    """Instruction of the synthetic goals."""
    instruction_attributes: list[str]
    human: list[HumanInstruction]

    @property
    def indexed_text(self) -> str:
        """The text that search indexes."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0] if self.bullets else "", options]).lower()


@dataclass(frozen=True)
class Files:
    items: Path
    instructions: Path
    human: Path | None

    def __iter__(self) -> Iterator[Path]:
        yield from (path for path in (self.items, self.instructions, self.human) if path is not None)


def find(data_dir: Path) -> Files:
    """The files of a data folder; the full catalogue is preferred to the one of 1,000. Errors: ConfigError."""
    human = _existing(data_dir / "items_human_ins.json")
    for suffix in ("", "_1000"):
        items = _existing(data_dir / f"items_shuffle{suffix}.json")
        instructions = _existing(data_dir / f"items_ins_v2{suffix}.json")
        if items and instructions:
            return Files(items, instructions, human)
    raise ConfigError(
        f"data_dir={data_dir} has no catalogue: it needs items_shuffle.json and items_ins_v2.json, or "
        "items_shuffle_1000.json and items_ins_v2_1000.json, each plain or with .gz"
    )


def _existing(path: Path) -> Path | None:
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None


def read(files: Files) -> Iterator[Product]:
    """All products, in order. Errors: ConfigError naming the file or the product that cannot be read."""
    instructions = _load(files.instructions)
    human = _load(files.human) if files.human else {}
    seen: set[str] = set()
    for item in _items(files.items):
        try:
            asin = item["asin"]
            if asin == "nan" or len(asin) > MAX_ASIN or asin in seen:
                continue
            seen.add(asin)
            product = _product(item, instructions.get(asin, {}), human.get(asin, []))
        except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation) as error:
            raise ConfigError(f"{files.items}: {str(item)[:80]}... is not a WebShop product: {error!r}") from error
        yield product


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _load(path: Path) -> dict[str, Any]:
    try:
        with _open(path) as file:
            loaded: dict[str, Any] = json.load(file)
    except _UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return loaded


def _items(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of one long JSON list, with only a part of it in memory."""
    decoder = json.JSONDecoder()
    try:
        with _open(path) as file:
            text, at = file.read(_CHUNK), 0
            while True:
                at = _skip(text, at)
                try:
                    item, at = decoder.raw_decode(text, at)
                except ValueError:
                    more = file.read(_CHUNK) if len(text) - at < _MAX_ITEM else ""
                    if not more:
                        if text[at:].strip("] \t\r\n"):
                            raise
                        return
                    text, at = text[at:] + more, 0
                else:
                    yield item
    except _UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _skip(text: str, at: int) -> int:
    """The position after the brackets, commas and spaces between two objects."""
    while at < len(text) and text[at] in "[, \t\r\n":
        at += 1
    return at


def _product(item: dict[str, Any], instruction: dict[str, Any], human: list[dict[str, Any]]) -> Product:
    prices, price_tag = _price(item.get("pricing"))
    bullets = item["small_description"]
    return Product(
        asin=item["asin"],
        category=item["category"],
        query=item["query"].lower().strip(),
        product_category=item["product_category"],
        title=item["name"],
        description=item["full_description"],
        bullets=bullets if isinstance(bullets, list) else [bullets],
        prices=prices,
        price_tag=price_tag,
        options=_options(item["customization_options"]),
        attributes=instruction.get("attributes", ["DUMMY_ATTR"]),
        instruction=instruction.get("instruction"),
        instruction_attributes=instruction.get("instruction_attributes") or [],
        human=[
            HumanInstruction(one["instruction"], one["instruction_attributes"], one["instruction_options"])
            for one in human
        ],
    )


def _price(pricing: str | None) -> tuple[list[float], str]:
    if not pricing:
        return [100.0], "$100.0"
    prices = [float(Decimal(re.sub(r"[^\d.]", "", part))) for part in pricing.split("$")[1:]][:2]
    if not prices:
        raise ValueError(f"pricing {pricing!r} has no dollar sign")
    return prices, " to ".join(f"${price}" for price in prices)


def _options(customization: dict[str, Any] | str | None) -> dict[str, list[str]]:
    if not isinstance(customization, dict):
        return {}
    return {
        name.lower(): [content["value"].strip().replace("/", " | ").lower() for content in contents]
        for name, contents in customization.items()
        if contents is not None
    }
