"""The command `plan`: predict memory, network traffic, seconds, GPU-hours and FLOPs of a run before it starts."""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_es.cli.arguments import ConfigFile, Json, Overrides, load_config, plural
from hpc_es.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from hpc_es.config import Config
    from hpc_es.planner import Assumptions, Plan, Published, Tokens

Line = tuple[str, str, str]
"""Name, figure, and explanation."""
Section = tuple[str, list[Line], dict[str, str]]
"""Title, lines, and the basis of figures that are not predictions, by name of the line."""

MAX_WORKERS = 100_000
MAX_NUMBER = 1e15
GIB = 2**30
NAME_WIDTH, NUMBER_WIDTH, BASIS_WIDTH = 28, 10, 10
"""Fixed widths of columns, which align the tables with each other."""
SHOWN_FROM = 0.0005
"""Smallest share that is shown; smaller ones would be rounded to 0.0 %."""
RATIOS = ("an update, over GRPO's", "all updates, over GRPO's")
LEGEND = (
    "prediction: computed from the configuration and the assumptions; fit: chosen to reproduce a published number. "
    "docs/planner.md compares predictions with published runs"
)
SITE = typer.Option("--site", metavar="FILE", help="A YAML file with the settings of your cluster.")


def add_commands(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option(help="Type of GPU: h100, a100-80, ..., or a YAML file with its numbers (docs/gpus.md).")
    ] = "h100",
    workers: Annotated[int | None, typer.Option(help="Number of workers. Default: slurm.workers.")] = None,
    tokens_per_episode: Annotated[
        float | None,
        typer.Option(help="Tokens per episode (L) in prompts and answers of all turns, without cached prefixes."),
    ] = None,
    tokens_in: Annotated[float | None, typer.Option(help="Prompt tokens per episode.")] = None,
    tokens_out: Annotated[float | None, typer.Option(help="Answer tokens per episode.")] = None,
    turns: Annotated[float | None, typer.Option(help="Turns per episode. Default: as many as the task allows.")] = None,
    like: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Use the lengths of episodes that this run measured.")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Number of parameters (P), e.g. 4.5e9. Default: of the model in model.path.")
    ] = None,
    active_parameters: Annotated[
        float | None,
        typer.Option(help="Parameters used per token, for mixtures of experts and vision models. Default: all."),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="A model's config.json, to size the KV cache if model.path is not available.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change an assumption, e.g. prefill_share=0.3."),
    ] = None,
    site: Annotated[Path | None, SITE] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the evaluations' durations.")] = 0,
    json: Json = False,
) -> None:
    """Predict memory, network traffic, seconds per phase, GPU-hours and FLOPs of a run, from stated assumptions."""
    from hpc_es.cli.output import console, print_json
    from hpc_es.planner import assume, make_plan, shape_of

    settings = load_config(config, overrides, site)
    num_workers = settings.slurm.workers if workers is None else workers
    if not 0 < num_workers <= MAX_WORKERS:
        raise ConfigError(f"--workers {num_workers}: must be a whole number from 1 to {MAX_WORKERS}")
    lengths = {"per_episode": tokens_per_episode, "prompt": tokens_in, "answer": tokens_out, "turns": turns}
    given = {
        "tokens-per-episode": tokens_per_episode,
        "tokens-in": tokens_in,
        "tokens-out": tokens_out,
        "turns": turns,
        "parameters": parameters,
        "active-parameters": active_parameters,
    }
    for name, value in given.items():
        if value is not None and not 0 < value < MAX_NUMBER:
            raise ConfigError(f"--{name} {value:g}: must be a number above 0, and below {MAX_NUMBER:g}")
    assumed = assume(gpu, changes or ())
    shape = shape_of(settings.model, parameters=parameters, active=active_parameters, described=model_config)
    tokens = _tokens(settings, like, lengths, assumed)
    made = make_plan(settings, shape, tokens, assumed, num_workers=num_workers, seed=seed)
    if json:
        print_json({"config": str(config), "gpu": gpu, **_facts(made), **_stated(assumed)})
        return
    out = console()
    out.print(_headline(settings, made, gpu))
    for section in _sections(settings, made, assumed, gpu):
        out.print()
        out.print(_table(*section))
    out.print()
    out.print(LEGEND, style="dim")
    for caution in made.cautions:
        out.print(f"caution: {caution}", style="yellow")
    command = ["hpc-es", "simulate", str(config), *(overrides or ()), "--workers", str(num_workers)]
    command += ["--durations", made.durations]
    out.print(f"to compare schedules at these durations: {shlex.join(command)}", style="dim")


