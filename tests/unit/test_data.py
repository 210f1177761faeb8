"""Data are searched in the working directory, then in the folder that HPC_ES_DATA names."""

import re
from pathlib import Path

import pytest
from repository import ROOT

from hpc_es.config import load
from hpc_es.data import data_path
from hpc_es.envs import make
from hpc_es.errors import ConfigError
from hpc_es.recorded.retention.tasks import data_folder

OWN = ("hpc_es", "configs", "examples", "slurm")
"""Folders that users get."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no HPC_ES_DATA."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("HPC_ES_DATA", raising=False)
    return tmp_path / "here"


def test_a_relative_path_is_looked_for_here_and_then_in_the_data_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = here.parent / "elsewhere"
    (elsewhere / "math").mkdir(parents=True)
    monkeypatch.setenv("HPC_ES_DATA", str(elsewhere))
    assert data_path(Path("math")) == elsewhere / "math"
    (here / "math").mkdir()
    assert data_path(Path("math")) == Path("math")
    assert data_path(Path("/nowhere")) == Path("/nowhere")


def test_without_a_variable_the_data_folder_is_the_one_in_the_working_directory(here: Path) -> None:
    (here / "data" / "retention").mkdir(parents=True)
    assert data_path(Path("retention")) == Path("data/retention")
    assert data_path(Path("data/retention")) == Path("data/retention")  # as configurations of the first release say
    assert data_folder(None) == Path("data/retention")


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("sudoku", {"path": "sudoku/{split}.jsonl"}),
        ("math_tool", {"data": "dapo", "data_dir": "math"}),
        ("math_tool", {"data": "my/{split}.jsonl"}),
        ("docvqa", {"data_dir": "docvqa"}),
        ("webshop", {"data_dir": "webshop"}),
    ],
)
@pytest.mark.parametrize("variable", [None, "/data-of-the-project"])
def test_missing_data_are_one_error_with_variable_and_remedy(
    here: Path, monkeypatch: pytest.MonkeyPatch, env: str, options: dict[str, str], variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv("HPC_ES_DATA", variable)
    state = "HPC_ES_DATA=/data-of-the-project" if variable else "HPC_ES_DATA is not set"
    with pytest.raises(ConfigError, match=re.escape(state) + ".*set HPC_ES_DATA to the folder that holds"):
        make(env, **options)


def test_a_preset_plays_the_data_that_the_variable_names(
    here: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path
) -> None:
    monkeypatch.setenv("HPC_ES_DATA", str(shared_data))
    config = load(ROOT / "configs/tasks/math_tool_aime.yaml").config
    assert make("math_tool", **config.task.options, split="eval").num_tasks == 100


def test_nothing_that_users_get_names_a_folder_of_ours() -> None:
    found = [
        str(path.relative_to(ROOT))
        for folder in OWN
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".yaml", ".sh", ".sbatch", ".ipynb")
        and re.search(r"HPC_ES_SHARED|\.\./shared", path.read_text(encoding="utf-8"))
    ]
    assert found == []
