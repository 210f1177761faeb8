"""One catalogue with its products, goals, prices, search and reward; all episodes of a process share it.

Invariant: read-only after construction; every result is a function of the files, the seed and the arguments, except for
the random search `<r>`, which uses the caller's generator.

Measured with 1.18 million products, the size of the full catalogue (tools/bench/webshop.py, two busy cores): indexing,
once per node, takes 6.7 minutes, up to 4.9 GB of memory and 2.7 GB on disk. After that, a process is ready in 2.3 s,
uses 34 MiB besides the memory that all processes map together, and searches in 43 ms.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from hpc_es.data import data_path
from hpc_es.envs.webshop import goals, products
from hpc_es.envs.webshop.analysis import terms
from hpc_es.envs.webshop.goals import Goal, Goals, draw
from hpc_es.envs.webshop.index import Postings, PostingsBuilder, Ranking
from hpc_es.envs.webshop.products import Product
from hpc_es.envs.webshop.reward import Reward, reward
from hpc_es.envs.webshop.shelf import Arrays, Shelf, cache_folder, kept, open_shelf
from hpc_es.errors import ConfigError, EnvError

MAX_HITS = 50
_NUM_CACHED_SEARCHES = 1024
_making = threading.Lock()
_FIELDS = fields(Postings)


class Catalogue:
    def __init__(
        self,
        data_dir: Path | str | None = None,
        seed: int = 0,
        *,
        goals: goals.Kind = "synthetic",
        cache_dir: Path | str | None = None,
    ) -> None:
        """Open the catalogue in `data_dir`, or the small invented one of this package.

        seed: seed of prices and price limits, as in the original's `random.seed(seed)`.
        goals: `human` needs items_human_ins.json.
        cache_dir: folder for the arrays of a large catalogue, best on a local disk; default ~/.cache/hpc_es/webshop.
        Errors: ConfigError when files are missing or cannot be read.
        """
        files = products.find(data_path(Path(data_dir)) if data_dir is not None else made_up())
        if goals == "human" and files.human is None:
            raise ConfigError(
                f"goals=human needs items_human_ins.json in {files.items.parent}; add it, or use goals=synthetic"
            )
        self._folder = cache_folder(files, Path(cache_dir) if cache_dir is not None else None)
        self._shelf = open_shelf(files, self._folder)
        drawn = kept(self._folder, f"goals-{goals}-{seed}", lambda: draw(self._shelf, goals, seed))
        self.goals: Sequence[Goal] = Goals(self._shelf, goals, drawn)
        self._prices = drawn["prices"]
        self._indexing = threading.Lock()
        self._index: tuple[Ranking, Postings] | None = None
        self._ranked = lru_cache(_NUM_CACHED_SEARCHES)(self._rank)
        if self._folder is not None:  # the first time takes minutes, so not in the middle of an episode
            self._indexed()

    def __len__(self) -> int:
        """Number of products."""
        return len(self._shelf)

    def product(self, asin: str) -> Product:
        """The product with this ASIN. Errors: EnvError if there is none."""
        return self._shelf.product(self._number(asin))

    def price(self, asin: str) -> float:
        """The product's price in dollars, drawn from its range with the catalogue's seed. Errors: EnvError."""
        return float(self._prices[self._number(asin)])

    def search(self, query: str, rng: random.Random | None = None) -> list[str]:
        """ASINs that a search for `query` finds, best first.

        At most 50 by BM25; all products of an attribute, category or query for the special queries `<a>`, `<c>` and
        `<q>`; 50 random products for `<r>`.
        """
        return [self._shelf.asin(int(number)) for number in self.hits(query, rng)]

    def hits(self, query: str, rng: random.Random | None = None) -> Sequence[int]:
        """Like `search`, with product numbers instead of ASINs."""
        words = query.split(" ")
        if words[0] == "<r>":
            return (rng or random.Random(0)).sample(range(len(self)), min(MAX_HITS, len(self)))
        if words[0] in ("<a>", "<c>", "<q>"):
            rest = words[1].strip() if words[0] == "<c>" and len(words) > 1 else " ".join(words[1:]).strip()
            return self._listed(f"{words[0]}{rest}")
        return self._ranked(query)

    def at(self, number: int) -> Product:
        """The product with this number, as returned by `hits`."""
        return self._shelf.product(number)

    def reward(self, goal: Mapping[str, Any], asin: str, price: float, options: Mapping[str, str]) -> float:
        """Reward, 0 to 1, of buying this product at this price with these options (name to value) for a goal.

        Errors: EnvError for an unknown ASIN, or if the nouns of a title cannot be determined (see `nouns`).
        """
        return self.rewarded(goal, asin, price, options).total

    def rewarded(self, goal: Mapping[str, Any], asin: str, price: float, options: Mapping[str, str]) -> Reward:
        """Like `reward`, with its parts."""
        return reward(self.product(asin), goal, price, options)

    def ceiling(self, goal: Mapping[str, Any]) -> float:
        """Reward of buying exactly what a goal asks for; below 1 for goals that cannot be met."""
        asin, wanted = goal["asin"], goal["goal_options"]
        if not isinstance(wanted, dict):
            wanted = {str(place): value for place, value in enumerate(wanted)}
        return self.reward(goal, asin, self.price(asin), wanted)

    def _number(self, asin: str) -> int:
        number = self._shelf.number(asin)
        if number is None:
            raise EnvError(f"no product has the ASIN {asin!r}")
        return number

    def _rank(self, query: str) -> tuple[int, ...]:
        return tuple(self._indexed()[0].search(query, MAX_HITS).tolist())

    def _listed(self, facet: str) -> list[int]:
        postings = self._indexed()[1]
        where = postings.find(facet)
        return [] if where is None else postings.docs[where].tolist()

    def _indexed(self) -> tuple[Ranking, Postings]:
        """The index; for a small catalogue it is built at the first search, because goals and prices do not need it."""
        with self._indexing:
            if self._index is None:
                arrays = kept(self._folder, "index", lambda: _index(self._shelf))
                text, facets = _postings(arrays, "text"), _postings(arrays, "facets")
                self._index = Ranking(text, self._shelf.rank()), facets
            return self._index


@lru_cache(maxsize=8)
def _made(data_dir: str | None, seed: int, kind: goals.Kind, cache_dir: str | None) -> Catalogue:
    return Catalogue(data_dir, seed, goals=kind, cache_dir=cache_dir)


def shared(data_dir: Path | None, seed: int, kind: goals.Kind, cache_dir: Path | None) -> Catalogue:
    """This process's shared catalogue for these arguments. Errors: those of `Catalogue`."""
    with _making:
        return _made(str(data_dir) if data_dir else None, seed, kind, str(cache_dir) if cache_dir else None)


def made_up() -> Path:
    """The folder of this package's invented catalogue."""
    return Path(str(resources.files("hpc_es.envs.webshop") / "data"))


def _index(shelf: Shelf) -> Arrays:
    text, facets = PostingsBuilder(), PostingsBuilder()
    for product in shelf:
        text.add(terms(product.indexed_text))
        facets.add([f"<c>{product.category}", f"<q>{product.query}", *{f"<a>{name}" for name in product.attributes}])
    built = {"text": text.build(), "facets": facets.build()}
    return {f"{prefix}_{field.name}": getattr(built[prefix], field.name) for prefix in built for field in _FIELDS}


def _postings(arrays: Arrays, prefix: str) -> Postings:
    return Postings(**{field.name: arrays[f"{prefix}_{field.name}"] for field in _FIELDS})
