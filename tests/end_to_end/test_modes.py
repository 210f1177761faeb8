"""Permissions of every file of a run, under every umask."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import CONFIGS
from typer.testing import CliRunner

from hpc_es import modes
from hpc_es.cli import app
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.paths import RunPaths

CONFIG = CONFIGS / "lab" / "10k.yaml"
SMALL = ("run.num_updates=1", "es.population=4", "eval.num_tasks=4", "launch.workers=1", "model.path=model")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; the umask is put back."""
    monkeypatch.chdir(tmp_path)
    before = modes.umask()
    yield tmp_path
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def found(root: Path) -> dict[str, set[int]]:
    """The modes of all folders and of all files below `root`; RUN/secrets apart."""
    paths = [root, *root.rglob("*")]
    secret = [path for path in paths if path.is_relative_to(root / "secrets")]
    others = [path for path in paths if path not in secret]
    return {
        "folders": {mode(path) for path in others if path.is_dir()},
        "files": {mode(path) for path in others if path.is_file()},
        "secret folders": {mode(path) for path in secret if path.is_dir()},
        "secret files": {mode(path) for path in secret if path.is_file()},
    }


def expected(*, group: bool) -> dict[str, set[int]]:
    open_to = {"folders": {0o750}, "files": {0o640}} if group else {"folders": {0o700}, "files": {0o600}}
    return {**open_to, "secret folders": {0o700}, "secret files": {0o600}}


@pytest.mark.slow
@pytest.mark.parametrize(("umask", "group"), [(0o000, False), (0o077, True)])
def test_every_file_of_a_run_has_the_modes_that_were_asked_for_whatever_the_umask(
    work: Path, umask: int, group: bool
) -> None:
    write_lab_model(work / "model", LAB_MODELS["lab-10k"])
    os.umask(umask)
    for command in (
        ("run", str(CONFIG), "run.name=a", f"run.group_readable={str(group).lower()}", *SMALL),
        ("report", "runs/a"),
        ("eval", "runs/a", "--versions", "0,1", "--num-tasks", "2"),
        ("counterfactual", "runs/a", "--shaping", "centred_ranks"),
        ("fork", "runs/a", "--name", "b"),
    ):
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code == 0, done.output
    written = {path.name for path in (work / "runs/a").rglob("*")}
    assert {"run.h5", "rendezvous.json", "tasks.json", "head.log", "report.html", "evals", "trajectories"} <= written
    for run in ("a", "b"):
        assert found(work / "runs" / run) == expected(group=group)
    assert modes.umask() == umask


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("group", [False, True])
def test_files_within_a_run_have_the_runs_permissions(work: Path, umask: int, group: bool) -> None:
    os.umask(umask)
    root = work / "runs" / "a"
    modes.make_run_folder(root)
    modes.settle(root, group_readable=group)
    with modes.within(root):
        (root / "report").mkdir()
        (root / "report" / "x").write_bytes(b"")
        (root / "y").write_bytes(b"")
    want = expected(group=group)
    assert (found(root)["folders"], found(root)["files"]) == (want["folders"], want["files"])
    assert mode(work / "runs") == 0o777 & ~(umask | 0o002)
    assert modes.umask() == umask


def test_a_run_of_before_has_its_modes_set_right_and_keeps_its_group_and_links(work: Path) -> None:
    os.umask(0)
    root, elsewhere = work / "a", work / "elsewhere"
    (root / "logs").mkdir(parents=True, mode=0o777)
    (root / "secrets").mkdir(mode=0o700)
    elsewhere.write_bytes(b"")
    for path in (root / "logs" / "head.log", root / "run.h5", root / "secrets" / "head.json"):
        path.write_bytes(b"")
    (root / "secrets" / "head.json").chmod(0o600)
    (root / "link").symlink_to(elsewhere)
    root.chmod(0o2777)  # setgid: new files get the group of a shared project
    for group in (True, False):
        modes.settle(root, group_readable=group)
        assert mode(root) == (0o2750 if group else 0o2700)
        assert mode(root / "logs") == (0o750 if group else 0o700)
        assert mode(root / "run.h5") == mode(root / "logs" / "head.log") == (0o640 if group else 0o600)
        assert (mode(root / "secrets"), mode(root / "secrets" / "head.json")) == (0o700, 0o600)
        assert mode(elsewhere) == 0o666


def test_files_elsewhere_follow_the_umask_and_are_not_world_writable(work: Path) -> None:
    for umask, folder, file in ((0o000, 0o775, 0o664), (0o027, 0o750, 0o640)):
        command = [sys.executable, "-m", "hpc_es", "model", "get", "lab-10k", "--out", f"{umask:o}/model"]
        subprocess.run(command, check=True, umask=umask, capture_output=True)
        assert mode(work / f"{umask:o}") == mode(work / f"{umask:o}" / "model") == folder
        assert {mode(path) for path in (work / f"{umask:o}" / "model").iterdir()} == {file}


def test_the_keys_are_made_in_a_folder_of_the_owners(work: Path) -> None:
    from hpc_es.transport.secrets import create_secrets

    os.umask(0)
    create_secrets(RunPaths(work / "runs" / "a"))
    assert mode(work / "runs" / "a") == 0o700