def _tokens(
    settings: "Config", like: Path | None, lengths: dict[str, float | None], assumed: "Assumptions"
) -> "Tokens":
    from hpc_es.planner.tokens import given, measured
    from hpc_es.store import read

    if like is None:
        return given(settings, answer_share=assumed.answer_share, **lengths)
    if any(value is not None for value in lengths.values()):
        raise ConfigError(
            "--like RUN sets the length of episodes: omit --tokens-per-episode, --tokens-in, --tokens-out and --turns"
        )
    return measured(read(like))


def _stated(assumed: "Assumptions") -> dict[str, Any]:
    """The assumptions, and the basis of each."""
    values = assumed.model_dump()
    return {"assumptions": values, "basis": {name: str(assumed.basis(name)) for name in values}}


def _facts(made: "Plan") -> dict[str, Any]:
    """All fields of the plan, and the properties computed from them."""
    memory = made.memory.gpu
    facts = dataclasses.asdict(made)
    facts["memory"]["gpu"] |= {"fixed": memory.fixed, "total": memory.total, "fits": memory.fits}
    facts["phases"]["evaluation"] = made.phases.evaluation
    facts["memory"]["gradient"] |= {"grpo": made.memory.gradient.grpo, "ppo": made.memory.gradient.ppo}
    facts["compute"] |= {
        "ratio_per_update": made.compute.ratio_per_update,
        "ratio_in_all": made.compute.ratio_in_all,
    }
    gradient = made.compute.gradient
    facts["compute"]["gradient"] |= {"grpo_in_all": gradient.grpo_in_all, "ppo_in_all": gradient.ppo_in_all}
    return facts | {
        "seconds_per_update": made.simulated.seconds_per_update,
        "gpu_hours_per_update": made.gpu_hours_per_update,
        "gpu_hours": made.gpu_hours,
    }


def _headline(settings: "Config", made: "Plan", gpu: str) -> str:
    es, ranks = settings.es, settings.engine.tensor_parallel
    each = f"{ranks} x {gpu}" if ranks > 1 else gpu
    return (
        f"{settings.run.name}: {made.num_workers} workers of {each}; {settings.run.num_updates} updates of "
        f"{es.population} members x {es.tasks_per_member} episodes, {made.simulated.mode}; {made.shape.parameters:.4g} "
        f"parameters ({made.shape.source}), L = {made.tokens.total:,.0f} tokens ({made.tokens.prompt:,.0f} + "
        f"{made.tokens.answer:,.0f}, {made.tokens.turns:g} turns; {made.tokens.source})"
    )


