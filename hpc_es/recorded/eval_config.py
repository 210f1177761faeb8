"""What an evaluation is told: whose parameters, on which tasks, how answers are drawn, how many and how often.

Invariant: of the configuration that a run trained with only what a policy is measured by can change, so that whatever
else stands there is still true of the parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_es.config import Config, Loaded, load, settle
from hpc_es.config.fields import file_name
from hpc_es.config.load import DEFAULT, MEASURE
from hpc_es.config.schema import MAX_REPEATS
from hpc_es.envs.inspection import inspect
from hpc_es.errors import ConfigError

LIMITS = ("max_model_len", "max_concurrent")
"""Of the engine: what a task file may ask for where the engine is a run's."""
_FOR_RUNS = MEASURE
_FOR_MODELS = (*_FOR_RUNS, "run.seed", "model.dtype")
_NOT_THE_FILES = ("run.name=evaluation", "run.num_updates=1", "model.path=evaluated")
"""What a task file need not say, and what counts for nothing where it does."""


@dataclass(frozen=True)
class EvalRequest:
    """None: as the run, or else the task file, has it."""

    task: Path | None = None
    """A config file, or a run folder: its task and eval sections take the place of the run's; so do sampling and the
    engine's limits where it says something of them."""
    overrides: Sequence[str] = ()
    """key=value, laid over the rest."""
    num_tasks: int | None = None
    repeats: int | None = None
    keep: int | None = None
    """Episodes of each version that are kept word by word."""


@dataclass(frozen=True)
class Frozen:
    """Parameters that no run of ours made."""

    model: str
    """A Hugging Face folder; of an endpoint, the model's name there."""
    url: str | None = None
    """URL of an endpoint with OpenAI's chat API."""


def of_run(trained: Config, asked: EvalRequest, base: Path | None = None) -> Config:
    """For versions of a run; `base`: its base model, where that has moved.

    Errors: ConfigError; EnvError when the environment cannot be made.
    """
    _check_keys(asked.overrides, _FOR_RUNS)
    if _sets(asked, "engine.url"):
        raise ConfigError("engine.url cannot be set for the versions of a run: `hpc-es eval URL` evaluates an endpoint")
    if base is not None:
        trained = trained.model_copy(update={"model": trained.model.model_copy(update={"path": str(base)})})
    if asked.task is None:
        config = settle(trained.model_dump(mode="json"), asked.overrides, origin="the run's config.yaml")
        return _counted(config, asked)
    file = _load(asked.task)
    measure = _measure(file)
    if all(origin == DEFAULT for key, origin in file.origins.items() if key.startswith("sampling.")):
        del measure["sampling"]
    values = trained.model_dump(mode="json") | measure
    values["engine"] |= _limits(file)
    return _counted(settle(values, asked.overrides, origin=str(asked.task)), asked, file)


def of_model(frozen: Frozen, out: Path, asked: EvalRequest) -> Config:
    """For a model that no run made: that of a run of version 0 in the folder `out`. Errors: as `of_run`."""
    _check_keys(asked.overrides, _FOR_MODELS)
    if asked.task is None:
        raise ConfigError(f"{frozen.url or frozen.model} has no tasks of its own: --task FILE says what to play")
    file = _load(asked.task)
    if frozen.url is None:
        engine = file.config.model_dump(mode="json")["engine"]
    else:
        engine = {**_limits(file), "kind": "endpoint", "url": frozen.url}
    values: dict[str, Any] = {
        "run": {"name": checked_name(out.name, "--out"), "dir": str(out.parent), "num_updates": 1},
        "model": {"path": frozen.model, "dtype": file.config.model.dtype},
        "engine": engine,
        **_measure(file),
    }
    values["eval"]["every"] = 0
    return _counted(settle(values, asked.overrides, origin=str(asked.task)), asked, file)


def checked_name(name: str, option: str) -> str:
    """Errors: ConfigError when it cannot be a file's name."""
    try:
        return file_name(name)
    except ValueError as error:
        raise ConfigError(f"{option} {name} {error}") from None


def _load(path: Path) -> Loaded:
    return load(path, _NOT_THE_FILES)


def _measure(file: Loaded) -> dict[str, Any]:
    """Sections by which a policy is measured. Batches are those of a run of this file, so that tasks meet its seeds."""
    config = file.config.model_dump(mode="json")
    config["eval"]["batch"] = file.config.eval.batch or file.config.es.tasks_per_member
    return {section: config[section] for section in ("task", "sampling", "eval")}


def _limits(file: Loaded) -> dict[str, Any]:
    return {name: getattr(file.config.engine, name) for name in LIMITS if file.origins[f"engine.{name}"] != DEFAULT}


def _check_keys(overrides: Sequence[str], allowed: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == known or key.startswith(f"{known}.") for known in allowed):
            listed = ", ".join(allowed)
            raise ConfigError(
                f"{key} cannot be set for an evaluation, only {listed}: the rest is what the parameters come from"
            )


def _counted(config: Config, asked: EvalRequest, file: Loaded | None = None) -> Config:
    """With the numbers of tasks and repeats settled. Errors: ConfigError when there are not so many tasks."""
    available = inspect(config, "eval").num_tasks
    wanted = asked.num_tasks
    if wanted is None:
        wanted = config.eval.num_tasks or available
        if file is not None and file.origins["eval.num_tasks"] == DEFAULT and not _sets(asked, "eval.num_tasks"):
            wanted = min(wanted, available)
    if not 1 <= wanted <= available:
        raise ConfigError(f"{wanted} evaluation tasks are asked for, {config.task.env} has 1 to {available}")
    repeats = config.eval.repeats if asked.repeats is None else asked.repeats
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats {repeats} must be 1 to {MAX_REPEATS}")
    evaluation = config.eval.model_copy(update={"num_tasks": wanted, "repeats": repeats})
    kept = config.store.trajectories if asked.keep is None else asked.keep
    store = config.store.model_copy(update={"trajectories": kept})
    return config.model_copy(update={"eval": evaluation, "store": store})


def _sets(asked: EvalRequest, key: str) -> bool:
    return any(override.partition("=")[0].strip() == key for override in asked.overrides)
