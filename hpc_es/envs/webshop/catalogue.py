"""One catalogue: its products, goals, prices, search and reward. All episodes of a process share it.

Invariant: read-only after it was made; every answer is a function of the files, the seed and the arguments, apart from
the random search `<r>`, which takes its generator from the caller.

1.18 million products, as many as the full catalogue has (tools/bench/webshop.py, two busy cores): indexed once per node
in 6.7 minutes with at most 4.9 GB of memory and 2.7 GB on disk; then a process is ready after 2.3 s, has 34 MiB of its
own besides what all processes map together, and searches in 43 ms.
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
        """The catalogue in `data_dir`, or the small made-up one of this package.

        seed: of prices and price limits, as the original's `random.seed(seed)`.
        goals: `human` needs items_human_ins.json.
        cache_dir: where the arrays of a large catalogue are kept; default ~/.cache/hpc_es/webshop. Choose a local disk.
        Errors: ConfigError when files are missing or cannot be read.
        """
        files = products.find(data_path(Path(data_dir)) if data_dir is not None else made_up())
        if goals == "human" and files.human is None:
            raise ConfigError(f"goals=human needs items_human_ins.json in {files.items.parent}; else goals=synthetic")
        self._folder = cache_folder(files, Path(cache_dir) if cache_dir is not None else None)
        self._shelf = open_shelf(files, self._folder)
        drawn = kept(self._folder, f"goals-{goals}-{seed}", lambda: draw(self._shelf, goals, seed))
        self.goals: Sequence[Goal] = Goals(self._shelf, goals, drawn)
        self._prices = drawn["prices"]
        self._indexing = threading.Lock()
        self._index: tuple[Ranking, Postings] | None = None
        self._ranked = lru_cache(_NUM_CACHED_SEARCHES)(self._rank)
        if self._folder is not None:  # it takes minutes the first time: not in the middle of an episode
            self._indexed()

    def __len__(self) -> int:
        """Number of products."""
        return len(self._shelf)

    def product(self, asin: str) -> Product:
        """Errors: EnvError when there is none with this ASIN."""
        return self._shelf.product(self._number(asin))

    def price(self, asin: str) -> float:
        """What it costs, in dollars: within its range, drawn with the catalogue's seed. Errors: EnvError."""
        return float(self._prices[self._number(asin)])

    def search(self, query: str, rng: random.Random | None = None) -> list[str]:
        """ASINs that a search for `query` lists, best first: at most 50 by BM25; all for the special queries `<a>`,
        `<c>` and `<q>` (attribute, category, query), 50 at random for `<r>`."""
        return [self._shelf.asin(int(number)) for number in self.hits(query, rng)]

    def hits(self, query: str, rng: random.Random | None = None) -> Sequence[int]:
        """As `search`, product numbers in place of ASINs."""
        words = query.split(" ")
        if words[0] == "<r>":
            return (rng or random.Random(0)).sample(range(len(self)), min(MAX_HITS, len(self)))
        if words[0] in ("<a>", "<c>", "<q>"):
            rest = words[1].strip() if words[0] == "<c>" and len(words) > 1 else " ".join(words[1:]).strip()
            return self._listed(f"{words[0]}{rest}")
        return self._ranked(query)

    def at(self, number: int) -> Product:
        """The product with this number, as `hits` gives them."""
        return self._shelf.product(number)

    def reward(self, goal: Mapping[str, Any], asin: str, price: float, options: Mapping[str, str]) -> float:
        """What buying this product at this price with these options (name to value) is worth for a goal, 0 to 1.

        Errors: EnvError for an unknown ASIN, or when the nouns of a title cannot be found (`nouns`).
        """
        return self.rewarded(goal, asin, price, options).total

    def rewarded(self, goal: Mapping[str, Any], asin: str, price: float, options: Mapping[str, str]) -> Reward:
        """As `reward`, with its parts."""
        return reward(self.product(asin), goal, price, options)

    def ceiling(self, goal: Mapping[str, Any]) -> float:
        """What buying exactly what a goal asks for is worth. It is below 1 for goals that nothing can meet."""
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
        """The index; of a small catalogue made at the first search, since goals and prices do not need it."""
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
    """The one catalogue of this process for these arguments. Errors: as `Catalogue`."""
    with _making:
        return _made(str(data_dir) if data_dir else None, seed, kind, str(cache_dir) if cache_dir else None)


def made_up() -> Path:
    """The folder of the catalogue in this package."""
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