def _sections(settings: "Config", made: "Plan", assumed: "Assumptions", gpu: str) -> Iterator[Section]:
    fitted = _fitted(made, gpu)
    yield "GPU memory of a rank" if assumed.has_gpu else "memory of an engine", _gpu_lines(settings, made), {}
    yield "memory of a job, disk", _host_lines(settings, made), {}
    yield "network", _wire_lines(settings, made, assumed), {}
    yield "seconds", _phase_lines(settings, made), {}
    yield "run", _run_lines(made), _bases(fitted, hours=("in all", "GPU-hours"))
    ratios = _bases(fitted, ratio_per_update=RATIOS[:1], ratio_in_all=RATIOS[1:])
    yield "FLOPs", _compute_lines(made), ratios
    gradient = _bases(fitted, grpo_hours=("GRPO, GPU-hours",), grpo_gib=("GRPO, memory",))
    yield "gradient methods, to compare", _gradient_lines(made, assumed), gradient
    if made.published:
        lines = _published_lines(made.published)
        yield "published", lines, {name: "published" for name, _, _ in lines}
    fields, values = type(assumed).model_fields, assumed.model_dump()
    lines = [(name, _number(values[name]), " ".join((fields[name].description or "").split())) for name in fields]
    yield "assumptions (--set)", lines, {name: str(assumed.basis(name)) for name in fields}


def _gpu_lines(settings: "Config", made: "Plan") -> list[Line]:
    memory, gpu = made.memory, made.memory.gpu
    lines: list[Line] = [("weights", _gib(gpu.weights), settings.model.dtype)]
    if gpu.staging or gpu.reserve:
        hint = f"; {memory.to_device} would leave room for it here" if memory.to_device else ""
        where = "and the optimiser's state, in float32" if gpu.theta else f"not here, but in the host's memory{hint}"
        lines += [
            ("theta", _gib(gpu.theta) if gpu.theta else "-", where),
            ("staging", _gib(gpu.staging), "left free beside theta" if gpu.theta else "members are written through it"),
            ("reserve", _gib(gpu.reserve), "context, activations, graphs"),
        ]
    held = "give --model-config FILE to see for how many tokens"
    if gpu.sequences is not None:
        length = settings.engine.max_model_len
        held = f"{gpu.sequences:,.1f} sequences of {length:,} tokens; {gpu.sequences_wanted} are wanted"
    verdict = "fits" if gpu.is_ample else "fits, but episodes may have to wait" if gpu.fits else "DOES NOT FIT"
    if memory.remedies:
        verdict += f"; {'room for all' if gpu.fits else 'it would'} with {' or '.join(memory.remedies)}"
    lines.append(("KV cache", _gib(gpu.kv_cache), held))
    lines.append(("in all", _gib(gpu.total), f"of {_gib(gpu.available)}: {verdict}"))
    return lines


def _host_lines(settings: "Config", made: "Plan") -> list[Line]:
    memory, per_update = made.memory, made.wire.journal_per_update
    arena = _gib(memory.arena)
    return [
        ("a worker", _gib(memory.worker_job), f"an arena of {arena}, which its ranks share, and its processes"),
        ("the head", _gib(memory.head_job), f"an arena of {arena}, and its process"),
        ("checkpoints", _gib(memory.checkpoints), f"the newest {settings.checkpoint.keep}, and one being written"),
        (
            "journal",
            _bytes(per_update * settings.run.num_updates),
            f"{_bytes(per_update)} per update, without evaluations on held-out tasks",
        ),
    ]


def _wire_lines(settings: "Config", made: "Plan", assumed: "Assumptions") -> list[Line]:
    wire, beat = made.wire, settings.transport.heartbeat
    update = f"record {_bytes(wire.record)}, announcement {_bytes(wire.announcement)}, for any size of model"
    evaluation = f"assignment {_bytes(wire.assignment)}, result and acknowledgement {_bytes(wire.result)}"
    usual = _seconds(8 * wire.weights / (1e9 * assumed.network_gbit_per_s))
    return [
        ("an update, to each worker", _bytes(wire.per_worker), update),
        ("an evaluation", _bytes(wire.assignment + wire.result), evaluation),
        ("an update, in all", _bytes(wire.per_update), f"and {wire.heartbeat} B each {beat:g} s from each worker"),
        ("a worker that joins", _bytes(made.memory.arena), _join(settings, made, assumed)),
        (
            "the usual way",
            _bytes(wire.weights),
            f"for comparison: 16-bit weights to each worker, {usual} of its network",
        ),
    ]


