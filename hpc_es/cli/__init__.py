"""The command line, `hpc-es`.

Invariants: exit code 0 only on success (1: failed, 2: a mistake in the command or configuration, 3: stopped before the
end); a user's mistake is reported by one message on stderr, without a traceback; with --json stdout contains one JSON
object and nothing else. Commands import what they need themselves, so that `--help` is fast on a login node.
"""

import atexit
import dataclasses
import os
import resource
import sys
import threading
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from hpc_es import modes
from hpc_es.calls import CALLS
from hpc_es.cli import env, episodes, evaluate, plan, probe, report, retention, simulate, slurm, study
from hpc_es.cli.arguments import (
    EXIT_FAILED,
    AllRows,
    ConfigFile,
    Json,
    Overrides,
    RunFolder,
    plural,
    run_paths,
    seat_name,
)
from hpc_es.cli.failures import end_with_message
from hpc_es.cli.local import run
from hpc_es.cli.log_lines import log_to
from hpc_es.cli.terminal import harmless, prepare_streams, say
from hpc_es.errors import TransportError, VerifyError
from hpc_es.paths import RunPaths
from hpc_es.place import Place
from hpc_es.version import __version__

if TYPE_CHECKING:
    from hpc_es.launch.slurm import Role
    from hpc_es.launch.slurm_commands import JobStatus
    from hpc_es.transport.messages import Status

STATUS_TIMEOUT_S = 3.0
ENV_COMMANDS = ("env", "eval", "plan", "probe")
"""Commands that import or play environments in their own process, which an environment may kill."""
ROLES = ("head", "worker")
"""Commands that are processes of a run; their stderr is a log."""


