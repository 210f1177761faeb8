"""The public face of hpc_es, for notebooks and scripts: `import hpc_es` offers what is defined here.

Invariant: importing this module is cheap. What needs torch, numpy, pandas or matplotlib is imported when it is called.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.config import Config, load
from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths

if TYPE_CHECKING:
    from hpc_es.analysis.figures import plots
    from hpc_es.analysis.report.build import Written
    from hpc_es.launch.local import Outcome
    from hpc_es.launch.slurm import Submission
    from hpc_es.params.arena import Arena
    from hpc_es.store import Run

__all__ = ["Arena", "load_config", "plots", "read", "replay", "report", "run", "submit"]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "Arena":
        return importlib.import_module("hpc_es.params.arena").Arena
    if name == "plots":
        return importlib.import_module("hpc_es.analysis.figures.plots")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_config(path: str | Path, *overrides: str, site: str | Path | None = None) -> Config:
    """The configuration of a run.

    path: a YAML file, or a run folder, whose config.yaml is read. overrides: `key=value`, or paths of further YAML
    files (configs/staleness/..., configs/methods/...), applied in order. site: a file with the settings of a cluster.

        config = hpc_es.load_config("configs/quickstart.yaml", "es.alpha=1e-3", "run.name=first")

    Errors: ConfigError that names each wrong key, its value, where it stands, and what is allowed.
    """
    path = Path(path)
    file = RunPaths(path).config if path.is_dir() else path
    return load(file, overrides, site=None if site is None else Path(site)).config


def run(config: Config | str | Path, *overrides: str) -> "Outcome":
    """Run head and workers on this machine until the run is done; in an existing run folder, resume the run.

    config: as `load_config` takes or returns it. Returns an outcome with `paths.root` (the run folder), `finished` and
    `reason`.

        outcome = hpc_es.run("configs/quickstart.yaml", "run.num_updates=2")
        hpc_es.read(outcome.paths.root).updates

    Errors: ConfigError, ModelError, EnvError before anything starts; LaunchError or RunFailed with the end of the log
    of the process that failed.
    """
    from hpc_es.launch.local import run_local

    return run_local(_config(config, overrides))


def submit(config: Config | str | Path, *overrides: str, site: str | Path | None = None) -> "Submission":
    """Queue the head and the array of workers of a run with Slurm; in an existing run folder, resume the run.

    config, overrides, site: as for `load_config`. Returns handles: `head` and `workers` are jobs with `job_id`,
    `state`, `done()`, `wait(timeout_s)`, `result(timeout_s)`, `stdout()`, `stderr()`, `exception()` and `cancel()`. The
    submission has the same for the whole run, but for the outputs, and `paths.root`, its folder.

        submission = hpc_es.submit("configs/quickstart.yaml", site="my-cluster.yaml")
        submission.head.job_id, submission.state
        run = submission.result()  # waits; then the tables of the run

    Errors: ConfigError, ModelError, EnvError before anything is queued; LaunchError when Slurm refuses, or the run is
    finished or has a head already.
    """
    from hpc_es.launch.slurm import submit as submit_jobs

    return submit_jobs(_config(config, overrides, site))


def read(path: str | Path) -> "Run":
    """The tables of a run as pandas DataFrames; needs neither torch nor the machine of the run.

    path: a run folder, or a run.h5 that was copied elsewhere. `evaluations`, `updates`, `episodes`, `evals`, `workers`,
    `events` and `contexts` are tables; `units` and `meanings` describe their columns.

        hpc_es.read("runs/quickstart").updates[["version", "fitness_mean", "lag_mean"]]

    Errors: StoreError when there is no run, or when run.h5 is damaged and no journal is beside it.
    """
    from hpc_es.store import read as read_run

    return read_run(path)


def replay(run: str | Path, version: int | None = None, *, model: str | Path | None = None) -> "Arena":
    """theta of any version, rebuilt bit for bit from base model and journal, with its digest checked.

    version: default: the last. model: the base model, if it has moved. Returns an arena: `arena.tensor(name)` is a
    float32 array.

    Errors: ConfigError when the run has no such version; VerifyError when the bits are not those that the run had.
    """
    from hpc_es.recorded.verify import replay as rebuild

    return rebuild(Path(run), version, model=None if model is None else Path(model))


def report(*runs: str | Path, out: str | Path | None = None) -> "Written":
    """Write the report of one run, or of several side by side: report.html, figures as PNG, tables as CSV.

    out: the folder to write; default for one run: its own report/. Errors: ConfigError, StoreError.
    """
    from hpc_es.analysis.report.build import write_report

    if out is None:
        if len(runs) != 1:
            raise ConfigError(f"report of {len(runs)} runs: name the folder to write with out=...")
        out = RunPaths(Path(runs[0])).report
    return write_report([read(path) for path in runs], Path(out))


def _config(config: Config | str | Path, overrides: tuple[str, ...], site: str | Path | None = None) -> Config:
    from hpc_es import envs

    if isinstance(config, Config):
        if overrides or site is not None:
            raise ConfigError("overrides apply to files: give them to load_config, or pass the path of the file here")
        settings = config
    else:
        settings = load_config(config, *overrides, site=site)
    envs.refuse_planned(settings.task.env)
    return settings
