"""Post-training of LLM agents by evolution strategies on Slurm clusters.

`load_config`, `run`, `submit`, `attach`, `read`, `read_traces`, `replay`, `report`, `plots` and `Arena` are all that a
notebook needs (see hpc_es/api.py). They are imported when they are first used, so that `import hpc_es` needs neither
torch nor numpy.
"""

from typing import TYPE_CHECKING, Any

from hpc_es.version import __version__ as __version__

__all__ = ["Arena", "attach", "load_config", "plots", "read", "read_traces", "replay", "report", "run", "submit"]

if TYPE_CHECKING:
    from hpc_es.api import Arena, attach, load_config, plots, read, read_traces, replay, report, run, submit


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib  # here, since names of this module are what it exports

    return getattr(importlib.import_module("hpc_es.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
