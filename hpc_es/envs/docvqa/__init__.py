"""Questions about document pages: scans from the DocVQA challenge, or generated pages."""

from hpc_es.envs.docvqa.env import DocVqa

__all__ = ["DocVqa"]
