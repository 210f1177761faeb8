"""The command `simulate`: predict how long a run takes with given numbers of workers and schedules."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_es.cli.arguments import ConfigFile, Json, Overrides, load_config, output_file
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from hpc_es.config import Config
    from hpc_es.simulator.result import SimulationResult

MAX_WORKERS = 100_000
SECONDS_UP_TO_S = 600
"""Longer times are shown in hours."""


class Resample(StrEnum):
    none = "none"
    versions = "versions"
    evaluations = "evaluations"


def add_commands(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    config: ConfigFile,
    overrides: Overrides = None,
    durations: Annotated[
        str,
        typer.Option(
            help="Durations of evaluations: a run folder, a run.h5, constant:60, or lognormal:median=60,sigma=0.8 "
            "(docs/analysis.md)."
        ),
    ] = "lognormal:median=60,sigma=0.8",
    workers: Annotated[str, typer.Option(help="Numbers of workers, e.g. 8,64,512. Default: launch.workers.")] = "",
    modes: Annotated[
        str,
        typer.Option(
            help="Schedules, e.g. sync,natural:1,natural:1:hold,controlled:4:0.5; config: that of the configuration."
        ),
    ] = "config",
    resample: Annotated[
        Resample,
        typer.Option(
            help="Order of a run's durations. none: as in the run; versions: random within each version; evaluations: "
            "random."
        ),
    ] = Resample.none,
    lifetime: Annotated[str, typer.Option(help="Mean time until a worker is preempted, e.g. 2h.")] = "",
    requeue: Annotated[str, typer.Option(help="Time from a preemption to the worker's next start.")] = "60s",
    silent: Annotated[
        bool, typer.Option("--silent", help="Preemptions without grace time, in which a worker cannot say goodbye.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the durations.")] = 0,
    table: Annotated[Path | None, typer.Option("--csv", help="File to which the table is written, too.")] = None,
    json: Json = False,
) -> None:
    """Predict wall-clock time, utilisation, lags and discarded results, by running the real head under a virtual
    clock."""
    from hpc_es.analysis.statistics.csv_files import write_rows
    from hpc_es.cli.output import console, print_json
    from hpc_es.simulator.durations import parse, parse_seconds
    from hpc_es.simulator.simulate import Preemption, with_mode
    from hpc_es.simulator.simulate import simulate as simulate_run

    output_file(table)
    settings = load_config(config, overrides)
    population = settings.es.population
    lasts = parse(durations, population=population, resample=resample.value, seed=seed)
    preemption = None
    if lifetime:
        preemption = Preemption(
            parse_seconds(lifetime, "--lifetime"), parse_seconds(requeue, "--requeue"), silent=silent
        )
    conditions = [with_mode(settings, mode) for mode in modes.split(",")]
    cases = [(count, case) for count in _counts(workers, settings.launch.workers) for case in conditions]
    results = [simulate_run(case, lasts, num_workers=count, preemption=preemption) for count, case in cases]
    rows = [_row(result, results) for result in results]
    if table is not None:
        write_rows([_numbers(row) for row in rows], table)
    if json:
        print_json({"durations": durations, "seed": seed, "results": rows})
        return
    out = console()
    out.print(_table(rows))
    for line in _legend(rows):
        out.print(line, style="dim")
    if preemption is None and Path(durations).exists():
        for line in _beside_the_run(Path(durations), cases, results):
            out.print(line)
    events, seconds = sum(result.num_events for result in results), sum(result.compute_s for result in results)
    out.print(f"{events:,} events of the head in {seconds:.1f} s", style="dim")


def _counts(text: str, default: int) -> list[int]:
    try:
        counts = [int(count) for count in text.split(",")] if text else [default]
    except ValueError:
        counts = [0]
    if not all(0 < count <= MAX_WORKERS for count in counts):
        raise ConfigError(f"--workers {text}: must be whole numbers from 1 to {MAX_WORKERS}, e.g. 8,64,512")
    return counts


def _row(result: "SimulationResult", results: Sequence["SimulationResult"]) -> dict[str, Any]:
    """One row of the table. Speed-ups are relative to sync with the same number of workers, if that was simulated."""
    row = dataclasses.asdict(result)
    row |= {
        "seconds_per_update": result.seconds_per_update,
        "lag_mean": result.lag_mean,
        "lag_max": result.lag_max,
        "bound_s": result.bound_s,
        "speedup": None,
        "speedup_bound": None,
    }
    for other in results:
        if other.mode == "sync" and other.num_workers == result.num_workers:
            row["speedup"] = other.wall_clock_s / result.wall_clock_s
            row["speedup_bound"] = other.wall_clock_s / result.bound_s
    return row


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The values of a row that fit into one cell."""
    return {key: value for key, value in row.items() if not isinstance(value, dict | tuple)}


