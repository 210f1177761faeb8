"""How many tasks a run has to draw from."""

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.errors import ConfigError, EnvError
from hpc_es.es.records import Kind
from hpc_es.head.planning import Tasks
from hpc_es.quoting import quote_error

ENGINES_WITH_EYES = ("vllm", "endpoint")


def count_tasks(config: Config) -> Tasks:
    """Tasks to train and to evaluate on. Errors: ConfigError when more are asked for than there are; EnvError."""
    train = _num_tasks(config, "train", config.es.tasks_per_member, "es.tasks_per_member")
    if config.eval.num_tasks:
        _num_tasks(config, "eval", config.eval.num_tasks, "eval.num_tasks")
    return Tasks(train, config.eval.num_tasks)


def _num_tasks(config: Config, kind: Kind, wanted: int, key: str) -> int:
    env = envs.make_for(config, kind)
    try:
        available, shows_images = env.num_tasks, env.shows_images
        env.close()
    except Exception as error:
        raise EnvError(f"{config.task.env} was made and closed: {quote_error(error)}") from error
    if not isinstance(available, int):
        raise EnvError(f"{config.task.env}: num_tasks is {available!r}; it must be a whole number")
    if shows_images and config.engine.kind not in ENGINES_WITH_EYES:
        raise ConfigError(
            f"{config.task.env} shows images, and engine.kind={config.engine.kind} takes text alone: turn them off in "
            f"task.options, or take engine.kind={' or '.join(ENGINES_WITH_EYES)} and a vision-language model"
        )
    if wanted > available:
        raise ConfigError(
            f"{key}={wanted} is more than the {available} tasks that {config.task.env} has: lower it, or give the "
            f"environment more tasks"
        )
    return available
