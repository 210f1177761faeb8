"""`hpc-es report`: write a page with figures and tables about one run, or about several side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hpc_es import modes
from hpc_es.cli.arguments import Json
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from hpc_es.analysis.statistics.progress import Measure
    from hpc_es.analysis.statistics.runs import Runs
    from hpc_es.store import Run

RunArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]RUN...", help="Run folders or run.h5 files; runs with the same NAME form one condition."
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(report)


def report(
    runs: RunArguments,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: RUN/report for one run, report for several.")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="success|fitness",
            help="Measure to compare runs by. Default: success if any task was ever solved, otherwise fitness.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Condition to compare with. Default: Sync, or the first if there is no Sync.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Path of the base model, if it has moved.")] = None,
    json: Json = False,
) -> None:
    """Write a report on learning, staleness, time and drift of one or more runs: report.html, figures/*.png,
    tables/*.csv."""
    from hpc_es.analysis.report.build import write_report
    from hpc_es.cli.output import console, print_json

    screen = console(stderr=json)
    judged = None if measure is None else _measure(measure)
    named = read_runs(runs)
    default, root = _default_out(runs)
    with modes.within(None if out else root):
        written = write_report(named, out or default, measure=judged, base=base, model=model)
    if json:
        print_json(
            {"page": written.page, "figures": written.figures, "tables": written.tables, "absent": written.absent}
        )
    for name, reason in written.absent.items():
        screen.print(f"no figure {name}: {reason}")
    counts = f"{len(written.figures)} figures, {len(written.tables)} tables"
    screen.print(f"{written.page} ({counts} beside it)")


def _measure(name: str) -> "Measure":
    from hpc_es.analysis.statistics.progress import measure_column

    measure_column(name)
    return cast("Measure", name)


def read_runs(arguments: list[str]) -> "Runs":
    """Read runs and group them by condition.

    A run without a NAME is named after its settings. If a NAME on the command line equals that but is for other
    settings, the run's id is added. Errors: ConfigError, StoreError.
    """
    from hpc_es.analysis.statistics.runs import compared_settings, conditions_of
    from hpc_es.store import read

    named: dict[str, list[Run]] = {}
    plain: list[Run] = []
    for argument in arguments:
        name, path = _split(argument)
        if name is None:
            plain.append(read(path))
        else:
            named.setdefault(name, []).append(read(path))
    for condition in conditions_of(plain):
        label, first = condition.label, condition.runs[0]
        if label in named and compared_settings(named[label][0]) != compared_settings(first):
            label = f"{label} ({first.attrs['run_id']})"
        named.setdefault(label, []).extend(condition.runs)
    return named


def _split(argument: str) -> tuple[str | None, Path]:
    """Split NAME=RUN, unless the whole argument is the name of an existing file."""
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).exists():
        return None, Path(argument)
    if not name.strip() or not path:
        raise ConfigError(f"{argument!r} must be RUN or NAME=RUN, e.g. Sync=runs/sync0")
    return name.strip(), Path(path)


def _default_out(arguments: list[str]) -> tuple[Path, Path | None]:
    """Return the default folder to write, and the run folder that it is in, if any."""
    _, path = _split(arguments[0])
    return (path / "report", path) if len(arguments) == 1 and path.is_dir() else (Path("report"), None)