class _Group(TyperGroup):
    """A command group that reports any exception by one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            end_with_message(error, is_role=ctx.invoked_subcommand in ROLES)


app = typer.Typer(
    cls=_Group,
    help="Post-train LLM agents by evolution strategies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)
model_app = typer.Typer(help="Fetch models.", no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="Show configurations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")

BaseModel = Annotated[Path | None, typer.Option("--model", help="Path of the base model, if it has moved.")]
Parent = Annotated[int | None, typer.Option(min=1, max=2**31 - 1, help="Process id of the parent; exit when it exits.")]


class Dtype(StrEnum):
    fp32 = "fp32"
    base = "base"


def main() -> None:
    prepare_streams()
    modes.keep_others_from_writing()
    warnings.formatwarning = _warning_line
    if "" not in sys.path:
        sys.path.insert(0, "")  # a user's environment may be in the working directory, as with python -m hpc_es
    if sys.argv[1:2] and sys.argv[1] in ENV_COMMANDS:
        from hpc_es.launch.witness import died_as_command, stand_witness

        stand_witness(died_as_command)
    try:
        app(prog_name="hpc-es")
    except SystemExit as end:
        CALLS.decide_to_end(end.code if isinstance(end.code, int) else int(end.code is not None))
        _leave(end)
    except BaseException:
        CALLS.decide_to_end(EXIT_FAILED)
        raise


def _leave(end: SystemExit) -> NoReturn:
    """Exit as Python would, but without destroying all modules first, which takes two CPU seconds with vLLM."""
    if isinstance(end.code, str):
        raise end  # Python prints it
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        raise end from None  # a full disk: Python reports it, with its own exit code
    os._exit(end.code or 0)


def _warning_line(message: Warning | str, *_: object, **__: object) -> str:
    """Format a Python warning for users: without file name, line number and source line."""
    return f"warning: {harmless(str(message))}\n"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpc-es {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(run)


@app.command()
def status(run: RunFolder, whole: AllRows = False, json: Json = False) -> None:
    """Show version, fitness, workers, rate and time left of a run, and the state, node and pending reason of its Slurm
    jobs."""
    import msgspec

    from hpc_es.cli.output import absent_lines, console, jobs_report, print_json, status_line, status_table
    from hpc_es.transport.messages import Status, StatusRequest
    from hpc_es.transport.observer import ask
    from hpc_es.worker.seat import with_absent

    paths = run_paths(run)
    jobs = _slurm_jobs(paths)
    try:
        answer = ask(paths, StatusRequest(), STATUS_TIMEOUT_S)
    except TransportError as error:
        answer = _status_at_rest(paths)
        if answer.state != "finished":
            say(_why_no_head(jobs) or error, err=True)
    assert isinstance(answer, Status), "the answer to a StatusRequest"
    answer = with_absent(answer, paths)
    if json:
        described = [{"role": role, **dataclasses.asdict(job), "explanation": job.explanation} for role, job in jobs]
        print_json({**msgspec.structs.asdict(answer), "jobs": described})
        return
    if answer.workers:
        console().print(status_table(answer, whole=whole))
    else:
        console().print(f"{run}: {status_line(answer)}")
        for line in absent_lines(answer):
            console().print(line)
    if jobs:
        console().print(jobs_report(jobs, whole=whole))


@app.command()
def verify(run: RunFolder, model: BaseModel = None, whole: AllRows = False, json: Json = False) -> None:
    """Rebuild every version from the base model and the journal, and check everything that the run recorded."""
    from hpc_es.cli.output import console, print_json, versions_table
    from hpc_es.recorded.verify import verify as verify_run

    out = console(stderr=json)
    report = verify_run(run_paths(run).root, model=model, say=out.print)
    if json:
        print_json({"run": str(run), "ok": report.ok, **dataclasses.asdict(report)})
    out.print(versions_table(report.versions, whole=whole))
    for problem in report.problems:
        out.print(f"wrong: {problem}", style="red")
    others = report.num_results - report.num_counted
    out.print(
        f"{report.num_results} results were reported: {report.num_counted} are in updates; {others} are from "
        "evaluations, discarded or unused"
    )
    if not report.ok:
        raise VerifyError(f"{run} is inconsistent: {plural(len(report.problems), 'problem')}, see above")
    newest = report.versions[-1]
    if newest.proven:
        out.print(f"{run}: everything is consistent, proven up to version {newest.version}", style="green")
    else:
        what = "everything is consistent; theta comes from a trainer, so only kept checkpoints can be proven"
        out.print(f"{run}: {what}", style="green")


@app.command()
def replay(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    version: Annotated[int | None, typer.Option(help="Version to write. Default: the last.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="fp32: exactly the parameters of the run. base: the base model's dtype, for serving.")
    ] = Dtype.fp32,
    model: BaseModel = None,
    json: Json = False,
) -> None:
    """Rebuild any version bit for bit, and write it as a Hugging Face model folder."""
    import msgspec

    from hpc_es.cli.output import console, print_json
    from hpc_es.config import load
    from hpc_es.params.export import export
    from hpc_es.recorded.verify import replay as replay_run

    paths = run_paths(run)
    base = model or Path(load(paths.config).config.model.path)
    arena = replay_run(paths.root, version, model=base)
    manifest = export(arena, base, out, "float32" if dtype is Dtype.fp32 else "base")
    if json:
        print_json({"run": str(run), "out": str(out), **msgspec.structs.asdict(manifest)})
    text = f"{out}: theta_{manifest.version} of {run} in {manifest.dtype}, digest {manifest.digest:016x} in fp32"
    console(stderr=json).print(text)


@model_app.command("get")
def model_get(
    name: Annotated[str, typer.Argument(help="Name of the model, e.g. smollm2-135m.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: models/NAME.")] = None,
) -> None:
    """Download a small model into a local Hugging Face model folder."""
    from hpc_es.params.models import get_model

    get_model(name, out or Path("models", name), say=say)


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None, site: slurm.SiteFile = None) -> None:
    """Show the resolved configuration, and where each value comes from."""
    from hpc_es.config import flatten, load
    from hpc_es.config.yaml12 import dump_inline

    loaded = load(config, overrides or (), site=site)
    rows = [(f"{key}={dump_inline(value)}", loaded.origins[key]) for key, value in flatten(loaded.config)]
    width = max(len(text) for text, _ in rows)
    for text, origin in rows:
        say(f"{text:<{width}}  # {origin}")


evaluate.add_commands(app)
slurm.add_commands(app)
simulate.add_commands(app)
plan.add_commands(app)
probe.add_commands(app)
study.add_commands(app)
report.add_commands(app)
episodes.add_commands(app)
env.add_commands(app)
retention.add_commands(app)


@app.command(hidden=True)
def head(
    run: RunFolder,
    local: Annotated[bool, typer.Option("--local", help="All workers run on this machine.")] = False,
    parent: Parent = None,
) -> None:
    """Run the head of a run."""
    paths = run_paths(run)
    if _be_role(paths, "head", parent):
        from hpc_es.launch.slurm_role import be_head

        raise typer.Exit(be_head(paths, Place.here()))
    from hpc_es.head.loop import run_head

    raise typer.Exit(run_head(paths.root, local=local))


@app.command()
def worker(
    run: RunFolder,
    seat: Annotated[
        str | None,
        typer.Option(help="Name of the worker's place in the run. Default: its Slurm job, or its host and process id."),
    ] = None,
    parent: Parent = None,
) -> None:
    """Add a worker to a run, at any time, from any node that can access the run folder."""
    from hpc_es.launch.witness import died_as_worker, stand_witness
    from hpc_es.worker.seat import occupied

    paths, seat = run_paths(run), Place.here().seat if seat is None else seat_name(seat)
    is_slurm_job = _be_role(paths, "worker", parent)
    stand_witness(died_as_worker(paths, seat))
    with occupied(paths, seat):
        if is_slurm_job:
            from hpc_es.launch.slurm_role import be_worker

            raise typer.Exit(be_worker(paths, seat, Place.here()))
        from hpc_es.worker.loop import run_worker

        raise typer.Exit(run_worker(paths.root, seat, local=parent is not None))


def _be_role(paths: RunPaths, role: Literal["head", "worker"], parent: int | None) -> bool:
    """Set up the process of a head or worker; returns whether it is a Slurm job of its own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is an open file; the limit is often 1024
    modes.follow(paths.root)
    is_slurm_job = parent is None and Place.here().job is not None
    if parent is not None:
        from hpc_es.launch.process import follow_parent

        follow_parent(parent)
    elif is_slurm_job:
        from hpc_es.launch.slurm_role import enter

        enter(paths, role, Place.here())
    log_to(sys.stderr)
    return is_slurm_job