def _beside_the_run(
    path: Path, cases: "Sequence[tuple[int, Config]]", results: "Sequence[SimulationResult]"
) -> Iterator[str]:
    """The run's real time, if its configuration and number of workers are among the simulated ones."""
    from hpc_es.config import compare
    from hpc_es.config.load import from_record
    from hpc_es.store import read

    run = read(path)
    recorded, num_workers = from_record(run.attrs["config"]), run.workers["seat"].nunique()
    if len(run.updates) < recorded.run.num_updates:
        return
    leased = run.evaluations.loc[run.evaluations["source"] == "run", "time_leased"]
    took = run.updates["time_committed"].max() - leased.min()
    for (count, config), result in zip(cases, results, strict=True):
        if count == num_workers and not compare(recorded, config)[0]:
            yield (
                f"the run itself took {_time(took)}; predicted {_time(result.wall_clock_s)} "
                f"({result.wall_clock_s / took - 1:+.1%}), from the first lease to the last commit"
            )
            return


def _legend(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{title}: {meaning}" for title, meaning in _MEANINGS.items() if any(map(_COLUMNS[title], rows))]


def _significant(value: float) -> str:
    """Format with three significant digits, and with all digits before the decimal point."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(digits, 0)}f}"


def _time(seconds: float) -> str:
    if seconds < SECONDS_UP_TO_S:
        return f"{_significant(seconds)} s"
    return f"{_significant(seconds / 3600)} h"


def _table(rows: Sequence[dict[str, Any]]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, header_style="dim", padding=(0, 1))
    columns = {title: [text(row) for row in rows] for title, text in _COLUMNS.items()}
    for title, texts in columns.items():
        if any(texts):
            table.add_column(title, justify="left" if title == "mode" else "right", no_wrap=True)
    for line in zip(*(texts for texts in columns.values() if any(texts)), strict=True):
        table.add_row(*line)
    return table


def _share(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key]:.1%}"


def _factor(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:.2f}"


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "workers": lambda row: f"{row['num_workers']:,}",
    "mode": lambda row: row["mode"],
    "s/update": lambda row: _significant(row["seconds_per_update"]),
    "time": lambda row: _time(row["wall_clock_s"]),
    "speed-up": _factor("speedup"),
    "bound": _factor("speedup_bound"),
    "busy": _share("busy_share"),
    "useful": _share("useful_share"),
    "waiting": _share("waiting_share"),
    "arena": _share("arena_share"),
    "lost": lambda row: f"{row['lost_share']:.1%}" if row["num_lost"] else "",
    "lag": lambda row: f"{row['lag_mean']:.2f}",
    "max": lambda row: str(row["lag_max"]),
    "discarded": _share("discarded_share"),
    "preempted": lambda row: f"{row['num_preemptions']:,}" if row["num_preemptions"] else "",
}
"""Title of a column -> text of a row. A column is hidden if all its texts are empty."""
_MEANINGS = {
    "time": "from the first lease to the last commit",
    "speed-up": "relative to sync with the same number of workers",
    "bound": "the speed-up if workers did only work that was accepted",
    "waiting": "idle because nothing can be dispatched before other workers report",
    "arena": "idle because the head applies an update or writes a checkpoint",
}
"""Explanations of titles that are not obvious."""
