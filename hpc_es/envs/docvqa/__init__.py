"""Questions about scanned pages: DocVQA's own, or made-up ones that are drawn here."""

from hpc_es.envs.docvqa.env import DocVqa

__all__ = ["DocVqa"]
