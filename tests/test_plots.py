"""Learning curves show what the tables say."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_run import write_run

import hpc_es.store
from hpc_es.analysis.plots import plot_learning_curve, save_png
from hpc_es.store.hdf5 import rebuild


@pytest.fixture
def run(tmp_path: Path) -> hpc_es.store.Run:
    write_run(tmp_path / "run", 8)
    return hpc_es.store.read(rebuild(tmp_path / "run"))


def test_the_curve_has_every_update_its_trailing_mean_and_every_evaluation(run: hpc_es.store.Run) -> None:
    left, right = plot_learning_curve([run], measure="fitness").axes
    (thin, thick), points = left.lines, right.lines[0]
    fitness = run.updates["fitness_mean"].to_numpy()
    assert list(thin.get_xdata()) == list(range(1, 9))
    assert list(thin.get_ydata()) == list(fitness)
    trailing = [fitness[max(0, update - 5) : update].mean() for update in range(1, 9)]
    assert np.allclose(np.asarray(thick.get_ydata(), dtype=float), trailing)
    assert list(points.get_xdata()) == [0, 8]
    assert list(points.get_ydata()) == list(run.evals["reward_mean"])


def test_several_runs_share_a_figure_that_is_saved_as_png(run: hpc_es.store.Run, tmp_path: Path) -> None:
    path = save_png(plot_learning_curve([run, run]), tmp_path / "report" / "curve.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_naming_the_modules_loads_neither_matplotlib_nor_pandas() -> None:
    script = (
        "import sys, hpc_es.analysis.plots, hpc_es.analysis.tables; print({'matplotlib', 'pandas'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
