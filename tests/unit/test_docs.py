"""The documentation holds together: links lead somewhere, and the README leads to every page."""

import re
from pathlib import Path

import pytest
from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def links(page: Path) -> set[str]:
    return {link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


def test_the_readme_leads_to_every_page_and_is_short() -> None:
    readme = PAGES[0]
    linked = {(readme.parent / link).resolve() for link in links(readme)}
    assert [page.name for page in PAGES[1:] if page not in linked] == []
    assert len(readme.read_text(encoding="utf-8").split()) <= 1200
