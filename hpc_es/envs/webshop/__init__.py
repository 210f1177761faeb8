"""WebShop's text environment: find and buy, in a shop of many products, what an instruction asks for.

Files: `catalogue` is one catalogue, made of `products` (the original's files), `shelf` (products as arrays, in memory
or mapped from disk), `goals`, `index` (search; its terms by `analysis` and `porter`) and `reward` (texts compared by
`fuzzy` and `nouns`). `pages` knows what a page shows and where a click leads, `prompt` what the model sees, and `env`
plays.
"""

from hpc_es.envs.webshop.catalogue import Catalogue
from hpc_es.envs.webshop.env import WebShop

__all__ = ["Catalogue", "WebShop"]
