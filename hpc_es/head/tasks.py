"""How many tasks a run has to draw from."""

from hpc_es.config.schema import Config
from hpc_es.envs.inspection import inspect
from hpc_es.errors import ConfigError
from hpc_es.methods.base import Tasks
from hpc_es.records import Purpose

ENGINES_WITH_EYES = ("vllm", "endpoint")


def count_tasks(config: Config) -> Tasks:
    """Tasks to train and to evaluate on. Errors: ConfigError when more are asked for than there are; EnvError."""
    train = _num_tasks(config, "train", config.es.tasks_per_member, "es.tasks_per_member")
    if config.eval.num_tasks:
        _num_tasks(config, "eval", config.eval.num_tasks, "eval.num_tasks")
    return Tasks(train, config.eval.num_tasks)


def _num_tasks(config: Config, purpose: Purpose, wanted: int, key: str) -> int:
    found = inspect(config, purpose)
    if found.shows_images and config.engine.kind not in ENGINES_WITH_EYES:
        raise ConfigError(
            f"{config.task.env} shows images, and engine.kind={config.engine.kind} takes text alone: turn them off in "
            f"task.options, or take engine.kind={' or '.join(ENGINES_WITH_EYES)} and a vision-language model"
        )
    if wanted > found.num_tasks:
        raise ConfigError(
            f"{key}={wanted} is more than the {found.num_tasks} tasks that {config.task.env} has: lower it, or give "
            "the environment more tasks"
        )
    return found.num_tasks
