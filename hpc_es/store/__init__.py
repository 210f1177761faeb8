"""What a run leaves behind: the journal (the truth), run.h5 (derived from it), and how to read them."""

from hpc_es.store.read import Run, read

__all__ = ["Run", "read"]
