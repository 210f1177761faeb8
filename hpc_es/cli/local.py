"""The command `run`: start head and workers as processes on this machine."""

import typer

from hpc_es.cli.arguments import EXIT_STOPPED, ConfigFile, Json, Overrides, load_run


def run(config: ConfigFile, overrides: Overrides = None, json: Json = False) -> None:
    """Run head and workers on this machine; in an existing run folder, resume the run."""
    from hpc_es.cli.output import console, print_json, progress, report
    from hpc_es.launch.local import run_local

    settings = load_run(config, overrides, num_workers=lambda settings: settings.launch.workers)
    out = console(stderr=json)
    with progress(out) as shown:
        outcome = run_local(settings, on_status=shown.status, on_event=shown.event)
    root = outcome.paths.root
    out.print(f"{root}: {outcome.reason}")
    facts = {"run": str(root), "finished": outcome.finished, "reason": outcome.reason}
    if outcome.finished:
        facts["summary"] = report(outcome.paths, out)
    else:
        out.print(f"resume with: hpc-es run {root}")
    if json:
        print_json(facts)
    if not outcome.finished:
        raise typer.Exit(EXIT_STOPPED)
