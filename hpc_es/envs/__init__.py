"""Create environments by name: `make("sudoku", blanks=5)`, or `make("package.module:Class")` for your own."""

import difflib
import importlib
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pydantic

from hpc_es.calls import CALLS
from hpc_es.config.schema import Config
from hpc_es.envs.base import Env
from hpc_es.envs.base import Message as Message
from hpc_es.envs.base import Observation as Observation
from hpc_es.envs.base import StepResult as StepResult
from hpc_es.errors import ConfigError, EnvError
from hpc_es.quoting import quote_error
from hpc_es.records import Purpose

_BUILT_IN = {
    "ahd": "hpc_es.envs.ahd:Ahd",
    "conciseness": "hpc_es.envs.conciseness:Conciseness",
    "countdown": "hpc_es.envs.countdown:Countdown",
    "docvqa": "hpc_es.envs.docvqa.env:DocVqa",
    "lab": "hpc_es.envs.lab:Lab",
    "math_tool": "hpc_es.envs.math_tool:MathTool",
    "sudoku": "hpc_es.envs.sudoku:Sudoku",
    "twx": "hpc_es.envs.twx:TextWorldExpress",
    "webshop": "hpc_es.envs.webshop:WebShop",
}
"""Built-in environments. Their modules are imported only when needed, because some are slow to import."""
_PLANNED = ("terminal", "webarena")
"""Environments that presets name but that do not exist yet."""


def registered() -> list[str]:
    """The names of the built-in environments."""
    return sorted(_BUILT_IN)


@dataclass(frozen=True)
class Description:
    what: str
    options: dict[str, str]
    """Default of each option, as Python writes it; `required` if there is none."""
    choices: dict[str, tuple[str, ...]]
    """Allowed values of each option that has a fixed set of them."""
    meaning: str
    """The constructor's docstring, which describes the options."""


def describe(name: str) -> Description:
    """Describe an environment and its options. Errors: ConfigError for an unknown name."""
    env_class = find(name)
    text = vars(env_class)["__doc__"] or sys.modules[env_class.__module__].__doc__ or ""
    parameters = _parameters(env_class)
    options = {p.name: "required" if p.default is p.empty else repr(p.default) for p in parameters}
    choices = {p.name: found for p in parameters if (found := _choices(p.annotation))}
    said = "" if env_class.__init__ is object.__init__ else inspect.cleandoc(env_class.__init__.__doc__ or "")
    meaning = "\n".join(part for part in said.split("\n\n") if not part.startswith("Errors:"))
    return Description(" ".join(text.split("\n\n")[0].split()), options, choices, meaning)


def make(name: str, **options: Any) -> Env:
    """Create an environment from a built-in name or package.module:Class.

    Errors: ConfigError for an unknown name or option, or a value that is not allowed; EnvError when the constructor
    raises anything else.
    """
    env_class = find(name)
    _check_names(name, env_class, options)
    try:
        return env_class(**options)
    except pydantic.ValidationError as error:
        raise ConfigError(f"environment {name}: {_explain(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"environment {name}: {error}") from error
    except BaseException as error:
        raise EnvError(f"environment {name} cannot be created: {quote_error(error)}") from error


def make_for(config: Config, kind: Purpose) -> Env:
    """Create the environment that a run trains on or is evaluated on. Errors: those of `make`.

    An environment with an option `split` gets the right split by default, so that no run is evaluated on its training
    tasks by mistake.
    """
    split = "eval" if kind == "eval" else "train"  # the centre plays the same tasks as the members
    laid_over = config.eval.options if split == "eval" else config.task.train
    options = {**config.task.options, **laid_over}
    if any(parameter.name == "split" for parameter in _parameters(find(config.task.env))):
        options.setdefault("split", split)
    return make(config.task.env, **options)


def keeps_all_turns(name: str) -> bool:
    """Whether an environment's prompts contain all previous turns; assumed for environments that do not exist yet.

    Errors: ConfigError for a name that does not exist."""
    return name in _PLANNED or find(name).history is None


def refuse_planned(name: str) -> None:
    """Refuse an environment that presets name but that does not exist yet. Errors: ConfigError."""
    if name in _PLANNED:
        raise ConfigError(
            f"the environment {name} is not part of hpc_es yet: `hpc-es config show` and `hpc-es plan` take "
            f"configurations that name it, but they cannot be run; built in: {', '.join(registered())}; your own: "
            "package.module:Class"
        )


def find(name: str) -> type[Env]:
    """Import an environment's module and return its class. Errors: ConfigError if there is none."""
    refuse_planned(name)
    if name not in _BUILT_IN and ":" not in name:
        raise ConfigError(
            f"unknown environment {name!r}{_did_you_mean(name, registered())}; built in: {', '.join(registered())}; "
            "your own: package.module:Class"
        )
    module, _, attribute = _BUILT_IN.get(name, name).partition(":")
    try:
        with CALLS.noted(f"{name}: importing {module}"):
            found = getattr(importlib.import_module(module), attribute)
    except BaseException as error:  # importing may raise anything, even SystemExit
        raise ConfigError(f"environment {name!r} cannot be imported: {quote_error(error)}") from error
    if not (inspect.isclass(found) and issubclass(found, Env)):
        raise ConfigError(f"environment {name!r} is not a subclass of hpc_es.envs.base.Env")
    return found


@cache
def _parameters(env_class: type[Env]) -> tuple[inspect.Parameter, ...]:
    """The constructor's parameters. Cached, because environments are created for every episode, and inspecting one
    takes longer than creating a small one."""
    return tuple(inspect.signature(env_class).parameters.values())


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, also if it may be None."""
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


def _check_names(name: str, env_class: type[Env], options: dict[str, Any]) -> None:
    parameters = _parameters(env_class)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    valid = [p.name for p in parameters]
    listed = ", ".join(valid) or "none"
    for option in options:
        if option not in valid:
            hint = _did_you_mean(option, valid)
            raise ConfigError(f"environment {name} has no option {option!r}{hint}; valid: {listed}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"environment {name} needs the option {missing[0]!r}; valid: {listed}")


def _explain(error: pydantic.ValidationError) -> str:
    return "; ".join(
        f"option {'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg'][:1].lower()}{e['msg'][1:]}"
        for e in error.errors()
    )


def _did_you_mean(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
