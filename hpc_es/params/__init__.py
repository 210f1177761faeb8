"""theta: the arena that holds it, the checkpoints it is read from and written to."""

from hpc_es.params.arena import Arena, UpdateReport, combine
from hpc_es.params.layout import check_memory, num_bytes

__all__ = ["Arena", "UpdateReport", "check_memory", "combine", "num_bytes"]
