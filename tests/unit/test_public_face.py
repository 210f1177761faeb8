"""`import hpc_es`: what a notebook needs, lazily."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import write_run
from repository import ROOT
from test_slurm import Cluster, config

import hpc_es
from hpc_es.config import Config
from hpc_es.errors import ConfigError, LaunchError
from hpc_es.launch import slurm

__all__ = ["config"]
HEAVY = ("torch", "numpy", "pandas", "h5py", "matplotlib", "pydantic", "msgspec")


def test_importing_it_imports_nothing_heavy_and_names_what_there_is() -> None:
    code = f"import sys, hpc_es; print([name for name in {HEAVY} if name in sys.modules], sorted(hpc_es.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["Arena", "load_config", "plots", "read", "replay", "report", "run", "submit"]
    assert done.stdout == f"[] {names}\n"
    assert set(names) <= set(dir(hpc_es))


def test_loading_a_configuration_needs_no_torch() -> None:
    code = "import sys, hpc_es; hpc_es.load_config(sys.argv[1]); print('torch' in sys.modules, 'numpy' in sys.modules)"
    command = [sys.executable, "-c", code, str(ROOT / "configs" / "quickstart.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False\n"


@pytest.mark.parametrize("name", ["load_config", "run", "submit", "read", "replay", "report", "plots", "Arena"])
def test_every_name_is_there_with_a_docstring(name: str) -> None:
    assert len(getattr(hpc_es, name).__doc__) > 50


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'reed'; it has Arena, load_config"):
        hpc_es.reed  # noqa: B018


def test_overrides_and_a_configuration_do_not_go_together(config: Config) -> None:
    loaded = hpc_es.load_config(ROOT / "configs" / "quickstart.yaml", "es.alpha=1e-3", "run.name=first")
    assert (loaded.es.alpha.start, loaded.run.name) == (1e-3, "first")
    with pytest.raises(ConfigError, match="give them to load_config"):
        hpc_es.run(config, "es.alpha=1e-3")


def test_a_run_is_read_and_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert len(hpc_es.read(tmp_path / "run").updates) > 0
    with pytest.raises(ConfigError, match="report of 2 runs: name the folder"):
        hpc_es.report(tmp_path / "run", tmp_path / "run")


def test_submission_handles_do_what_a_user_of_submitit_expects(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    monkeypatch.setattr(slurm, "Slurm", lambda: cluster.slurm)
    submission = hpc_es.submit(config)
    head, workers = submission.head, submission.workers
    assert (submission.job_id, head.job_id, workers.job_id) == ("101", "101", "102")
    assert (submission.state, submission.done(), head.done()) == ("RUNNING", False, False)
    assert head.stdout() == ""
    (submission.paths.logs / "slurm-101.out").write_text("head says\n")
    (submission.paths.logs / "slurm-102_0.out").write_text("worker 0\n")
    (submission.paths.logs / "slurm-102_1.out").write_text("worker 1\n")
    assert (head.stdout(), workers.stderr()) == ("head says\n", "worker 0\nworker 1\n")
    cluster.states["101"] = "FAILED"
    cluster.states["102"] = "COMPLETED"
    assert (submission.done(), workers.result()) == (True, "COMPLETED")
    assert str(head.exception()) == "head 101 is FAILED"
    assert workers.exception() is None
    with pytest.raises(LaunchError, match="head 101 is FAILED; see its log: head says"):
        head.result()
    with pytest.raises(LaunchError, match="the head is FAILED; see `hpc-es logs"):
        submission.result()
