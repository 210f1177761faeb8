"""`import hpc_es`: what a notebook needs, lazily."""

import shutil
import subprocess
import sys
from pathlib import Path

import first_release
import pytest
from repository import ROOT
from test_slurm import Cluster, config

import hpc_es
from hpc_es.config import Config, save
from hpc_es.errors import ConfigError, LaunchError
from hpc_es.launch import local, slurm
from hpc_es.paths import RunPaths

__all__ = ["config"]
HEAVY = ("torch", "numpy", "pandas", "h5py", "matplotlib", "pydantic", "msgspec")


def test_importing_it_imports_nothing_heavy_and_names_what_there_is() -> None:
    code = f"import sys, hpc_es; print([name for name in {HEAVY} if name in sys.modules], sorted(hpc_es.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["Arena", "attach", "load_config", "plots", "read", "read_traces", "replay", "report", "run", "submit"]
    assert done.stdout == f"[] {names}\n"
    assert set(names) <= set(dir(hpc_es))


def test_loading_a_configuration_needs_no_torch() -> None:
    code = "import sys, hpc_es; hpc_es.load_config(sys.argv[1]); print('torch' in sys.modules, 'numpy' in sys.modules)"
    command = [sys.executable, "-c", code, str(ROOT / "configs" / "quickstart.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False\n"


@pytest.mark.parametrize(
    "name", ["load_config", "run", "submit", "attach", "read", "read_traces", "replay", "report", "plots", "Arena"]
)
def test_every_name_is_there_with_a_docstring(name: str) -> None:
    assert len(getattr(hpc_es, name).__doc__) > 50


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'reed'; it has Arena, attach, load_config"):
        hpc_es.reed  # noqa: B018


def test_overrides_and_a_configuration_do_not_go_together(config: Config) -> None:
    loaded = hpc_es.load_config(ROOT / "configs" / "quickstart.yaml", "es.alpha=1e-3", "run.name=first")
    assert (loaded.es.alpha.start, loaded.run.name) == (1e-3, "first")
    with pytest.raises(ConfigError, match="pass them to load_config"):
        hpc_es.run(config, "es.alpha=1e-3")


def test_a_run_folder_is_loaded_anywhere_but_resumed_only_where_it_began(config: Config, tmp_path: Path) -> None:
    save(config, tmp_path / "config.yaml")
    assert hpc_es.load_config(tmp_path, "run.seed=3").run.seed == 3
    with pytest.raises(ConfigError, match="run this command in the directory where the run was started"):
        hpc_es.run(tmp_path)


def test_workers_that_do_not_fit_the_schedule_are_warned_of(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "run_local", lambda config, **callbacks: "outcome")
    too_many = config.model_copy(update={"launch": config.launch.model_copy(update={"workers": 64})})
    with pytest.warns(UserWarning, match="64 workers"):
        assert hpc_es.run(too_many) == "outcome"


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> local.Outcome:
    """What `hpc_es.run` returns, of a recorded run."""
    monkeypatch.chdir(tmp_path)
    return local.Outcome(RunPaths(first_release.unpack(tmp_path)), False, "the head was stopped")


def test_what_run_returns_stands_for_the_run(outcome: local.Outcome) -> None:
    tables = hpc_es.read(outcome)
    assert len(tables.updates) > 0
    assert hpc_es.read(tables) is tables
    assert hpc_es.plots.plot_learning_curve(outcome)._repr_png_().startswith(b"\x89PNG"), "a notebook shows nothing"
    theta = hpc_es.replay(outcome, 3)
    assert (theta.version, theta.digest()) == (3, first_release.DIGESTS[3])
    with pytest.raises(ConfigError, match="has no version 99"):
        hpc_es.replay(tables, 99)


def test_a_report_of_several_runs_or_of_a_file_alone_needs_a_directory(outcome: local.Outcome, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a report of 2 runs .* needs a directory"):
        hpc_es.report(outcome, outcome)
    alone = shutil.copy(outcome.paths.hdf5, tmp_path / "alone.h5")
    with pytest.raises(ConfigError, match=r"a run\.h5 needs a directory"):
        hpc_es.report(alone)
    with pytest.raises(ConfigError, match="pass the run folder instead"):
        hpc_es.replay(hpc_es.read(alone))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Slurm as `hpc_es.submit` sees it."""
    played = Cluster()
    monkeypatch.setattr(slurm, "Slurm", lambda: played.slurm)
    return played


def test_handles_of_a_submission_do_what_a_user_of_submitit_expects(config: Config, cluster: Cluster) -> None:
    submission = hpc_es.submit(config)
    head, workers = submission.head, submission.workers
    assert (submission.job_id, head.job_id, workers.job_id) == ("101", "101", "102")
    assert (submission.state, submission.done(), head.done()) == ("RUNNING", False, False)
    assert Path(submission) == submission.paths.root

    del cluster.states["102"]
    cluster.states.update({"101": "FAILED", "102_0": "COMPLETED", "102_1": "FAILED"})
    assert [task.job_id for task in workers.tasks] == ["102_0", "102_1"]
    assert [task.state for task in workers.tasks] == ["COMPLETED", "FAILED"]
    assert (submission.done(), workers.state, workers.tasks[0].result()) == (True, "FAILED", "COMPLETED")
    assert workers.tasks[0].exception() is None
    with pytest.raises(LaunchError, match=r"head 101 is FAILED; the end of its log:\n\(its log is empty\)"):
        submission.result()


def test_handles_show_the_logs_of_every_task_and_attempt(config: Config, cluster: Cluster) -> None:
    submission = hpc_es.submit(config)
    assert submission.stdout() == ""
    for name in ("slurm-101.out", "head-101.0.log", "worker-102_10.0.log", "worker-102_2.1.log", "worker-102_2.0.log"):
        (submission.paths.logs / name).write_text(f"{name}\n")
    (submission.paths.logs / "head-1010.0.log").write_text("of another job\n")
    (submission.paths.logs / "slurm-102_2.out").write_text("slurm-102_2.out\n")
    assert submission.stdout() == submission.head.stderr() == "slurm-101.out\nhead-101.0.log\n"
    shown = ["slurm-102_2.out", "worker-102_2.0.log", "worker-102_2.1.log", "worker-102_10.0.log"]
    assert [path.name for path in submission.workers.log_files] == shown
    cluster.states.update({"102_2": "FAILED", "102_10": "RUNNING"})
    assert str(submission.workers.tasks[1].exception()).endswith("worker-102_2.0.log\nworker-102_2.1.log")


def test_a_handle_cancels_a_task_or_everything(config: Config, cluster: Cluster) -> None:
    submission = hpc_es.submit(config)
    del cluster.states["102"]
    cluster.states |= {"102_0": "RUNNING", "102_1": "RUNNING"}
    submission.workers.tasks[1].cancel()
    assert cluster.states == {"101": "RUNNING", "102_0": "RUNNING", "102_1": "CANCELLED"}
    submission.cancel()
    assert set(cluster.states.values()) == {"CANCELLED"}
