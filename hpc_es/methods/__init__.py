"""Methods by name: how candidates are made, and what a cohort becomes.

To add a method, subclass `hpc_es.methods.base.Method` and name it in `_BUILT_IN`. One of your own needs no change here:
`method: package.module:Class`.
"""

import difflib
import importlib
import inspect
from typing import TYPE_CHECKING

from hpc_es.errors import ConfigError
from hpc_es.quoting import quote_error

if TYPE_CHECKING:
    from hpc_es.config.schema import Config
    from hpc_es.methods.base import Method, Tasks

_BUILT_IN = {"es": "hpc_es.methods.es.method:EvolutionStrategies"}
"""Modules are imported when a method is made, not before: an arena needs an optimiser's names, and no configuration."""


def make(config: "Config", tasks: "Tasks | None" = None) -> "Method":
    """The method of a run. `tasks` may be left out where nothing is assigned. Errors: ConfigError."""
    from hpc_es.methods.base import Tasks

    method = find(config.method)
    if method.trains and config.es.optimiser.kind != "none":
        raise ConfigError(
            f"es.optimiser.kind={config.es.optimiser.kind} is for updates by seeds, and method={config.method} has a "
            "trainer: use es.optimiser.kind=none"
        )
    return method(config, tasks or Tasks(0, 0))


def find(name: str) -> "type[Method]":
    """The class of a method; its module is imported. Errors: ConfigError when there is none."""
    from hpc_es.methods.base import Method

    listed = ", ".join(sorted(_BUILT_IN))
    if name not in _BUILT_IN and ":" not in name:
        close = difflib.get_close_matches(name, _BUILT_IN, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"method={name!r} is unknown{hint}; built in: {listed}; your own: package.module:Class")
    module, _, attribute = _BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's may raise anything
        raise ConfigError(f"method={name!r} cannot be imported: {quote_error(error)}") from error
    if not (inspect.isclass(found) and issubclass(found, Method)):
        raise ConfigError(f"method={name!r} is not a subclass of hpc_es.methods.base.Method")
    if found.trains and found.train is Method.train:
        raise ConfigError(f"method={name!r} has trains=True, but does not define train()")
    return found


def wants_traces(config: "Config") -> bool:
    """Whether workers write the sampled tokens of their episodes. Errors: as `find`."""
    return config.store.traces or find(config.method).needs_traces
