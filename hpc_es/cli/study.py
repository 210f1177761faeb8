"""Commands that study recorded runs: counterfactual, fork, compare."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_es import modes
from hpc_es.cli.arguments import AllRows, Json, Overrides, RunFolder, output_file, run_paths
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from hpc_es.analysis.statistics.compare import Comparison, Costs, Paired, Policy
    from hpc_es.recorded.counterfactual import Counterfactual

Side = Annotated[str, typer.Argument(help="RUN or RUN@VERSION; for several seeds, separate runs by commas.")]


class Shaping(StrEnum):
    zscore = "zscore"
    centred_ranks = "centred_ranks"


class Baseline(StrEnum):
    none = "none"
    batch = "batch"
    centre = "centre"


def add_commands(app: typer.Typer) -> None:
    for command in (counterfactual, fork, compare):
        app.command()(command)


# --- counterfactual ---------------------------------------------------------------------------------------------


def counterfactual(
    run: RunFolder,
    overrides: Overrides = None,
    shaping: Annotated[Shaping | None, typer.Option(help="Value for es.shaping.")] = None,
    lag_weight: Annotated[
        str | None,
        typer.Option(help="Value for es.lag_weight: none, inverse or exponential, with a rate, e.g. inverse:1."),
    ] = None,
    baseline: Annotated[Baseline | None, typer.Option(help="Value for es.baseline.")] = None,
    drop: Annotated[
        str | None, typer.Option(help="Members to leave out: stale[:LAG], slowest, longest or random[:SHARE].")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Number of parameters to sample for exact cosines, from their noise; 0: none.")
    ] = 0,
    csv: Annotated[
        Path | None, typer.Option(help="File to which the table is written. Default: RUN/report/counterfactual.csv.")
    ] = None,
    whole: AllRows = False,
    json: Json = False,
) -> None:
    """Compute how other settings would have changed each update, from recorded results alone."""
    import dataclasses

    from hpc_es.analysis.statistics.csv_files import write_rows
    from hpc_es.cli.output import console, print_json
    from hpc_es.recorded.counterfactual import Drop
    from hpc_es.recorded.counterfactual import counterfactual as recompute

    paths = run_paths(run)
    output_file(csv)
    asked = list(overrides or ())
    asked += [f"es.shaping={shaping.value}"] if shaping else []
    asked += [f"es.baseline={baseline.value}"] if baseline else []
    asked += _lag_weight(lag_weight) if lag_weight is not None else []
    found = recompute(paths.root, asked, drop=None if drop is None else Drop.parse(drop), sample=sample)
    if not found.lines:
        raise ConfigError("the run has no update yet")
    with modes.within(paths.root if csv is None else None):
        if csv is None:
            csv = paths.report / "counterfactual.csv"
            csv.parent.mkdir(exist_ok=True)
        write_rows([dataclasses.asdict(line) for line in found.lines], csv)
    if json:
        summary = {"cosine_mean": found.mean("cosine"), "norm_ratio_mean": found.mean("norm_ratio")}
        print_json({"run": str(run), **dataclasses.asdict(found), **summary, "csv": str(csv)})
    out = console(stderr=json)
    out.print(_lines_table(found, whole=whole))
    for line in _summary(found):
        out.print(line)
    out.print(f"table: {csv}")


def _lag_weight(text: str) -> list[str]:
    kind, colon, rate = text.partition(":")
    return [f"es.lag_weight.kind={kind}", *([f"es.lag_weight.rate={rate}"] if colon else [])]


def _lines_table(found: "Counterfactual", *, whole: bool) -> "Table":
    from hpc_es.cli.output import excerpt

    exact = any(line.exact_cosine is not None for line in found.lines)
    table = _table("update", "members", "kept", "lag", "cosine", *(["exact"] if exact else []), "norm ratio")
    lowest = found.lowest()
    for line in excerpt(found.lines, lambda line: line == lowest, whole=whole):
        if line is None:
            table.add_row("...")
            continue
        table.add_row(
            str(line.update),
            str(line.num_members),
            str(line.num_kept),
            f"{line.lag_mean:.2f}",
            _number(line.cosine, "null"),
            *([_number(line.exact_cosine, "null")] if exact else []),
            _number(line.norm_ratio, "null"),
        )
    return table


def _summary(found: "Counterfactual") -> list[str]:
    lines = [f"changed: {'; '.join(found.changes)}"]
    if (lowest := found.lowest()) is not None:
        lines.append(
            f"cosine to the committed update: mean {_number(found.mean('cosine'))}, lowest {_number(lowest.cosine)} "
            f"(update {lowest.update}); norm: on average {_number(found.mean('norm_ratio'))} of the committed one"
        )
        lines.append(
            f"all updates together, before any optimiser: cosine {_number(found.whole_cosine)}, "
            f"norm {_number(found.whole_norm_ratio)} of the committed sum"
        )
    return lines


# --- fork -------------------------------------------------------------------------------------------------------


def fork(
    run: RunFolder,
    name: Annotated[str, typer.Option(help="Name of the new run.")],
    overrides: Overrides = None,
    version: Annotated[int | None, typer.Option(help="Version to start from. Default: the last.")] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Folder for the starting parameters, to share them between forks. Default: the new run's."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Path of the base model of RUN, if it has moved.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start the new run at once.")] = False,
    json: Json = False,
) -> None:
    """Create a new run that starts from any version of RUN, with changed settings."""
    from hpc_es.cli.output import console, print_json
    from hpc_es.recorded.fork import plan_fork, write_fork
    from hpc_es.recorded.verify import replay

    root = run_paths(run).root
    out = console(stderr=json)
    planned = plan_fork(root, version, name, overrides or (), base)
    paths = write_fork(planned, lambda: replay(root, planned.version, model=model), say=out.print)
    command = f"hpc-es run {paths.root}"
    es, settings = planned.config.es, planned.config.run
    out.print(f"{paths.root} begins from theta_{planned.version} of {root}, checked by its digest")
    for difference in planned.differences:
        out.print(f"  {difference}")
    out.print(
        f"schedules start again: update 1 of {settings.num_updates} has sigma {es.sigma.start:g}, alpha "
        f"{es.alpha.start:g}" + ("; the optimiser's state starts at zero" if planned.loses_optimiser else ""),
    )
    if json:
        differences = [str(difference) for difference in planned.differences]
        facts = {"run": str(paths.root), "origin": str(root), "version": planned.version, "base": str(planned.base)}
        print_json({**facts, "differences": differences, "command": command})
    if start:
        from hpc_es.cli.local import run as run_command

        run_command(paths.root)
    else:
        out.print(f"start it with: {command}")


# --- compare ----------------------------------------------------------------------------------------------------


def compare(
    a: Side,
    b: Side,
    version: Annotated[int | None, typer.Option(help="Version of runs without @VERSION. Default: the last.")] = None,
    num_tasks: Annotated[int | None, typer.Option(min=2, help="Number of held-out tasks to use. Default: all.")] = None,
    json: Json = False,
) -> None:
    """Test whether A is better than B, paired by held-out task, and compare their costs."""
    from hpc_es.analysis.statistics.compare import compare as compare_policies
    from hpc_es.cli.output import console, print_json

    found = compare_policies(_policies(a, version), _policies(b, version), num_tasks=num_tasks)
    out = console(stderr=json)
    if json:
        import dataclasses

        print_json({**dataclasses.asdict(found), "verdict": found.verdict, "success_verdict": found.success.verdict})
    out.print(f"A: {found.label_a}\nB: {found.label_b}")
    for difference in found.differences:
        out.print(f"  {difference}")
    out.print(_paired_table(found))
    out.print(_costs_table(found.costs_a, found.costs_b))
    for line in _verdict_lines(found):
        out.print(line)


def _policies(side: str, version: int | None) -> "list[Policy]":
    from hpc_es.analysis.statistics.compare import parse_side, policy
    from hpc_es.store import read

    return [policy(read(path), version if at is None else at) for path, at in parse_side(side)]


def _paired_table(found: "Comparison") -> "Table":
    table = _table("held out", "A", "B", "A - B (95 %)", "p", "detectable")
    rows: list[tuple[str, Paired]] = [("reward", found.reward), ("success", found.success)]
    for title, pair in rows:
        table.add_row(
            title,
            f"{pair.mean_a:.4f}",
            f"{pair.mean_b:.4f}",
            f"{pair.difference:+.4f} ({pair.low:+.4f} to {pair.high:+.4f})",
            f"{pair.p_value:.4f}",
            f"±{pair.detectable:.4f}",
        )
    return table


def _costs_table(a: "Costs", b: "Costs") -> "Table":
    from hpc_es.cli.output import duration

    table = _table("training cost", "A", "B", "A / B")
    for title, x, y in (
        ("updates", a.updates, b.updates),
        ("evaluations", a.evaluations, b.evaluations),
        ("tokens", a.tokens, b.tokens),
        ("worker-seconds", a.worker_seconds, b.worker_seconds),
    ):
        table.add_row(title, f"{x:,.0f}", f"{y:,.0f}", f"{x / y:.2f}" if y else "-")
    ratio = f"{a.wall_clock_s / b.wall_clock_s:.2f}" if b.wall_clock_s else "-"
    table.add_row("wall-clock", duration(a.wall_clock_s), duration(b.wall_clock_s), ratio)
    return table


def _verdict_lines(found: "Comparison") -> list[str]:
    reward, success = found.reward, found.success
    lines = [f"reward: {reward.verdict}", f"success: {success.verdict}"]
    if (ceiling := found.ceiling) is not None:
        lines.append(f"success can be {ceiling.share:.1%} at most: {ceiling}")
    if reward.num_seeds == 1:
        lines.append(f"over {reward.num_tasks} tasks and one run per side: the result may differ for another seed")
    else:
        by_seed = ", ".join(f"{value:+.4f}" for value in reward.by_seed)
        lines.append(f"over {reward.num_tasks} tasks and {reward.num_seeds} seeds; reward by seed: {by_seed}")
    return lines


def _table(*titles: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _number(value: float | None, unknown: str = "-") -> str:
    return unknown if value is None else f"{value:.4f}"
