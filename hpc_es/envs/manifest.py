"""The manifest of a run's tasks, RUN/tasks.json: the number of training tasks, and the list of evaluation tasks.

Invariant: it has the number of training tasks that batches are drawn from, and lists the tasks that the run was first
evaluated on, in order. A run whose tasks have changed (another catalogue, another problem file) does not resume,
because it would draw other batches, and its success rates would no longer be comparable. The launcher writes the
manifest; reading it needs no environment, so the head creates none.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from hpc_es import methods
from hpc_es.config import Config
from hpc_es.envs.base import TaskFacts
from hpc_es.envs.inspection import inspect
from hpc_es.errors import ConfigError, StoreError
from hpc_es.files import read_json
from hpc_es.methods.base import Tasks
from hpc_es.records import Purpose

VISION_ENGINES = ("vllm", "endpoint")
"""Engines that take images."""
_MAX_LISTED = 5
"""Most differences that an error lists."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tasks in tasks.json. The file's `num_tasks` and `ceiling` are for other readers."""

    env: str
    options: dict[str, Any]
    """The environment's options for evaluation."""
    tasks: list[TaskFacts]
    """The first eval.num_tasks tasks of the evaluation environment; task i of an episode is tasks[i]."""
    num_train_tasks: int | None = None
    """Number of training tasks; None in files of the first release and of later evaluations."""

    @property
    def ceiling(self) -> float | None:
        """The highest possible success rate, which is the share of reachable tasks; None without tasks."""
        return sum(task.reachable for task in self.tasks) / len(self.tasks) if self.tasks else None


class _File(Manifest, frozen=True):
    digest: str | None = None
    """Digest of the other fields; None in files of the first release."""


def count_tasks(config: Config) -> Tasks:
    """Numbers of tasks to train and to evaluate on, as the environment reports them.

    Errors: ConfigError when there are too few tasks, or when the tasks show images and the engine cannot; EnvError.
    """
    batch = methods.make(config).batch_size
    train = _num_tasks(config, "train", batch, "es.tasks_per_member")
    if config.eval.num_tasks:
        _num_tasks(config, "eval", config.eval.num_tasks, "eval.num_tasks")
    return Tasks(train, config.eval.num_tasks)


def recorded_tasks(path: Path, config: Config) -> Tasks:
    """Numbers of tasks in a run's manifest. Errors: StoreError when it is missing, damaged or incomplete."""
    manifest = read_tasks(path)
    if manifest is None or manifest.num_train_tasks is None:
        what = "is missing" if manifest is None else "does not have the number of training tasks"
        raise StoreError(f"{path} {what}: `hpc-es run {path.parent}` or `hpc-es submit {path.parent}` writes it")
    return Tasks(manifest.num_train_tasks, config.eval.num_tasks)


def complete_tasks(path: Path, config: Config) -> None:
    """Complete the manifest of a run folder that the first release prepared. Errors: those of `settle_tasks`."""
    manifest = read_tasks(path)
    if manifest is None or manifest.num_train_tasks is None:
        settle_tasks(path, config, has_begun=True)


def eval_tasks(config: Config) -> Manifest:
    """The evaluation tasks of a configuration, from its environment.

    Errors: ConfigError when there are fewer tasks than eval.num_tasks, or for a wrong option; EnvError.
    """
    plain = config.model_dump(mode="json")
    options = {**plain["task"]["options"], **plain["eval"]["options"]}
    wanted = config.eval.num_tasks
    return Manifest(config.task.env, options, _facts(config, wanted) if wanted else [])


def write_tasks(path: Path, config: Config) -> Manifest:
    """Write the evaluation tasks of a configuration to `path`, atomically. Errors: those of `eval_tasks`;
    StoreError."""
    manifest = eval_tasks(config)
    _write(path, manifest)
    return manifest


