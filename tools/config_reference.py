"""docs/configuration-reference.md: every key of the configuration, generated from the schema.

python tools/config_reference.py --write    # write the page
python tools/config_reference.py --check    # exit code 1 if the page differs from the schema
"""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hpc_es.config.fields import Model
from hpc_es.config.schema import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration-reference.md"
HEAD = """# Configuration reference

Every key, generated from the schema by `python tools/config_reference.py --write`. [Configuration](configuration.md)
says how files and overrides are combined. Durations are seconds, or `90s`, `15m`, `2h`, `24:00:00`.
"""


def page() -> str:
    """The whole page."""
    sections: dict[str, list[str]] = {"": []}
    for key, field, text in keys(Config, ""):
        section, _, _ = key.partition(".")
        lines = sections.setdefault(section if "." in key else "", [])
        lines.append(f"| `{key}` | {_shown(field)} | {_default(field)} | {text} |")
    parts = [HEAD]
    for section, lines in sections.items():
        title = f"## {section}" if section else "## Top level"
        parts.append("\n".join([title, "", "| key | values | default | meaning |", "|---|---|---|---|", *lines, ""]))
    return "\n".join(part for part in parts if part)


def keys(model: type[Model], above: str) -> Iterator[tuple[str, FieldInfo, str]]:
    """(dotted key, field, its sentence) of every value below a section."""
    texts = _texts(model)
    for name, field in model.model_fields.items():
        key = f"{above}{name}"
        inner = [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Model)]
        if not inner:
            yield key, field, texts.get(name, "")
        for kind in inner:
            tag = next((get_args(f.annotation)[0] for f in kind.model_fields.values() if _is_tag(f)), None)
            for below, each, text in keys(kind, f"{key}."):
                where = f"({tag}) " if tag and not _is_tag(each) else ""
                yield below, each, f"{where}{text}" if text else _first(kind)


def _is_tag(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _kinds(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is typing.Annotated:
        return _kinds(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


@cache
def _texts(model: type[Model]) -> dict[str, str]:
    """The docstrings below the fields of a section, on one line each."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split()).replace("|", "\\|")
    return found


def _first(model: type[Model]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _shown(field: FieldInfo) -> str:
    kinds = [kind for kind in _kinds(field.annotation) if kind is not type(None)]
    shown = ", ".join(
        ", ".join(f"`{value}`" for value in get_args(kind)) if get_origin(kind) is Literal else _named(kind)
        for kind in kinds
    )
    signs = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}
    limits = ((signs[name], getattr(rule, name, None)) for rule in field.metadata for name in signs)
    bounds = [sign.format(limit) for sign, limit in limits if limit is not None]
    return f"{shown} {' '.join(bounds)}".strip()


def _named(kind: Any) -> str:
    plain = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", Path: "path"}
    if get_origin(kind) is typing.Annotated:
        return _named(get_args(kind)[0])
    origin = get_origin(kind) or kind
    return plain.get(kind, {dict: "mapping", tuple: "list"}.get(origin, getattr(kind, "__name__", str(kind))))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(list(v)) if isinstance(v, tuple) else str(v) for v in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if sys.argv[1:] == ["--check"]:
        fits = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print("the page fits the schema" if fits else f"{PAGE} differs: run python tools/config_reference.py --write")
        return 0 if fits else 1
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
