"""WebShop's text environment: find and buy the product that an instruction asks for.

Files: `catalogue` combines `products` (reads the original's files), `shelf` (products as arrays, in memory or mapped
from disk), `goals`, `index` (search; terms by `analysis` and `porter`) and `reward` (texts compared by `fuzzy` and
`nouns`). `pages` defines the pages and their links, `prompt` writes the prompts, and `env` is the environment.
"""

from hpc_es.envs.webshop.catalogue import Catalogue
from hpc_es.envs.webshop.env import WebShop

__all__ = ["Catalogue", "WebShop"]