def _join(settings: "Config", made: "Plan", assumed: "Assumptions") -> str:
    if settings.transport.join == "broadcast":
        seconds = 8 * made.memory.arena / (1e9 * assumed.network_gbit_per_s)
        return f"from the head's arena, {_seconds(seconds)} of its network (transport.join: broadcast)"
    return f"read from the newest checkpoint, {_seconds(made.memory.arena / (1e9 * assumed.disk_gb_per_s))}"


def _phase_lines(settings: "Config", made: "Plan") -> list[Line]:
    takes, es, slurm = made.phases, settings.es, settings.slurm
    at_worker, at_head = _place(takes.base, "worker", slurm.worker.cpus), _place(takes.head, "head", slurm.head.cpus)
    speed = es.tasks_per_member * made.tokens.answer / takes.answers if takes.answers else 0.0
    return [
        ("catch-up", _seconds(takes.catch_up), f"once per update and worker; {at_worker}"),
        ("perturb", _seconds(takes.perturb), "per evaluation, like all lines down to their sum"),
        ("prompts", _seconds(takes.prompts), f"{es.tasks_per_member * made.tokens.prompt:,.0f} tokens"),
        ("answers", _seconds(takes.answers), f"{takes.concurrent:,.3g} episodes side by side, {speed:,.0f} tokens/s"),
        ("turns", _seconds(takes.turns), "environment, tokeniser, requests"),
        ("overhead", _seconds(takes.member), "calls to the engine"),
        ("an evaluation", _seconds(takes.evaluation), f"mean; {es.population:,} make an update"),
        ("head's update", _seconds(takes.head_update), f"workers continue meanwhile; {at_head}"),
        ("checkpoint", _seconds(takes.checkpoint), f"every {plural(settings.checkpoint.every, 'update')}"),
    ]


def _place(place: str, role: str, cores: int) -> str:
    if place == "cores":
        return f"theta on the host, {plural(cores, 'core')} (slurm.{role}.cpus)"
    return "theta on the GPU" if place == "device" else "theta streamed from the host"


def _run_lines(made: "Plan") -> list[Line]:
    run = made.simulated
    idle = {
        "nothing to dispatch": run.waiting_share,
        "the head's arena (slurm.head.cpus, head.device)": run.arena_share,
        "the end": run.end_share,
    }
    reasons = ", ".join(f"{share:.1%} {why}" for why, share in idle.items() if share >= SHOWN_FROM)
    lines: list[Line] = [
        ("an update", _seconds(run.seconds_per_update), "simulated, with evaluations on held-out tasks"),
        ("in all", _time(run.total_s), f"{_time(run.wall_clock_s)} of it from the first lease to the last commit"),
        ("busy", f"{run.busy_share:.1%}", f"useful {run.useful_share:.1%}" + (f"; idle: {reasons}" if reasons else "")),
        ("lag", f"{run.lag_mean:.2f}", f"mean; at most {run.lag_max}; {run.discarded_share:.1%} of the work discarded"),
    ]
    if made.num_gpus:
        each = f"{made.gpu_hours_per_update:.3g} per update, {plural(made.num_gpus, 'GPU')}"
        lines.append(("GPU-hours", f"{made.gpu_hours:,.4g}", each))
    return lines


def _compute_lines(made: "Plan") -> list[Line]:
    flops = made.compute
    return [
        ("an update", f"{flops.per_update:.3g}", "2 N T P L"),
        ("all updates", f"{flops.in_all:.3g}", _exa(flops.in_all)),
        ("evaluations", f"{flops.evaluations:.3g}", "on held-out tasks, at the same L"),
        (RATIOS[0], _ratio(flops.ratio_per_update), "x GRPO's, see below"),
        (RATIOS[1], _ratio(flops.ratio_in_all), f"x GRPO's in {plural(flops.gradient.num_updates, 'update')}"),
    ]


