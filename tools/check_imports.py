"""Check that imports in hpc_es only point downwards, and that no modules import each other in a circle.

Each row of ROWS may import the rows listed before it; packages in one row do not import each other. A package that no
row names is an error, so a new one has to find its place here. Imports inside functions count; those for type checkers
alone do not, since they are not made when the code runs.

    python tools/check_imports.py [FOLDER]      # exit code 1 and one line per violation
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROWS = (
    ("quoting", "allowance"),
    ("errors", "bounds", "files", "modes", "paths", "place", "__init__"),
    ("calls",),
    ("config", "data"),
    ("records", "seeds"),
    ("noise", "results", "staleness"),
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
    ("__main__",),
)
FORBIDDEN = {
    "transport": ("noise", "methods", "params", "store"),
    "engine": ("store",),
    "head": ("engine", "vllm"),
    "trainer": ("engine", "vllm"),
    "worker": ("store", "h5py"),
}
"""Packages that a package never imports, be it inside a function."""

HEAVY = ("torch", "vllm", "numba")
LIGHT = ("cli", "api", "launch", "recorded", "simulator", "planner", "analysis")
"""Packages that never import a HEAVY one at module level: they run on login nodes and laptops."""


class Import(NamedTuple):
    module: str
    line: int
    at_module_level: bool


def violations(root: Path) -> Iterator[str]:
    """One line for every import below `root` (the folder hpc_es) that points the wrong way."""
    level = {package: number for number, row in enumerate(ROWS) for package in row}
    for path in sorted(root.rglob("*.py")):
        package = path.relative_to(root).parts[0].removesuffix(".py")
        if package not in level:
            yield f"{path}: the package {package} has no row in {Path(__file__).name}"
            continue
        for imported in imports(path, root):
            if complaint := _complaint(package, imported, level, root.name):
                yield f"{path}:{imported.line}: {complaint}"


def circles(root: Path) -> Iterator[str]:
    """One line for every group of modules that import each other, directly or through others."""
    files = {_module(path, root): path for path in sorted(root.rglob("*.py"))}
    graph = {
        name: {target for i in imports(path, root) if (target := _known(i.module, files)) not in (None, name)}
        for name, path in files.items()
    }
    for group in _strongly_connected(graph):
        if len(group) > 1:
            yield f"{root}: these modules import each other in a circle: {', '.join(sorted(group))}"


def _module(path: Path, root: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(module: str, files: dict[str, Path]) -> str | None:
    """The module of ours that an import names, which may name something inside it. The root package imports nothing."""
    while module and module not in files:
        module = module.rpartition(".")[0]
    return module if "." in module else None


def _strongly_connected(graph: dict[str, set[str | None]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan, 1972)."""
    index, low, stack, groups = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            assert target is not None
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            groups.append(stack[at:])
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return groups


def _complaint(package: str, imported: Import, level: dict[str, int], name: str) -> str | None:
    top, _, rest = imported.module.partition(".")
    target = rest.partition(".")[0] if top == name else top
    if target in FORBIDDEN.get(package, ()):
        return f"{package} must not import {target}"
    if target in HEAVY and package in LIGHT and imported.at_module_level:
        return f"{package} must not import {target} at module level"
    if top != name or target == package or target not in level:  # not ours, or a name that __init__ defines
        return None
    if level[target] >= level[package]:
        return f"{package} must not import {target}, which is not below it"
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
                inside = at_module_level and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                for block in _blocks(node):
                    yield from _walk(block, here, at_module_level=inside)


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
    print("\n".join(found) or "imports: all point downwards, and none in a circle")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