def _slurm_jobs(paths: RunPaths) -> "list[tuple[Role, JobStatus]]":
    """The run's Slurm jobs; empty, with a message, if Slurm does not answer: the rest of the status is still shown."""
    from hpc_es.errors import LaunchError

    if not paths.slurm.is_dir():
        return []
    from hpc_es.launch.slurm import job_statuses

    try:
        return job_statuses(paths)
    except LaunchError as error:
        say(f"the state of the Slurm jobs is not available: {error}", err=True)
        return []


def _why_no_head(jobs: "list[tuple[Role, JobStatus]]") -> str:
    """What Slurm says about a head that does not answer; empty where it has no job that is not over."""
    heads = [job for role, job in jobs if role == "head" and not job.is_final]
    if not heads:
        return ""
    said = f"job {heads[-1].name} is {heads[-1].state}" + (f" ({heads[-1].explanation})" if heads[-1].reason else "")
    if heads[-1].state == "RUNNING":
        return f"the head does not answer yet: {said}"
    return f"the head waits in the queue: {said}"


def _status_at_rest(paths: RunPaths) -> "Status":
    """The status of a run without a head, from its journal. Errors: StoreError."""
    from hpc_es.config import load, refuse_another
    from hpc_es.head.ledger import Ledger
    from hpc_es.store.journal import fold_journal, newest_start
    from hpc_es.transport.messages import Status

    config = load(paths.config).config
    ledger = Ledger()
    fold_journal(paths.root, ledger.apply)
    start = newest_start(paths)
    if start is not None:
        refuse_another(start.config_json, config, paths.config)
    eval_version = max(ledger.eval_fitness, default=None)
    return Status(
        run_id=start.run_id if start else config.run.name,
        generation=start.generation if start else 0,
        state="finished" if ledger.finished else "no head answers",
        version=ledger.version,
        num_updates=config.run.num_updates,
        fitness=ledger.fitness,
        eval_fitness=None if eval_version is None else ledger.eval_fitness[eval_version],
        eval_version=eval_version,
        cohort_done=min(ledger.num_due, config.es.population),
        cohort_size=config.es.population,
        seconds_elapsed=0.0,
        seconds_left=None,
        tokens_per_second=None,
        workers=(),
        events=(),
    )
