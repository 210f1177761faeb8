"""Arguments, exit codes and helper functions that several commands use."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_es.cli.terminal import say
from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths
from hpc_es.place import Place

if TYPE_CHECKING:
    from hpc_es.config import Config

EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED = 1, 2, 3

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a run folder to resume.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change, e.g. es.population=16.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, e.g. runs/quickstart.")]
AllRows = Annotated[bool, typer.Option("--all", help="Show all rows of a long table, not only the first and last.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout; all other text goes to stderr.")]


def load_config(path: Path, overrides: list[str] | None, site: Path | None = None) -> "Config":
    """Load a config file, or the configuration of a run folder to resume. Errors: ConfigError."""
    from hpc_es.config import load, refuse_moved

    settings = load(path, overrides or (), site=site).config
    if path.is_dir():
        refuse_moved(path, settings)
    return settings


def load_run(
    path: Path, overrides: list[str] | None, site: Path | None = None, *, num_workers: Callable[["Config"], int]
) -> "Config":
    """Load a configuration that will be run now.

    Refuses environments that do not exist yet, and warns on stderr if the number of workers does not fit the schedule.
    """
    from hpc_es import envs
    from hpc_es.simulator.worker_count import worker_count_warnings

    settings = load_config(path, overrides, site)
    envs.refuse_planned(settings.task.env)
    for sentence in worker_count_warnings(settings, num_workers(settings)):
        say(f"warning: {sentence}", err=True, colour="yellow")
    return settings


def output_file(path: Path | None) -> Path | None:
    """Check, before the work begins, that a file can be written here. Errors: ConfigError."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written: there is no folder {path.parent}; create it, or give another path"
        )
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; give the path of a file")
    return path


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 turn, 2 turns."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def seat_name(text: str) -> str:
    """Check the name of a seat, which is part of file names. Errors: ConfigError."""
    from hpc_es.config.fields import file_name

    try:
        return file_name(text)
    except ValueError as error:
        raise ConfigError(f"--seat {text} {error}") from None


def run_paths(root: Path) -> RunPaths:
    """The paths of a run. Errors: ConfigError if `root` is not a run folder."""
    paths = RunPaths(root)
    if not os.path.isfile(paths.config):  # False, not an error, for names too long or not allowed
        remedy = "`hpc-es run CONFIG` makes one"
        if (place := Place.here()).job is not None:  # the folder was there when the job was queued
            remedy = f"node {place.node} may not see the file system that it is on (run.dir), or it was moved"
        raise ConfigError(f"{root} is not a run folder: it has no {paths.config.name}; {remedy}")
    return paths
