"""Check that imports in hpc_es only point downwards, and that no modules import each other in a circle.

Each row of ROWS may import the rows listed before it; packages in one row do not import each other. A package that no
row names is an error, so a new one has to find its place here. ROOMS orders the folders within a package in the same
way. Imports inside functions and `importlib.import_module("name")` count. Imports under `if TYPE_CHECKING` do not:
they never run, and a lower package may name the type of an object that it is given.

    python tools/check_imports.py [FOLDER]      # exit code 1 and one line per violation
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROWS = (
    ("quoting", "allowance", "version"),
    ("errors", "bounds", "files", "modes", "paths", "place"),
    ("calls",),
    ("config", "data"),
    ("records", "seeds"),
    ("noise", "results", "staleness", "traces"),
    ("methods",),
    ("params",),
    ("store",),
    ("transport", "engine", "envs"),
    ("trainer",),
    ("head", "worker"),
    ("launch",),
    ("recorded", "simulator"),
    ("planner",),
    ("analysis",),
    ("cli", "api"),
    ("__init__", "__main__"),
)
ROOMS = {"analysis": ("statistics", "figures", "report")}
"""Folders of a package; each may import those listed before it."""
FORBIDDEN = {
    "transport": ("noise", "methods", "params", "store"),
    "engine": ("store",),
    "head": ("engine", "vllm"),
    "trainer": ("engine", "vllm"),
    "worker": ("store", "h5py"),
    "analysis.statistics": ("matplotlib",),
}
"""Packages that a package or room never imports, not even inside a function."""

HEAVY = ("torch", "vllm", "numba")
LIGHT = ("cli", "api", "launch", "recorded", "simulator", "planner", "analysis")
"""Packages that never import a HEAVY one at module level, because they run on login nodes and laptops."""


class Import(NamedTuple):
    module: str
    line: int
    at_module_level: bool


def violations(root: Path) -> Iterator[str]:
    """One line for every import below `root` (the folder hpc_es) that points the wrong way."""
    level = {package: number for number, row in enumerate(ROWS) for package in row}
    for path in sorted(root.rglob("*.py")):
        package, *inside = path.relative_to(root).with_suffix("").parts
        if package not in level:
            yield f"{path}: the package {package} has no row in {Path(__file__).name}"
            continue
        for imported in imports(path, root):
            complaint = _complaint(package, imported, level, root.name)
            if package in ROOMS:
                complaint = complaint or _room_complaint(package, inside[0], imported, root.name)
            if complaint:
                yield f"{path}:{imported.line}: {complaint}"


def circles(root: Path) -> Iterator[str]:
    """One line for every circle of modules that import each other, directly or through others."""
    files = {_module(path, root): path for path in sorted(root.rglob("*.py"))}
    graph = {
        name: {target for i in imports(path, root) if (target := _known(i.module, files)) not in ("", name)}
        for name, path in files.items()
    }
    while circle := _circle(graph):
        yield f"{root}: these modules import each other in a circle: {' -> '.join(circle)}"
        graph[circle[0]].discard(circle[1])  # break it, and look for others


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last is the first again; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib lists every module before the one that imports it
    return []


def _module(path: Path, root: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(module: str, files: dict[str, Path]) -> str:
    """The module of hpc_es that an import loads, or that defines the imported name; "" for other packages."""
    while module and module not in files:
        module = module.rpartition(".")[0]
    return module


def _complaint(package: str, imported: Import, level: dict[str, int], name: str) -> str | None:
    top, _, rest = imported.module.partition(".")
    target = rest.partition(".")[0] if top == name else top
    if target in FORBIDDEN.get(package, ()):
        return f"{package} must not import {target}"
    if target in HEAVY and package in LIGHT and imported.at_module_level:
        return f"{package} must not import {target} at module level"
    if top != name:
        return None
    if target not in level:  # a name that hpc_es/__init__.py defines
        target = "__init__"
    if target == package:
        return None
    if level[target] >= level[package]:
        return f"{package} must not import {target}, which is not below it"
    return None


def _room_complaint(package: str, room: str, imported: Import, name: str) -> str | None:
    rooms = (*ROOMS[package], "__init__")
    if room not in rooms:
        return f"{package}/{room} is not one of the rooms of {package}: {', '.join(rooms)}"
    outside = imported.module.partition(".")[0]
    if outside in FORBIDDEN.get(f"{package}.{room}", ()):
        return f"{package}.{room} must not import {outside}"
    target = imported.module.removeprefix(f"{name}.{package}.").partition(".")[0]
    if target in rooms and rooms.index(target) > rooms.index(room):
        return f"{package}.{room} must not import {package}.{target}, which is not below it"
    return None


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, as absolute module names; those for type checkers alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    here = [root.name, *path.relative_to(root).with_suffix("").parts]
    yield from _walk(tree.body, here, at_module_level=True)


def _walk(body: list[ast.stmt], here: list[str], *, at_module_level: bool) -> Iterator[Import]:
    for node in body:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, at_module_level)
            case ast.ImportFrom(module=module, names=names, level=dots):
                base = [*here[:-dots], *([module] if module else [])] if dots else [module or ""]
                for alias in names:  # `from hpc_es import envs` imports hpc_es.envs
                    yield Import(".".join([*base, alias.name]), node.lineno, at_module_level)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _walk(node.orelse, here, at_module_level=at_module_level)
            case _:
                yield from _dynamic_imports(node)
                inside = at_module_level and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                for block in _blocks(node):
                    yield from _walk(block, here, at_module_level=inside)


def _dynamic_imports(node: ast.stmt) -> Iterator[Import]:
    """Calls of `importlib.import_module` with a constant name, in a statement without statements inside it."""
    if any(_blocks(node)):
        return
    for call in ast.walk(node):
        match call:
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module, node.lineno, at_module_level=False)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements inside a statement."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value:
            if isinstance(value[0], ast.stmt):
                yield value
            else:
                for item in value:  # except handlers, match cases
                    if isinstance(item, (ast.ExceptHandler, ast.match_case)):
                        yield from _blocks(item)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "hpc_es"
    found = [*violations(root), *circles(root)]
    print("\n".join(found) or "imports: all point downwards, and there are no circles")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
