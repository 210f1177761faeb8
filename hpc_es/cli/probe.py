"""`hpc-es probe noise` and `hpc-es probe stale`: measure how reliable a run's fitness is, by new rollouts.

Invariant: rollouts are expensive, so all scores are kept in RUN/report, as JSON, together with the results.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_es import modes
from hpc_es.cli.arguments import Json, RunFolder, plural, run_paths
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from hpc_es.analysis.statistics.probes import Agreement, Estimate, NoiseFloor
    from hpc_es.recorded.probes import NoiseScores

Version = Annotated[int | None, typer.Option(help="Version to probe. Default: the last.")]
Members = Annotated[
    int | None, typer.Option(help="Number of members to score. Default: 8, or all of a smaller population.")
]


def add_commands(app: typer.Typer) -> None:
    probe = typer.Typer(help="Measure how reliable a run's fitness is.", no_args_is_help=True, rich_markup_mode=None)
    probe.command()(noise)
    probe.command()(stale)
    app.add_typer(probe, name="probe")


def noise(
    run: RunFolder,
    version: Version = None,
    members: Members = None,
    repeats: Annotated[
        int,
        typer.Option(
            help="Scores per member, on its own batch and on new batches; with greedy decoding nearly all on new ones."
        ),
    ] = 4,
    json: Json = False,
) -> None:
    """Measure how much of z is noise, and whether more tasks or more members would improve the update most."""
    from hpc_es.analysis.statistics.probes import noise_floor, repeatability, verdict
    from hpc_es.cli.output import console, stdout_for
    from hpc_es.recorded.probes import noise_scores
    from hpc_es.recorded.solo import Recorded

    out = console(stderr=json)
    with stdout_for(json):
        scores = noise_scores(
            Recorded.read(run_paths(run).root),
            version=version,
            members=members,
            repeats=repeats,
            say=out.print,
        )
    floor = noise_floor(
        scores.same,
        scores.fresh,
        num_tasks=scores.num_tasks,
        population=scores.population,
        seeds=scores.seeds,
        costs=(scores.cost.seconds_per_member, scores.cost.seconds_per_episode) if scores.cost else None,
    )
    again = repeatability(scores.same)
    facts = {
        "run": str(run),
        "version": scores.version,
        "scores": scores,
        "repeats": again,
        "noise": floor,
        "verdict": verdict(floor),
    }
    kept = _keep(run, f"probe-noise-v{scores.version:08d}.json", facts, json)
    out.print(_noise_table(floor))
    if floor.signal.low > 0:
        out.print(_trade_table(floor))
    if scores.greedy:
        out.print(_said_of_greedy(scores))
    if not again.identical:
        out.print(
            f"standard deviation of the fitness: {again.sd_repeats:.3g} for a member that plays the same "
            f"{plural(scores.num_tasks, 'task')} again, {again.sd_members:.3g} over members",
        )
    out.print(f"theta_{scores.version}: {verdict(floor)}", style="bold")
    out.print(f"scores: {kept}")


def stale(
    run: RunFolder,
    version: Version = None,
    lags: Annotated[
        str | None, typer.Option(help="Lags to probe, e.g. 1,4,8. Default: those of 1, 4 and 8 that the run has.")
    ] = None,
    members: Members = None,
    json: Json = False,
) -> None:
    """Measure whether the ranking of stale members still holds at a version: rank correlation by lag."""
    from hpc_es.analysis.statistics.probes import agreement
    from hpc_es.cli.output import console, stdout_for
    from hpc_es.recorded.probes import stale_scores
    from hpc_es.recorded.solo import Recorded

    out = console(stderr=json)
    with stdout_for(json):
        scores = stale_scores(
            Recorded.read(run_paths(run).root),
            version=version,
            lags=_numbers(lags),
            members=members,
            say=out.print,
        )
    trivial = scores.greedy and scores.repeats_are_identical
    found: list[Agreement] = []
    for lag in scores.lags:
        found.append(
            agreement(
                lag.then,
                lag.now,
                seeds=lag.seeds,
                lag=lag.lag,
                version=lag.version,
                num_logged=lag.num_logged,
                ceiling=found[0] if found and not trivial else None,
            )
        )
    facts = {"run": str(run), "version": scores.version, "scores": scores, "agreement": found}
    kept = _keep(run, f"probe-stale-v{scores.version:08d}.json", facts, json)
    out.print(_stale_table(found, scores.version, trivial=trivial))
    out.print(f"scores: {kept}")


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--lags {text} must be whole numbers with commas between them, e.g. 1,4,8") from None


def _keep(run: Path, name: str, facts: dict[str, Any], show: bool) -> Path:
    """Write the scores and results of a probe to RUN/report; with `show`, also to stdout."""
    import msgspec

    from hpc_es.cli.output import print_json

    path = run_paths(run).report / name
    with modes.within(run):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
    if show:
        print_json(facts)
    return path


def _said_of_greedy(scores: "NoiseScores") -> str:
    if scores.repeats_are_identical:
        return (
            "greedy decoding: repeats on the same tasks are identical, so each member played its own batch twice, and "
            f"{plural(len(scores.fresh[0]) - 1, 'new one')}"
        )
    return (
        "greedy decoding, but repeats on the same tasks differ: answers depend on other requests in the engine's batch "
        "(engine.max_concurrent=1 with float32 avoids this)"
    )


def _noise_table(floor: "NoiseFloor") -> "Table":
    table = _table("variance of a score", "value", "95 % interval", "")
    rows: list[tuple[str, Estimate, str]] = [
        ("members (signal)", floor.signal, "what the update should follow"),
        ("member x batch", floor.task_noise, "other tasks rank members differently"),
        ("sampling", floor.sampling_noise, "the same tasks, sampled again"),
        ("batch", floor.batch, "difficulty of the batch: cancels in z"),
        ("reliability of z", floor.reliability, "share of the variance of z"),
    ]
    for title, estimate, meaning in rows:
        value, low, high = (_variance(number) for number in (estimate.value, estimate.low, estimate.high))
        table.add_row(title, value, f"{low} to {high}", meaning)
    return table


def _variance(number: float) -> str:
    """Format a variance; tiny values are rounding errors of equal scores and shown as 0."""
    return "0" if abs(number) < 1e-12 else f"{number:.3g}"


def _trade_table(floor: "NoiseFloor") -> "Table":
    """Table of alternatives to the run's N and T. A gain is a ratio of squared signal-to-noise ratios of the update."""
    table = _table("tasks T", "reliability", "cosine", "N, same episodes", "gain", "N, same seconds", "gain")
    for trade in floor.trades:
        seconds, gain = trade.members_at_equal_seconds, trade.gain_at_equal_seconds
        table.add_row(
            f"{trade.num_tasks}" + (" (now)" if trade.num_tasks == floor.num_tasks else ""),
            f"{trade.reliability:.3f}",
            f"{trade.cosine:.3f}",
            f"{trade.members:.1f}",
            f"{trade.gain:.2f}",
            "-" if seconds is None else f"{seconds:.1f}",
            "-" if gain is None else f"{gain:.2f}",
        )
    table.caption = "cosine: to the update of these members without noise; gain: N * reliability, now = 1"
    return table


def _stale_table(found: "list[Agreement]", version: int, *, trivial: bool) -> "Table":
    """Table of correlations by lag. `trivial`: repeats are always identical, so lag 0 is not an upper bound."""
    table = _table("lag", "rank correlation", *([] if trivial else ["of lag 0"]), "cosine of z", "then", "now")
    for row in found:
        table.add_row(
            f"{row.lag}",
            _with_interval(row.rank_correlation),
            *([] if trivial else ["-" if row.share_of_ceiling is None else f"{row.share_of_ceiling:.0%}"]),
            _with_interval(row.correlation),
            f"{row.mean_then:.4f}",
            f"{row.mean_now:.4f}",
        )
    logged, scored = sum(row.num_logged for row in found), sum(row.num_members for row in found)
    lag_0 = "greedy, so lag 0 is the same score twice and no upper bound: `probe noise` measures the noise of a score"
    table.caption = (
        f"then: fitness at the version of dispatch ({logged} of {scored} from the log); now: at theta_{version}, same "
        f"tasks, {lag_0 if trivial else 'other sampling seeds; lag 0, scored twice there, is the upper bound'}"
    )
    return table


def _with_interval(estimate: "Estimate | None") -> str:
    if estimate is None:
        return "no spread"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _table(*titles: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table
