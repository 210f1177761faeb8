"""The goals of a catalogue: what a buyer is asked to find, and the price limit.

Goals are created on access, because the full catalogue has millions. Invariant: prices, price limits and the order of
goals are those that the original draws after `random.seed(seed)`: one price per product in the order of the file, then
one limit per product (synthetic) or per instruction (human), then a shuffle with seed 233. Source: WebShop's
`engine/goal.py` (Yao et al., 2022).
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import msgspec
import numpy as np

from hpc_es.envs.webshop.products import HumanInstruction, Product
from hpc_es.envs.webshop.shelf import Arrays, Shelf

Goal = dict[str, Any]
Kind = Literal["synthetic", "human"]

SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000
"""The price limit of a product that is too expensive for the original's list of limits."""
_LIMITS = [10.0 * tens for tens in range(1, 100)]


def draw(shelf: Shelf, kind: Kind, seed: int) -> Arrays:
    """Everything random about the goals: `prices` by product, `limits` by draw, and the `order` of the goals."""
    rng = random.Random(seed)
    low, high = shelf.arrays["low"].tolist(), shelf.arrays["high"].tolist()
    prices = [a if b != b else rng.uniform(a, b) for a, b in zip(low, high, strict=True)]
    limits = [_limit(prices[product], rng) for product in shelf.arrays[f"{kind}_draws"].tolist()]
    order = array("i", range(int(shelf.arrays[f"{kind}_goals"].sum())))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return {
        "prices": np.array(prices, np.float64),
        "limits": np.array(limits, np.float64),
        "order": np.array(order, np.int32),
    }


def _limit(price: float, rng: random.Random) -> float:
    above = [limit for limit in _LIMITS if limit > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


class Goals(Sequence[Goal]):
    """All goals in the original's order; each is a dict with the original's fields."""

    def __init__(self, shelf: Shelf, kind: Kind, drawn: Arrays) -> None:
        self._shelf, self._kind = shelf, kind
        self._order, self._limits = drawn["order"], drawn["limits"]
        self._draws = shelf.arrays[f"{kind}_draws"]
        self._ends = np.cumsum(shelf.arrays[f"{kind}_goals"], dtype=np.int64)
        self._counts: dict[str, int] = msgspec.msgpack.decode(shelf.arrays["attribute_counts"].tobytes())

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Goal: ...
    @overload
    def __getitem__(self, index: slice) -> list[Goal]: ...
    def __getitem__(self, index: int | slice) -> Goal | list[Goal]:
        if isinstance(index, slice):
            return [self._goal(int(number)) for number in self._order[index]]
        return self._goal(int(self._order[index]))

    def __iter__(self) -> Iterator[Goal]:
        return (self._goal(int(number)) for number in self._order)

    def _goal(self, number: int) -> Goal:
        draw = int(np.searchsorted(self._ends, number, side="right"))
        product = self._shelf.product(int(self._draws[draw]))
        first = int(self._ends[draw - 1]) if draw else 0
        limit = float(self._limits[draw])
        if self._kind == "human":
            return self._human(product, self._instruction(product, draw), limit)
        return self._synthetic(product, number - first, limit)

    def _instruction(self, product: Product, draw: int) -> HumanInstruction:
        first = int(np.searchsorted(self._draws, self._draws[draw], side="left"))
        return [one for one in product.human if one.attributes][draw - first]

    def _human(self, product: Product, instruction: HumanInstruction, limit: float) -> Goal:
        text = instruction.text.strip(".") + _price_text(limit)
        goal = _goal(product, text, instruction.attributes, limit, instruction.options)
        return {**goal, "weight": 1}

    def _synthetic(self, product: Product, combination: int, limit: float) -> Goal:
        options = _combination(product.options, combination)
        listed = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = f"{product.instruction}{' with ' if listed else ''}{listed}{_price_text(limit)}"
        attributes = product.instruction_attributes
        weight = sum(1.0 / self._counts[attribute] for attribute in attributes) / len(attributes)
        return {**_goal(product, text, attributes, limit, options), "weight": weight}


def _goal(
    product: Product, text: str, attributes: list[str], limit: float, options: dict[str, str] | list[str]
) -> Goal:
    return {
        "asin": product.asin,
        "category": product.category,
        "query": product.query,
        "name": product.title,
        "product_category": product.product_category,
        "instruction_text": text,
        "attributes": list(attributes),
        "price_upper": limit if limit < NO_LIMIT else NO_LIMIT,
        "goal_options": options if isinstance(options, dict) else list(options),
    }


def _combination(options: dict[str, list[str]], number: int) -> dict[str, str]:
    """Combination `number` of option values, counted with the last option's values changing fastest."""
    chosen = {}
    for name in sorted(options, reverse=True):
        number, place = divmod(number, len(options[name]))
        chosen[name] = options[name][place]
    return {name: chosen[name] for name in sorted(chosen)}


def _price_text(limit: float) -> str:
    return f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""
