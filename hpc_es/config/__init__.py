"""The configuration of a run: its schema, and how it is read, checked, written and compared."""

from hpc_es.config.load import (
    Difference,
    Loaded,
    compare,
    config_digest,
    flatten,
    from_record,
    load,
    refuse_another,
    refuse_moved,
    save,
    settle,
)
from hpc_es.config.schema import Config

__all__ = [
    "Config",
    "Difference",
    "Loaded",
    "compare",
    "config_digest",
    "flatten",
    "from_record",
    "load",
    "refuse_another",
    "refuse_moved",
    "save",
    "settle",
]