def _fitted(made: "Plan", gpu: str) -> tuple[str, ...]:
    """Fields of the published row that assumptions were fitted to; hours only for the hardware of that row."""
    from hpc_es.planner.published import HARDWARE

    fields = made.published.fitted if made.published else ()
    return tuple(field for field in fields if "hours" not in field or (gpu, made.num_workers) == HARDWARE)


def _bases(fitted: tuple[str, ...], **lines: Sequence[str]) -> dict[str, str]:
    """Basis of the lines that are not predictions. `lines`: field of a published row -> names of its lines."""
    return {line: "fit" for field, names in lines.items() if field in fitted for line in names}


def _gradient_lines(made: "Plan", assumed: "Assumptions") -> list[Line]:
    flops, memory = made.compute.gradient, made.memory.gradient
    shape = (
        f"{assumed.grpo_episodes} episodes; passes forwards: rollout and {assumed.grpo_extra_passes} more; epochs: "
        f"{assumed.grpo_epochs}"
    )
    parts = "weights, gradients, reference and Adam; without activations, over all its GPUs"
    lines: list[Line] = [
        ("GRPO, an update", f"{flops.grpo_per_update:.3g}", shape),
        ("GRPO, in all", f"{flops.grpo_in_all:.3g}", f"{_exa(flops.grpo_in_all)} in {flops.num_updates} updates"),
    ]
    if flops.grpo_gpu_hours is not None:
        hours = f"{_time(3600 * flops.grpo_gpu_hours / made.num_gpus)} on {plural(made.num_gpus, 'GPU')}"
        lines.append(("GRPO, GPU-hours", f"{flops.grpo_gpu_hours:,.4g}", hours))
    return [
        *lines,
        ("PPO, in all", f"{flops.ppo_in_all:.3g}", f"{_exa(flops.ppo_in_all)}; as GRPO, plus a critic of equal size"),
        ("GRPO, memory", _gib(memory.grpo), parts),
        ("PPO, memory", _gib(memory.ppo), "as GRPO, plus a critic of equal size"),
    ]


def _published_lines(row: "Published") -> list[Line]:
    figures = {
        "all updates": row.exaflops and f"{row.exaflops:g} EFLOPs",
        "hours on four H100": row.hours and f"{row.hours:g} h",
        "GRPO, in all": row.grpo_exaflops and f"{row.grpo_exaflops:g} EFLOPs",
        "GRPO, hours on four H100": row.grpo_hours and f"{row.grpo_hours:g} h",
        "GRPO, memory": row.grpo_gib and f"{row.grpo_gib:.2f} GiB",
        "PPO, memory": row.ppo_gib and f"{row.ppo_gib:.2f} GiB",
        RATIOS[0]: row.ratio_per_update and f"{row.ratio_per_update:.2f}",
        RATIOS[1]: row.ratio_in_all and f"{row.ratio_in_all:.2f}",
    }
    return [(what, figure, row.source) for what, figure in figures.items() if figure]


def _table(title: str, lines: list[Line], bases: dict[str, str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(Text(title), no_wrap=True, min_width=NAME_WIDTH)
    table.add_column("", justify="right", no_wrap=True, min_width=NUMBER_WIDTH)
    table.add_column("", no_wrap=True, min_width=BASIS_WIDTH)
    table.add_column("")
    for what, how_much, why in lines:
        basis = bases.get(what, "prediction")
        table.add_row(Text(what), Text(how_much), Text(basis, style="dim"), Text(why, style="dim"))
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.3g} {unit}" if size < 1e3 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:,.0f} B"


def _exa(flops: float) -> str:
    return f"{flops / 1e18:.3g} EFLOPs"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _time(seconds: float) -> str:
    return _seconds(seconds) if seconds < 600 else f"{seconds / 3600:,.3g} h"


def _ratio(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
