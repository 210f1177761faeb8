"""WebShop's text environment: find and buy, in a shop of many products, what an instruction asks for."""

from hpc_es.envs.webshop.catalogue import Catalogue

__all__ = ["Catalogue"]
