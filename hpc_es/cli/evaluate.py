"""`hpc-es eval` plays held-out tasks with any version of a run, a model or an endpoint; `hpc-es evals` lists results.

Invariant: everything printed is computed from recorded results, so both commands print the same for an evaluation.
"""

import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_es.cli.arguments import Json
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hpc_es.analysis.statistics.evaluations import Difference, Evaluated
    from hpc_es.recorded.eval_config import EvalRequest
    from hpc_es.recorded.evaluate import Evaluation

    Pair = tuple[Evaluated, Difference | None]
    Cell = Callable[[Evaluated, Difference | None], str]
    Columns = list[tuple[str, Cell]]

RUN = "run"
"""Source of the evaluations that a run itself made."""

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A run folder, a model folder, or the URL of an endpoint.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings to change, e.g. sampling.temperature=0.7 or task.options.NAME=VALUE."
    ),
]
Versions = Annotated[
    str | None,
    typer.Option(help="Versions to evaluate: all, 0,10,last or 0:100:10 (0 to 100 in steps of 10). Default: last."),
]


def add_commands(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(evals)


def evaluate(
    target: Target,
    overrides: Overrides = None,
    task: Annotated[
        Path | None,
        typer.Option(help="A config file or another run, whose tasks and sampling to use. Default: those of the run."),
    ] = None,
    versions: Versions = None,
    version: Annotated[int | None, typer.Option(min=0, help="One version to evaluate.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="How often to play every task. Default: eval.repeats.")
    ] = None,
    num_tasks: Annotated[int | None, typer.Option(min=1, help="Number of tasks. Default: eval.num_tasks.")] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="Number of episodes per version to keep as text. Default: store.trajectories."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the evaluation; an existing name resumes it.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For an endpoint: name of the model there. For a run: path of the base model, if it moved."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="For a model or endpoint: the folder to write. Default: evals/NAME.")
    ] = None,
    json: Json = False,
) -> None:
    """Score any version of a run on held-out tasks, its own or others, and record the result in RUN/evals. TARGET can
    also be a model or an endpoint."""
    from hpc_es.analysis.statistics.evaluations import difference, evaluations
    from hpc_es.cli.output import console, print_json, stdout_for
    from hpc_es.recorded.eval_config import EvalRequest
    from hpc_es.store import read

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # keep the engine's many warnings out of the user's terminal
    console_out = console(stderr=json)
    request = EvalRequest(task, tuple(overrides or ()), num_tasks, repeats, keep)
    wanted = _versions(versions, version)
    with stdout_for(json):
        done = _evaluate(target, request, wanted, name, model, out, console_out.print)
    found = evaluations(read(done.root), done.source, done.versions)
    pairs = [(each, None if each is found[0] else difference(each, found[0])) for each in found]
    if json:
        print_json({"target": target, **_described(done, pairs)})
    _print_evaluation(console_out, pairs)


def evals(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of `hpc-es eval`.")],
    against: Annotated[
        str | None, typer.Option(help="RUN or RUN@VERSION to compare with, on tasks that both played.")
    ] = None,
    json: Json = False,
) -> None:
    """List all recorded evaluations of runs and models, with intervals and paired differences."""
    from hpc_es.analysis.statistics.evaluations import evaluations, incomplete
    from hpc_es.cli.output import console, print_json
    from hpc_es.store import read

    out, described, compared_with = console(stderr=json), list[dict[str, Any]](), _baseline(against)
    for path in runs:
        run = read(path)
        if run.evals.empty:
            out.print(f"{path}: no complete evaluation")
        for source, of_source in itertools.groupby(evaluations(run), key=lambda each: each.source):
            found = list(of_source)
            pairs = [(each, compared_with(each, found[0])) for each in found]
            described += [{"run": str(path), **_facts(*pair)} for pair in pairs]
            out.print(f"{path}, {'its own evaluations' if source == RUN else source}", style="bold")
            _print_evaluation(out, pairs, against)
            out.print()
        for (source, version), (played, planned) in incomplete(run).items():
            out.print(f"{path}, {source}: {played} of {planned} batches of theta_{version} so far")
    if json:
        print_json({"against": against, "evaluated": described})


# --- what is evaluated --------------------------------------------------------------------------------------------


def _versions(versions: str | None, version: int | None) -> str:
    if version is None:
        return versions or "last"
    if versions is not None:
        raise ConfigError(f"--versions {versions} and --version {version} exclude each other; give one of them")
    return str(version)


def _evaluate(
    target: str,
    request: "EvalRequest",
    versions: str,
    name: str | None,
    model: str | None,
    out: Path | None,
    say: Callable[[str], None],
) -> "Evaluation":
    from hpc_es.recorded.eval_config import Frozen
    from hpc_es.recorded.evaluate import evaluate as evaluate_run
    from hpc_es.recorded.evaluate_model import evaluate_model

    is_url = "://" in target
    if is_url and model is None:
        raise ConfigError(f"{target} is an endpoint: name one of its models by --model NAME")
    if not is_url and _holds(target, "config.yaml"):
        if out is not None:
            raise ConfigError(f"--out {out} is for models and endpoints; evaluations of a run are written to {target}")
        base = None if model is None else Path(model)
        return evaluate_run(Path(target), versions, request, name=name, base=base, say=say)
    if not is_url and not _holds(target, "config.json"):
        raise ConfigError(
            f"{target} is not a run folder (with config.yaml), a model folder (with config.json), or the URL of an "
            "endpoint (http://...)"
        )
    if not is_url and model is not None:
        raise ConfigError(f"--model {model} is for runs and endpoints; {target} is a model itself")
    if versions not in ("last", "all", "0"):
        raise ConfigError(f"--versions {versions}: {target} is not a run, so it has only version 0")
    frozen = Frozen(model, target) if model is not None else Frozen(target)
    return evaluate_model(frozen, out or Path("evals", name or _name(frozen.model, request)), request, say=say)


def _holds(folder: str, file: str) -> bool:
    return (Path(folder) / file).is_file()


def _name(model: str, request: "EvalRequest") -> str:
    """Default name of the folder for a model's evaluation, from model and tasks."""
    words = [Path(model).resolve().name if Path(model).is_dir() else model, request.task.stem if request.task else ""]
    return re.sub("[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-._")


# --- results ------------------------------------------------------------------------------------------------------


def _baseline(against: str | None) -> "Callable[[Evaluated, Evaluated], Difference | None]":
    """A function that compares a row with `against`, or without it, with the first row of the same evaluation."""
    from hpc_es.analysis.statistics.compare import parse_side
    from hpc_es.analysis.statistics.evaluations import counterpart, difference, evaluations
    from hpc_es.store import read

    if against is None:
        return lambda each, first: None if each is first else difference(each, first)
    ((path, version), *more) = parse_side(against)
    if more:
        raise ConfigError(f"--against {against} must be one run, or RUN@VERSION")
    others = evaluations(read(path))
    if not any(version in (None, each.version) for each in others):
        known = sorted({each.version for each in others})
        raise ConfigError(f"--against {against}: no evaluation of that version is recorded, only of {known}")

    def from_another(each: "Evaluated", _: "Evaluated") -> "Difference | None":
        other = counterpart(each, others, version)
        return None if other is None else difference(each, other)

    return from_another


def _described(done: "Evaluation", pairs: "Sequence[Pair]") -> dict[str, Any]:
    """The result as JSON. The numbers of a single version are also at the top level."""
    first, _ = pairs[0]
    single = {"version": first.version, "fitness": first.reward, "success": first.success}
    return {
        "run": str(done.root),
        "name": done.source,
        "num_tasks": first.num_tasks,
        "num_repeats": first.num_repeats,
        **(single if len(pairs) == 1 else {}),
        "evaluated": [_facts(*pair) for pair in pairs],
    }


def _facts(each: "Evaluated", difference: "Difference | None") -> dict[str, Any]:
    from dataclasses import asdict, replace

    import pandas as pd

    facts = asdict(replace(each, outcomes=pd.DataFrame()))
    del facts["outcomes"]
    digest = each.protocol_digest
    return {
        **facts,
        "protocol_digest": None if digest is None else f"{digest:016x}",
        "difference": asdict(difference) if difference else None,
    }


def _print_evaluation(out: "Console", pairs: "Sequence[Pair]", baseline: str | None = None) -> None:
    """Print a row per version, with its difference from `baseline` or, by default, from the first version."""
    from hpc_es.cli.output import tables

    first, _ = pairs[0]
    columns: Columns = [("version", lambda each, _: str(each.version)), *_measures([each for each, _ in pairs])]
    if baseline or len(pairs) > 1:
        columns += _differences(baseline or f"theta_{first.version}")
    out.print(f"{first.protocol}: {_counts(first)}")
    for table in tables([(title, [cell(*pair) for pair in pairs]) for title, cell in columns], out.width):
        out.print(table)
    for ceiling in dict.fromkeys(str(each.ceiling) for each, _ in pairs if each.ceiling):
        out.print(f"ceiling: {ceiling}")
    if first.other_protocol:
        out.print("tasks or decoding differ from the run's own, so learning curves do not include this evaluation")


def _measures(found: "Sequence[Evaluated]") -> "Columns":
    ks = sorted({at.k for each in found for at in each.pass_at if at.k > 1})

    def at_k(k: int) -> "Cell":
        return lambda each, _: next((f"{at.mean:.1%}" for at in each.pass_at if at.k == k), "-")

    return [
        ("mean reward (95 %)", lambda each, _: f"{each.reward:.4f} ({_span(each.reward_interval, '.4f')})"),
        (
            "solved (95 %)" if not ks else "solved, mean@k (95 %)",
            lambda each, _: f"{each.success:.1%} ({_span(each.success_interval, '.1%')})",
        ),
        *((f"pass@{k}", at_k(k)) for k in ks),
    ]


def _differences(baseline: str) -> "Columns":
    def shown(measure: str, form: str) -> "Cell":
        def cell(_: "Evaluated", difference: "Difference | None") -> str:
            if difference is None:
                return "-"
            pair = getattr(difference, measure)
            p = f"{pair.p_value:.3f}" if pair.p_value >= 0.0005 else "<0.001"
            return f"{pair.difference:{form}} ({pair.low:{form}} to {pair.high:{form}}), p {p}"

        return cell

    return [(f"reward - {baseline}", shown("reward", "+.4f")), (f"solved - {baseline}", shown("success", "+.1%"))]


def _counts(each: "Evaluated") -> str:
    times = f" x {each.num_repeats} repeats" if each.num_repeats > 1 else ""
    return f"{each.num_tasks} task{'' if each.num_tasks == 1 else 's'}{times}"


def _span(interval: Any, form: str) -> str:
    return f"{interval.low:{form}} to {interval.high:{form}}"
