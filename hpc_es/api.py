"""The public face of hpc_es, for notebooks and scripts: `import hpc_es` offers what is defined here.

Invariant: importing this module is fast. Functions import torch, numpy, pandas or matplotlib when they are called.
"""

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.config import Config, load, refuse_moved
from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths

if TYPE_CHECKING:
    from hpc_es.analysis.figures import plots
    from hpc_es.analysis.report.build import Written
    from hpc_es.launch.local import Outcome
    from hpc_es.launch.slurm import Submission
    from hpc_es.params.arena import Arena
    from hpc_es.store import Run
    from hpc_es.traces import Trace
    from hpc_es.transport.messages import Status

    AnyRun = Run | str | os.PathLike[str]
    """The tables of a run, its folder, or a run.h5. What `run` and `submit` return can be used as a folder, too."""

__all__ = ["Arena", "attach", "load_config", "plots", "read", "read_traces", "replay", "report", "run", "submit"]


def __getattr__(name: str) -> Any:
    if name == "Arena":
        return importlib.import_module("hpc_es.params.arena").Arena
    if name == "plots":
        return importlib.import_module("hpc_es.analysis.figures.plots")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_config(path: str | Path, *overrides: str, site: str | Path | None = None) -> Config:
    """Read and check the configuration of a run.

    path: a YAML file, or a run folder, whose config.yaml is read. overrides: `key=value`, or paths of further YAML
    files (configs/staleness/..., configs/methods/...); later ones win. site: a YAML file with the settings of a
    cluster. Returns a frozen pydantic model with one attribute per section: `config.es.population`.

        config = hpc_es.load_config("configs/quickstart.yaml", "es.alpha=1e-3", "run.name=first")

    Errors: ConfigError that names each wrong key, its value, where it was set, and what is allowed.
    """
    return load(Path(path), overrides, site=None if site is None else Path(site)).config


def run(
    config: Config | str | Path,
    *overrides: str,
    on_event: Callable[[str], None] | None = None,
    on_status: "Callable[[Status], None] | None" = None,
) -> "Outcome":
    """Run head and workers on this machine until the run is finished; in an existing run folder, resume the run.

    config: the result of `load_config`, or a path with overrides, as for `load_config`. on_event: called with a line of
    text for events such as the restart of a process, e.g. `print`. on_status: called about once a second with the
    version, fitness, workers and time left. Ctrl-C (in a notebook: interrupt the kernel) stops the run cleanly.

    Returns an outcome: `finished`, `reason`, and `paths.root`, the run folder. `read`, `replay`, `report` and `plots`
    accept it as a run.

        outcome = hpc_es.run("configs/quickstart.yaml", "run.num_updates=2", on_event=print)
        hpc_es.read(outcome).updates

    Errors: ConfigError, ModelError, EnvError before anything starts; LaunchError or RunFailed with the end of the log
    of the process that failed.
    """
    from hpc_es.launch.local import run_local

    settings = _settings(config, overrides, None)
    _warn_of_misfits(settings, settings.launch.workers)
    return run_local(settings, on_event=on_event or _ignore, on_status=on_status or _ignore)


def submit(config: Config | str | Path, *overrides: str, site: str | Path | None = None) -> "Submission":
    """Queue the head and the array of workers of a run with Slurm; in an existing run folder, resume the run.

    config, overrides, site: as for `load_config`. Returns at once, with handles like those of submitit: `head`,
    `workers` (the whole array) and each of `workers.tasks` have `job_id`, `state`, `done()`, `wait(timeout_s)`,
    `result(timeout_s)`, `exception(timeout_s)`, `stdout()`, `stderr()`, `log_files` and `cancel()`. The submission has
    the same methods for the whole run, and `paths.root`, the run folder; its `result()` returns the tables of the run.

        submission = hpc_es.submit("configs/quickstart.yaml", site="my-cluster.yaml")
        submission.job_id, submission.state, [task.state for task in submission.workers.tasks]
        submission.result().updates  # waits for the end of the run

    Errors: ConfigError, ModelError, EnvError before anything is queued; LaunchError when Slurm refuses, and when the
    run is finished or has a head already.
    """
    from hpc_es.launch.slurm import submit as submit_jobs

    settings = _settings(config, overrides, site)
    _warn_of_misfits(settings, settings.slurm.num_at_once)
    return submit_jobs(settings)


def attach(run: "AnyRun") -> "Submission":
    """Handles of the Slurm jobs of a run, as `submit` returned them, for another notebook or script.

        submission = hpc_es.attach("runs/quickstart")
        submission.state, submission.done(), submission.stdout()

    Errors: LaunchError when the run folder has no jobs.
    """
    from hpc_es.launch.slurm import attach as attach_to

    return attach_to(_folder_of(run))


