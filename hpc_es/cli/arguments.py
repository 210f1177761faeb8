"""What the commands have in common: arguments, exit codes, and what a path means."""

from pathlib import Path
from typing import Annotated

import typer

from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths

EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED = 1, 2, 3

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a run folder to go on with.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="E.g. es.population=16.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, e.g. runs/quickstart.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else on stderr.")]


def config_file(path: Path) -> Path:
    return RunPaths(path).config if path.is_dir() else path


def run_paths(root: Path) -> RunPaths:
    """Errors: ConfigError when `root` is no run folder."""
    paths = RunPaths(root)
    if not paths.config.is_file():
        raise ConfigError(f"{root} is no run folder: it has no {paths.config.name}; `hpc-es run CONFIG` makes one")
    return paths
