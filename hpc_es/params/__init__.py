"""The parameters theta: the arena that holds them and the checkpoints that they are read from and written to."""

from hpc_es.params.arena import Arena
from hpc_es.params.layout import check_memory, num_bytes
from hpc_es.params.report import UpdateReport, combine

__all__ = ["Arena", "UpdateReport", "check_memory", "combine", "num_bytes"]