def read(run: "AnyRun") -> "Run":
    """Read the tables of a run as pandas DataFrames; needs neither torch nor the machine of the run.

    run: a run folder, a run.h5 that was copied elsewhere, or the result of `run` or `submit`. Returns the tables
    `evaluations`, `updates`, `episodes`, `evals`, `workers`, `events` and `contexts`; `units` and `meanings`, which
    explain their columns; `config` and `attrs`. Times are seconds since 1970-01-01 UTC.

        tables = hpc_es.read("runs/quickstart")
        tables.updates[["version", "fitness_mean", "update_norm"]]
        tables.meanings["updates"]["update_norm"], tables.units["updates"]["update_norm"]

    Errors: ConfigError if there is no run; StoreError if run.h5 is damaged and there is no journal beside it.
    """
    from hpc_es.store import Run
    from hpc_es.store import read as read_run

    return run if isinstance(run, Run) else read_run(Path(run))


def read_traces(run: "AnyRun") -> "Iterator[Trace]":
    """Read the sampled tokens of a run's evaluations, one trace per evaluation; needs neither torch nor a tokenizer.

    run: a run folder, or what `run` or `submit` returned, of a run with `store.traces: true`. A trace has `eval_id`,
    the `digest` of theta and `episodes`; an episode has `task` and `turns`; a turn has `prompt` and `sampled` (token
    ids), `log_probabilities` and `reward`.

        for trace in hpc_es.read_traces("runs/quickstart"):
            print(trace.eval_id, sum(len(turn.sampled) for episode in trace.episodes for turn in episode.turns))

    Errors: StoreError for a damaged trace.
    """
    from hpc_es.traces import read_traces as read_all

    return read_all(_folder_of(run))


def replay(run: "AnyRun", version: int | None = None, *, model: str | Path | None = None) -> "Arena":
    """Rebuild theta of any version bit for bit, from base model and journal, and compare its digest with the run's.

    run: as for `read`, except a copied run.h5. version: by default the last. model: path of the base model, if it has
    moved. Returns an arena with theta in float32: `arena.tensor(name)`, an array, `arena.version`, `arena.digest()`.

        theta = hpc_es.replay("runs/quickstart", 16)
        theta.tensor("model.norm.weight").mean()

    Errors: ConfigError if the run has no such version; VerifyError if the result differs from the run's parameters.
    """
    from hpc_es.recorded.verify import replay as rebuild

    return rebuild(_folder_of(run), version, model=None if model is None else Path(model))


def report(*runs: "AnyRun", out: str | Path | None = None) -> "Written":
    """Write the report of one run, or of several side by side: report.html, figures as PNG, tables as CSV.

    runs: as for `read`; runs that differ only in their seed form one condition. out: the directory to write; for one
    run folder the default is its report/. Returns the written paths, `page`, `figures` and `tables`, and `absent`:
    figures that could not be drawn, with the reason.

        hpc_es.report("runs/quickstart").page
        hpc_es.report("runs/sync", "runs/async", out="comparison")

    Errors: ConfigError, StoreError.
    """
    from hpc_es import modes
    from hpc_es.analysis.report.build import write_report

    if out is not None:
        return write_report([read(run) for run in runs], Path(out))
    if len(runs) != 1 or not (folder := _folder_of(runs[0])).is_dir():
        raise ConfigError(f"a report of {len(runs)} runs or of a run.h5 needs a directory to write: out=...")
    with modes.within(folder):
        return write_report([read(folder)], RunPaths(folder).report)


def _settings(config: Config | str | Path, overrides: tuple[str, ...], site: str | Path | None) -> Config:
    """The configuration to run. Errors: ConfigError, also for a run folder that was moved."""
    if isinstance(config, Config):
        if overrides or site is not None:
            raise ConfigError("overrides and site need a path: pass them to load_config, or pass a path here")
        return config
    settings = load_config(config, *overrides, site=site)
    if Path(config).is_dir():
        refuse_moved(Path(config), settings)
    return settings


def _warn_of_misfits(config: Config, num_workers: int) -> None:
    """Warn, as the command line does, if the number of workers does not fit the schedule, before a long run starts."""
    from hpc_es.simulator.worker_count import worker_count_warnings

    for sentence in worker_count_warnings(config, num_workers):
        warnings.warn(sentence, stacklevel=3)


def _folder_of(run: "AnyRun") -> Path:
    """The run folder. Errors: ConfigError for tables that were read from a copied run.h5."""
    from hpc_es.store import Run

    if not isinstance(run, Run):
        return Path(run)
    if run.folder is None:
        raise ConfigError("these tables are from a run.h5 without its run folder: pass the run folder instead")
    return run.folder


def _ignore(news: object) -> None:
    pass
