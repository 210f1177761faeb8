"""Find a method by name. A method defines how candidates are made and how a cohort updates theta.

To add a built-in method, subclass `hpc_es.methods.base.Method` and name it in `_BUILT_IN`. A method outside of this
package needs no change here: `method: package.module:Class`.
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
"""A module is imported when its method is used, so that an arena can import optimiser.py without the configuration."""


def make(config: "Config", tasks: "Tasks | None" = None) -> "Method":
    """Make the method of a run. `tasks` may be omitted if nothing will be assigned. Errors: ConfigError."""
    from hpc_es.methods.base import Tasks

    method = find(config.method)
    if method.trains and config.es.optimiser.kind != "none":
        raise ConfigError(
            f"es.optimiser.kind={config.es.optimiser.kind} applies to updates by seeds only, but "
            f"method={config.method} uses a trainer: set es.optimiser.kind=none"
        )
    return method(config, tasks or Tasks(0, 0))


def find(name: str) -> "type[Method]":
    """Import and return the class of a method. Errors: ConfigError if there is none."""
    from hpc_es.methods.base import Method

    listed = ", ".join(sorted(_BUILT_IN))
    if name not in _BUILT_IN and ":" not in name:
        close = difflib.get_close_matches(name, _BUILT_IN, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"method={name!r} is unknown{hint}; built in: {listed}; for your own: package.module:Class")
    module, _, attribute = _BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise any error
        raise ConfigError(f"method={name!r} cannot be imported: {quote_error(error)}") from error
    if not (inspect.isclass(found) and issubclass(found, Method)):
        raise ConfigError(f"method={name!r} is not a subclass of hpc_es.methods.base.Method")
    if found.trains and found.train is Method.train:
        raise ConfigError(f"method={name!r} has trains=True, but does not define train()")
    return found


def wants_traces(config: "Config") -> bool:
    """Whether workers write the sampled tokens of their episodes. Errors: as `find`."""
    return config.store.traces or find(config.method).needs_traces
