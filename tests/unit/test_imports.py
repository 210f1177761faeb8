"""The directions of imports, and the tool that checks them."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", ROOT / "tools" / "check_imports.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_imports_point_downwards_and_none_in_a_circle(tool: ModuleType) -> None:
    assert list(tool.violations(ROOT / "hpc_es")) == []
    assert list(tool.circles(ROOT / "hpc_es")) == []


def test_a_circle_through_a_lazy_import_of_the_root_package_is_found(tool: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "hpc_es"
    root.mkdir()
    (root / "__init__.py").write_text("def __getattr__(name):\n    return importlib.import_module('hpc_es.api')")
    (root / "api.py").write_text("from hpc_es import __version__")
    assert len(list(tool.circles(root))) == 1


def test_every_circle_is_reported(tool: ModuleType, tmp_path: Path) -> None:
    for package in ("head", "worker"):
        folder = tmp_path / "hpc_es" / package
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(f"import hpc_es.{package}.b")
        (folder / "b.py").write_text(f"import hpc_es.{package}.a")
    assert len(list(tool.circles(tmp_path / "hpc_es"))) == 2


def test_a_circle_is_found_also_through_functions_and_through_others(tool: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "hpc_es"
    (root / "head").mkdir(parents=True)
    (root / "head" / "__init__.py").write_text("")
    (root / "head" / "a.py").write_text("from hpc_es.head.b import x")
    (root / "head" / "b.py").write_text("from hpc_es.head import c")
    (root / "head" / "c.py").write_text("def f():\n    import hpc_es.head.a")
    (found,) = tool.circles(root)
    _, _, path = found.partition(": these modules import each other in a circle: hpc_es.head.")
    assert path.split(" -> hpc_es.head.") in (list("abca"), list("bcab"), list("cabc"))
    (root / "head" / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hpc_es.head.a")
    assert list(tool.circles(root)) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("methods/a.py", "from hpc_es.head.core import Core", "methods must not import head, which is not below it"),
        ("noise/a.py", "from hpc_es import results", "noise must not import results, which is not below it"),
        ("noise/a.py", "from ..results import contradiction", "noise must not import results, which is not below it"),
        ("noise/a.py", "def f():\n    if True:\n        import hpc_es.params", "noise must not import params"),
        ("transport/a.py", "import hpc_es.store.journal", "transport must not import store"),
        ("head/a.py", "try:\n    import vllm\nexcept ImportError:\n    raise", "head must not import vllm"),
        ("head/a.py", "def f():\n    import vllm.config", "head must not import vllm"),
        ("head/a.py", "from hpc_es.engine.base import Engine", "head must not import engine"),
        ("worker/a.py", "import h5py", "worker must not import h5py"),
        ("launch/a.py", "import torch", "launch must not import torch at module level"),
        ("cli/a.py", "class A:\n    from numba import njit", "cli must not import numba at module level"),
        ("helpers/a.py", "", "the package helpers has no row"),
        ("head/a.py", "from hpc_es import load_config", "head must not import __init__, which is not below it"),
        ("noise/a.py", "def f():\n    import_module('hpc_es.params')", "noise must not import params"),
        (
            "analysis/statistics/a.py",
            "def f():\n    import matplotlib",
            "analysis.statistics must not import matplotlib",
        ),
        (
            "analysis/statistics/a.py",
            "from hpc_es.analysis.figures import plots",
            "analysis.statistics must not import analysis.figures, which is not below it",
        ),
        (
            "analysis/figures/a.py",
            "from hpc_es.analysis import report",
            "analysis.figures must not import analysis.report",
        ),
        ("analysis/other/a.py", "import os", "analysis/other is not one of the rooms of analysis"),
    ],
)
def test_a_violation_is_found(tool: ModuleType, tmp_path: Path, file: str, text: str, complaint: str) -> None:
    path = tmp_path / "hpc_es" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = list(tool.violations(tmp_path / "hpc_es"))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "head/a.py",
            "from hpc_es import envs, version\nfrom hpc_es.store.journal import JournalWriter",
        ),
        ("launch/a.py", "def f():\n    import torch"),
        ("cli/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("methods/a.py", "from hpc_es.records import Member\nfrom . import shaping"),
    ],
)
def test_what_is_allowed_is_not_a_violation(tool: ModuleType, tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / "hpc_es" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert list(tool.violations(tmp_path / "hpc_es")) == []


HEAVY = ("torch", "vllm", "numba", "numpy", "pandas", "h5py", "transformers", "matplotlib")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["replay", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from hpc_es.cli import app
try:
    app({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
print("HEAVY:", *(m for m in {HEAVY!r} if m in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["HEAVY:"]


def test_launching_needs_no_torch() -> None:
    code = "import sys, hpc_es.launch.local; print('torch' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
