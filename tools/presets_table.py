"""Generate the tables of docs/presets.md: the source of each value of each preset, from its comment.

    python tools/presets_table.py --write    # put them into docs/presets.md
    python tools/presets_table.py --check    # exit code 1 where the page has other tables

The line of a key ends in a comment that begins with paper, code, published (either of the two), chosen or unknown.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc_es.config import yaml12

ROOT = Path(__file__).resolve().parent.parent
CONFIGS, PAGE = ROOT / "configs", ROOT / "docs" / "presets.md"
SOURCES = re.compile(r" # (paper|code|published|chosen|unknown)\b")
COLUMNS = {"published": ("paper", "code", "published"), "chosen here": ("chosen",), "unknown": ("unknown",)}
BEGIN, END = "<!-- tables: tools/presets_table.py --write -->", "<!-- end of tables -->"


def presets(folder: str) -> list[Path]:
    return sorted((CONFIGS / folder).rglob("*.yaml"))


def sources(path: Path) -> dict[str, str | None]:
    """Key -> the first word of its comment, with those of the files that it extends; None where it has none."""
    tree = yaml12.parse(path.read_text(encoding="utf-8"), str(path))
    assert isinstance(tree, dict), path
    parents = yaml12.plain(tree.pop("extends", yaml12.Given([], "")))
    found: dict[str, str | None] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        found |= sources(path.parent / parent)
    lines = path.read_text(encoding="utf-8").splitlines()
    for key, origin in yaml12.origins(tree):
        # a section takes the place of a bare number, or the other way round
        found = {k: s for k, s in found.items() if not (k.startswith(f"{key}.") or key.startswith(f"{k}."))}
        comment = SOURCES.search(lines[int(origin.rpartition(":")[2]) - 1])
        found[key] = comment[1] if comment else None
    return found


def tables() -> Iterator[str]:
    """Markdown lines. Presets with the same sources share a row."""
    for folder in ("tasks", "methods", "staleness"):
        yield f"| configs/{folder}/ | {' | '.join(COLUMNS)} |"
        yield "|---|---|---|---|"
        rows: dict[str, list[str]] = {}
        for path in presets(folder):
            found = sources(path)
            cells = [_cell([key for key, source in found.items() if source in words]) for words in COLUMNS.values()]
            rows.setdefault(" | ".join(cells), []).append(str(path.relative_to(CONFIGS / folder).with_suffix("")))
        yield from (f"| {', '.join(names)} | {cells} |" for cells, names in rows.items())
        yield ""


def _cell(keys: list[str]) -> str:
    """Keys, with those of one section together: es.population, sigma, alpha; eval.every."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return "; ".join(f"{section}: {', '.join(names)}" for section, names in sections.items())


def page_with(lines: list[str], page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = page_with(list(tables()), page)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    print(
        f"{PAGE.name}: " + ("up to date" if page == wanted else "the presets say something else; run me with --write")
    )
    return int(page != wanted)


if __name__ == "__main__":
    sys.exit(main())