def read_tasks(path: Path) -> Manifest | None:
    """Read a manifest; None if there is no file. Errors: StoreError when it is damaged or cannot be read."""
    try:
        file = read_json(path, _File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(
            f"{path} cannot be read as a manifest of evaluation tasks: {error}; restore it from a copy, or remove it "
            "and it is written again when the run resumes"
        ) from None
    manifest = Manifest(file.env, file.options, file.tasks, file.num_train_tasks)
    if file.digest not in (None, _digest(manifest)):
        raise StoreError(
            f"{path} does not match its digest, so it was edited or damaged: restore it from a copy, or remove it and "
            "it is written again when the run resumes"
        )
    return manifest


def settle_tasks(path: Path, config: Config, *, has_begun: bool) -> None:
    """Write the manifest of a new run; for a run that has begun, check that its evaluation tasks are unchanged.

    Errors: ConfigError listing the differences; those of `write_tasks` and `read_tasks`.
    """
    num_train_tasks = count_tasks(config).train
    now = msgspec.structs.replace(eval_tasks(config), num_train_tasks=num_train_tasks)
    before = read_tasks(path) if has_begun else None
    if before is None:
        _write(path, now)
    elif differences := _differences(before.tasks, now.tasks):
        listed = "".join(f"  {difference}\n" for difference in differences[:_MAX_LISTED])
        more = len(differences) - _MAX_LISTED
        raise ConfigError(
            f"the evaluation tasks of {config.task.env} are not those that this run began with ({path}):\n{listed}"
            + (f"  and {more} more\n" if more > 0 else "")
            + "Its evaluations would not be comparable: restore the task's data, or choose another run.name"
        )
    elif before.num_train_tasks is None:
        _write(path, now)
    elif before.num_train_tasks != num_train_tasks:
        raise ConfigError(
            f"{config.task.env} has {num_train_tasks} training tasks, but this run began with {before.num_train_tasks} "
            f"({path}): it would draw other batches. Restore the task's data, or choose another run.name"
        )


def _num_tasks(config: Config, purpose: Purpose, wanted: int, key: str) -> int:
    found = inspect(config, purpose)
    if found.shows_images and config.engine.kind not in VISION_ENGINES:
        raise ConfigError(
            f"{config.task.env} shows images, but engine.kind={config.engine.kind} takes only text: turn them off in "
            f"task.options, or use engine.kind={' or '.join(VISION_ENGINES)} and a vision-language model"
        )
    if wanted > found.num_tasks:
        raise ConfigError(
            f"{key}={wanted} is more than the {found.num_tasks} tasks that {config.task.env} has: lower it, or give "
            "the environment more tasks"
        )
    return found.num_tasks


def _facts(config: Config, wanted: int) -> list[TaskFacts]:
    found = inspect(config, "eval", wanted)
    if wanted > found.num_tasks:
        raise ConfigError(f"eval.num_tasks={wanted} is more than the {found.num_tasks} tasks of {config.task.env}")
    return found.facts


def _write(path: Path, manifest: Manifest) -> None:
    contents = {
        "env": manifest.env,
        "options": manifest.options,
        "num_tasks": len(manifest.tasks),
        "ceiling": manifest.ceiling,
        "tasks": manifest.tasks,
        **({} if manifest.num_train_tasks is None else {"num_train_tasks": manifest.num_train_tasks}),
        "digest": _digest(manifest),
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(contents), indent=1) + b"\n")
        unfinished.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from None


def _digest(manifest: Manifest) -> str:
    """Digest of a manifest's fields and derived values."""
    seen = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    return blake2b(msgspec.json.encode(seen), digest_size=16).hexdigest()


def _differences(before: list[TaskFacts], now: list[TaskFacts]) -> list[str]:
    if len(before) != len(now):
        return [f"{len(before)} tasks -> {len(now)}"]
    changed = [(i, old, new) for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    return [f"task {i}: {_shown(old)} -> {_shown(new)}" for i, old, new in changed]


def _shown(facts: TaskFacts) -> str:
    horizon = "" if facts.horizon is None else f", horizon {facts.horizon}"
    return f"{facts.id!r}{horizon}{'' if facts.reachable else ', unreachable'}"
