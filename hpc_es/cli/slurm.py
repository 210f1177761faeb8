"""The commands for a cluster: prepare, submit, cancel, drain, logs, sbatch-flags.

They run on login nodes, so they need neither torch nor vLLM.
"""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_es.cli.arguments import (
    EXIT_FAILED,
    EXIT_STOPPED,
    ConfigFile,
    Json,
    Overrides,
    RunFolder,
    load_run,
    run_paths,
)
from hpc_es.cli.terminal import say

if TYPE_CHECKING:
    from hpc_es.launch.slurm import Submission
    from hpc_es.paths import RunPaths

SiteFile = Annotated[
    Path | None, typer.Option("--site", metavar="FILE", help="A YAML file with the settings of your cluster.")
]
STATUS_EVERY_S = 2.0
JOBS_EVERY_S = 5.0
"""Pause between two questions to Slurm; the head answers faster and costs nobody else anything."""


class RoleName(StrEnum):
    head = "head"
    worker = "worker"


def add_commands(app: typer.Typer) -> None:
    for command in (prepare, submit, cancel, drain, logs, sbatch_flags):
        app.command()(command)


def prepare(config: ConfigFile, overrides: Overrides = None, site: SiteFile = None) -> None:
    """Create the run folder without starting anything, for users who call sbatch themselves."""
    from hpc_es.launch import prepare as settle

    settings = load_run(config, overrides, site, num_workers=lambda settings: settings.slurm.num_at_once)
    with settle.launcher_lock(settings):
        paths, _ = settle.write_folder(settings)
        settle.check(settings, in_slurm=True)
    say(paths.root)


def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    site: SiteFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the scripts without writing or queueing anything.")
    ] = False,
    json: Json = False,
) -> None:
    """Queue head and workers with Slurm; in an existing run folder, resume the run."""
    from hpc_es.cli.output import console, print_json
    from hpc_es.launch import prepare, slurm

    settings = load_run(config, overrides, site, num_workers=lambda settings: settings.slurm.num_at_once)
    if dry_run:
        paths = prepare.run_paths(settings)
        for role, text in slurm.scripts(settings, paths).items():
            say(f"==> {paths.slurm_script(role)} <==\n{text}")
        say("Workers are queued with --dependency=after:HEAD, so that none holds a GPU while it waits for the head.")
        return
    out = console(stderr=json)
    submission = slurm.submit(settings)
    root = submission.paths.root
    for difference in submission.changed:
        out.print(f"changed since the run began: {difference}")
    out.print(f"{root}: head {submission.head.job_id}, workers {submission.workers.job_id}")
    facts = {"run": str(root), "head": submission.head.job_id, "workers": submission.workers.job_id}
    if not wait:
        for command in (f"hpc-es status {root}", f"hpc-es logs {root}", f"hpc-es cancel {root}"):
            out.print(f"  {command}")
        if json:
            print_json(facts)
        return
    try:
        state = _watch(submission, stderr=json)
    except KeyboardInterrupt:
        out.print(f"{root}: the jobs continue; `hpc-es status {root}`, `hpc-es cancel {root}`")
        raise typer.Exit(EXIT_STOPPED) from None
    out.print(f"{root}: {state}")
    if json:
        print_json({**facts, "state": state, "finished": submission.finished})
    if state != "COMPLETED":
        _show_log(submission.paths, "head", slurm.NUM_LINES_QUOTED, stderr=json)
        out.print(f"see `hpc-es logs {root}`; resume with `hpc-es submit {root}`")
        raise typer.Exit(EXIT_FAILED)


def cancel(run: RunFolder) -> None:
    """Cancel all Slurm jobs of a run. `hpc-es submit RUN` resumes it."""
    from hpc_es.launch import slurm

    say(f"cancelled {', '.join(slurm.cancel(run_paths(run)))}")


def drain(
    run: RunFolder,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="A seat (12_3), an array index (3), or the name of a worker.")
    ],
) -> None:
    """Make a worker exit after its current evaluation. The run continues without it."""
    from hpc_es.launch.drain import drain as drain_worker

    say(drain_worker(run_paths(run), worker))


def logs(
    run: RunFolder,
    role: Annotated[
        str, typer.Argument(metavar="[WORKER]", help="A seat (12_3), an array index (3), or head.")
    ] = "head",
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines to show, from the end of each file; 0: all.")
    ] = 40,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new lines, also of later attempts.")
    ] = False,
) -> None:
    """Show the newest log of the head or of a worker, and Slurm's output about its job."""
    paths = run_paths(run)
    _show_log(paths, role, lines)
    if follow:
        from hpc_es.launch.logs import follow as following

        try:
            for line in following(paths, role):
                say(line)
        except KeyboardInterrupt:
            raise typer.Exit from None


def sbatch_flags(role: RoleName, run: RunFolder) -> None:
    """Print the sbatch options of a run's configuration: sbatch $(hpc-es sbatch-flags head RUN) slurm/head.sbatch
    RUN."""
    from hpc_es.config import load
    from hpc_es.errors import ConfigError
    from hpc_es.launch import slurm

    paths = run_paths(run)
    flags = slurm.flags(load(paths.config).config, paths, role.value)
    if awkward := [flag for flag in flags if len(shlex.split(flag)) != 1 or shlex.split(flag)[0] != flag]:
        raise ConfigError(f"the shell would change {awkward[0]} in $(...); pass it to sbatch yourself")
    say(" ".join(flags))


def _show_log(paths: "RunPaths", role: str, lines: int, *, stderr: bool = False) -> None:
    from hpc_es.launch.logs import find_log

    log = find_log(paths, role)
    for path in (log.path, log.slurm_output):
        if path is not None:
            say(f"==> {path} <==", bold=True, err=stderr)
            say("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]), err=stderr)


def _watch(submission: "Submission", *, stderr: bool) -> str:
    """Show the run's progress until head and workers have ended; returns the final state of the head's job."""
    import time

    from hpc_es.cli.output import console, jobs_line, progress, report
    from hpc_es.errors import TransportError
    from hpc_es.transport.messages import Status, StatusRequest
    from hpc_es.transport.observer import ask
    from hpc_es.worker.seat import with_absent

    out = console(stderr=stderr)
    with progress(out) as shown:
        told, asked_at, jobs = "", time.monotonic(), submission.status()
        while not (head := jobs[0]).is_final:
            if (line := jobs_line(jobs)) != told:
                shown.event(line)
                told = line
            if head.state == "RUNNING":
                try:
                    answer = ask(submission.paths, StatusRequest(), STATUS_EVERY_S)
                except TransportError:
                    answer = None  # the head has not started yet, or cannot be reached from this node
                if isinstance(answer, Status):
                    shown.status(with_absent(answer, submission.paths))
            time.sleep(STATUS_EVERY_S)
            if time.monotonic() > asked_at + JOBS_EVERY_S:
                asked_at, jobs = time.monotonic(), submission.status()
        submission.wait_for_workers()
    if head.state == "COMPLETED":
        report(submission.paths, out)
    return head.state
