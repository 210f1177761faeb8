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
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hpc_es.config.es import Schedule
from hpc_es.config.fields import Model
from hpc_es.config.schema import HARMLESS, Config
from hpc_es.config.yaml12 import dump_inline, seconds

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration-reference.md"
HEAD = """# Configuration reference

Every key of a configuration file, generated from the schema by `python tools/config_reference.py --write`.
[Configuration](configuration.md) explains how files, presets and overrides are combined, and how values are written.
Keys marked \\* may change when a run is resumed, because they change no bit of its result. An empty default means: not
set.
"""
TABLE = "| key | values | default | meaning |\n|---|---|---|---|"
NAMES = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", Path: "path", dict: "mapping"}
BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


class Row(NamedTuple):
    key: str
    values: str
    default: str
    meaning: str


def page() -> str:
    """The whole page."""
    sections: dict[str, list[Row]] = {"Top level": []}
    for row in rows(Config, "", None):
        section, dot, _ = row.key.partition(".")
        sections.setdefault(section if dot else "Top level", []).append(row)
    return "\n".join([HEAD, *(_section(title, lines) for title, lines in sections.items())])


def _section(title: str, lines: list[Row]) -> str:
    field = Config.model_fields.get(title)
    model = field.annotation if field else None
    described = _sentence(model.__doc__) if isinstance(model, type) and model.__doc__ else ""
    table = [
        TABLE,
        *(f"| `{key}`{_mark(key)} | {values} | {default} | {text} |" for key, values, default, text in lines),
    ]
    return "\n\n".join(part for part in (f"## {title}", described, "\n".join(table)) if part) + "\n"


def _mark(key: str) -> str:
    return " \\*" if any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS) else ""


def rows(model: type[Model], above: str, defaults: Any) -> Iterator[Row]:
    """A row for every key of a section. `defaults`: the section as it is if nothing is set; None: it must be set."""
    texts = _texts(model)
    for name, field in model.model_fields.items():
        key, text = f"{above}{name}", texts.get(name, "")
        default = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        kinds = [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Model)]
        if len(kinds) > 1:
            yield from _alternatives(kinds, key, default)
            continue
        if Schedule in kinds:
            yield Row(key, "number, or a section", f"`{default.start:g}`", text)
        for kind in kinds:
            yield from rows(kind, f"{key}.", default if isinstance(default, kind) else None)
        if not kinds:
            yield Row(key, _values(field), _default(default), text)


def _alternatives(kinds: list[type[Model]], key: str, default: Any) -> Iterator[Row]:
    """A section of several kinds: first the key that selects one (the first of each), then the keys of each."""
    tag = next(iter(kinds[0].model_fields))
    chosen = {get_args(kind.model_fields[tag].annotation)[0]: kind for kind in kinds}
    meaning = " ".join(f"{name}: {_sentence(kind.__doc__)}" for name, kind in chosen.items())
    yield Row(f"{key}.{tag}", ", ".join(f"`{name}`" for name in chosen), _default(getattr(default, tag)), meaning)
    for name, kind in chosen.items():
        for row in rows(kind, f"{key}.", None):
            if row.key != f"{key}.{tag}":
                yield row._replace(meaning=f"({name}) {row.meaning}")


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
            found[field.target.id] = _sentence(str(text.value.value))
    return found


def _sentence(text: str | None) -> str:
    """The first paragraph, on one line of a table."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def _values(field: FieldInfo) -> str:
    if any(isinstance(rule, BeforeValidator) and rule.func is seconds for rule in field.metadata):
        return "duration"
    kinds = [kind for kind in _kinds(field.annotation) if kind is not type(None)]
    limits = ((sign, getattr(rule, name, None)) for rule in field.metadata for name, sign in BOUNDS.items())
    bounds = [sign.format(int(limit) if limit == int(limit) else limit) for sign, limit in limits if limit is not None]
    return " ".join([", ".join(_named(kind) for kind in kinds), *bounds])


def _named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is typing.Annotated:
        return _named(get_args(kind)[0])
    kind = get_origin(kind) or kind
    return "list" if kind is tuple else NAMES[kind]


def _default(value: Any) -> str:
    """Format a value as in YAML."""
    if value is PydanticUndefined:
        return "required"
    return "" if value is None else f"`{dump_inline(_plain(value))}`"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value) if isinstance(value, Path) else value


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if sys.argv[1:] == ["--check"]:
        fits = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print("the page is up to date" if fits else f"{PAGE} is out of date: run tools/config_reference.py --write")
        return 0 if fits else 1
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
