"""The documentation holds together: links lead somewhere, the README leads to every page, and Python examples run."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_release
import pytest
from repository import ROOT

import hpc_es

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
PUBLIC = {"hpc_es", "hpc_es.envs", "hpc_es.errors"}
"""What examples may import: no deeper module, so that modules can move."""


def links(page: Path) -> set[str]:
    return {link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link}


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


def test_the_readme_leads_to_every_page_and_is_short() -> None:
    readme = PAGES[0]
    linked = {(readme.parent / link.partition("#")[0]).resolve() for link in links(readme)}
    linked.add(ROOT / "docs" / "index.md")  # the start page of the site, which stands for the README there
    assert [page.name for page in PAGES[1:] if page not in linked] == []
    assert len(readme.read_text(encoding="utf-8").split()) <= 1100


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """mkdocs warns about pages that its menu lacks, and about anchors that do not exist."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "concepts" / "index.html").is_file()


def names_used(source: str) -> Iterator[str]:
    """What an example imports or takes from hpc_es."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module
            case ast.Attribute(value=ast.Name(id="hpc_es"), attr=name):
                yield f"hpc_es.{name}"


def cells(notebook: Path) -> str:
    """The code of a notebook."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code")


SOURCES = [*((page.name, source) for page in PAGES for source in examples(page))]
SOURCES += [(path.name, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.py"))]
SOURCES.append((NOTEBOOK.name, cells(NOTEBOOK)))


@pytest.mark.parametrize(("place", "source"), SOURCES, ids=[place for place, _ in SOURCES])
def test_an_example_uses_nothing_but_the_public_face(place: str, source: str) -> None:
    allowed = PUBLIC | {f"hpc_es.{name}" for name in hpc_es.__all__}
    assert {name for name in names_used(source) if name.startswith("hpc_es")} <= allowed


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of someone who has a model and a recorded run, runs/quickstart."""
    monkeypatch.chdir(tmp_path)
    recorded = first_release.unpack(tmp_path)
    (tmp_path / "runs" / "quickstart").symlink_to(recorded)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, workplace: Path) -> None:
    scope: dict[str, object] = {"__name__": "example"}
    for source in examples(page):
        if "hpc_es.submit(" not in source:  # it needs a cluster: tests/end_to_end/test_slurm_cluster.py
            exec(compile(source, page.name, "exec"), scope)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_gives_today(workplace: Path) -> None:
    scope: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(cells(NOTEBOOK), NOTEBOOK.name, "exec"), scope)
    assert f"{scope['theta'].digest():016x}" in NOTEBOOK.read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == hpc_es.__version__
