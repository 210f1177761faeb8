"""The configuration of an evaluation: which parameters, which tasks, how answers are sampled, how many and how often.

Invariant: only the parts of a run's configuration that decide how a policy is measured can change, so that everything
else in it remains true of the parameters.
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
"""Engine settings that a task file may change for the engine of a run."""
_FOR_RUNS = MEASURE
_FOR_MODELS = (*_FOR_RUNS, "run.seed", "model.dtype")
_NOT_THE_FILES = ("run.name=evaluation", "run.num_updates=1", "model.path=evaluated")
"""Settings that a task file may omit, and that are ignored if it has them."""


@dataclass(frozen=True)
class EvalRequest:
    """Settings that the user requested for an evaluation; None means the setting of the task file, or of the run."""

    task: Path | None = None
    """A config file or a run folder. Its task and eval sections replace the run's; so do sampling and the engine's
    limits, if it has them."""
    overrides: Sequence[str] = ()
    """key=value settings that override all others."""
    num_tasks: int | None = None
    repeats: int | None = None
    keep: int | None = None
    """Number of episodes of each version whose full text is kept."""


@dataclass(frozen=True)
class Frozen:
    """A frozen model that does not come from a run."""

    model: str
    """A Hugging Face folder, or the model's name at an endpoint."""
    url: str | None = None
    """URL of an endpoint with OpenAI's chat API."""


def of_run(trained: Config, request: EvalRequest, base: Path | None = None) -> Config:
    """Configuration for evaluating versions of a run; `base` is the run's base model if that has moved.

    Errors: ConfigError; EnvError when the environment cannot be created.
    """
    _check_keys(request.overrides, _FOR_RUNS)
    if _sets(request, "engine.url"):
        raise ConfigError("engine.url cannot be set for the versions of a run: `hpc-es eval URL` evaluates an endpoint")
    if base is not None:
        trained = trained.model_copy(update={"model": trained.model.model_copy(update={"path": str(base)})})
    if request.task is None:
        config = settle(trained.model_dump(mode="json"), request.overrides, origin="the run's config.yaml")
        return _counted(config, request)
    file = _load(request.task)
    measure = _measure(file)
    if all(origin == DEFAULT for key, origin in file.origins.items() if key.startswith("sampling.")):
        del measure["sampling"]
    values = trained.model_dump(mode="json") | measure
    values["engine"] |= _limits(file)
    return _counted(settle(values, request.overrides, origin=str(request.task)), request, file)


def of_model(frozen: Frozen, out: Path, request: EvalRequest) -> Config:
    """Configuration for evaluating a frozen model, as version 0 of a run in the folder `out`. Errors: see `of_run`."""
    _check_keys(request.overrides, _FOR_MODELS)
    if request.task is None:
        raise ConfigError(f"{frozen.url or frozen.model} has no tasks of its own: name them with --task FILE")
    file = _load(request.task)
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
    return _counted(settle(values, request.overrides, origin=str(request.task)), request, file)


def checked_name(name: str, option: str) -> str:
    """Return the name if it can be a file name. Errors: ConfigError."""
    try:
        return file_name(name)
    except ValueError as error:
        raise ConfigError(f"{option} {name} {error}") from None


def _load(path: Path) -> Loaded:
    return load(path, _NOT_THE_FILES)


def _measure(file: Loaded) -> dict[str, Any]:
    """The sections that decide how a policy is measured. Batches are those of a run of this file, so that tasks get the
    same sampling seeds as there."""
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
                f"{key} cannot be set for an evaluation, only {listed}: other keys say how the parameters were made"
            )


def _counted(config: Config, request: EvalRequest, file: Loaded | None = None) -> Config:
    """The configuration with the numbers of tasks and repeats filled in. Errors: ConfigError when there are too few
    tasks."""
    available = inspect(config, "eval").num_tasks
    wanted = request.num_tasks
    if wanted is None:
        wanted = config.eval.num_tasks or available
        if file is not None and file.origins["eval.num_tasks"] == DEFAULT and not _sets(request, "eval.num_tasks"):
            wanted = min(wanted, available)
    if not 1 <= wanted <= available:
        raise ConfigError(f"{wanted} evaluation tasks were requested; {config.task.env} allows 1 to {available}")
    repeats = config.eval.repeats if request.repeats is None else request.repeats
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats {repeats} must be from 1 to {MAX_REPEATS}")
    evaluation = config.eval.model_copy(update={"num_tasks": wanted, "repeats": repeats})
    kept = config.store.trajectories if request.keep is None else request.keep
    store = config.store.model_copy(update={"trajectories": kept})
    return config.model_copy(update={"eval": evaluation, "store": store})


def _sets(request: EvalRequest, key: str) -> bool:
    return any(override.partition("=")[0].strip() == key for override in request.overrides)
