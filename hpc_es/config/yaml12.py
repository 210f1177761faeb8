"""Read and write YAML 1.2: scalars of the core schema, durations, no duplicate keys, and the origin of each value.

Invariant: `parse` reads everything that `dump` writes to equal values, or refuses values that no run could record. It
avoids the traps of YAML 1.1: `1e-3` is a number; `no`, `off` and `on` are text; `24:00:00` is text, or a duration where
seconds are expected.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hpc_es.errors import ConfigError

MAX_VALUES = 100_000
"""Maximum number of values in one document; a few lines of nested aliases could expand to billions."""
MAX_DEPTH = 50
"""Maximum depth of nested lists and mappings; the reader recurses once per level."""
_MAX_DIGITS = 100
"""Maximum length of an integer: the time of Python's int() grows with the square of the number of digits."""

_MAX_SHOWN = 40

_LINE_SEPARATORS = "\x85\u2028\u2029"
_INT = re.compile(r"[-+]?[0-9]+")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}

_UNITS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_CLOCK = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)")


@dataclass(frozen=True)
class Given:
    """A value that is not a section (a scalar, a list, an empty mapping), and where it was set."""

    value: Any
    origin: str


Tree = dict[str, "Tree | Given"]
"""A document: sections are dicts, everything else is `Given`."""


def parse(text: str, source: str) -> "Tree | Given":
    """Read one document. `source` (a file name) appears in origins and errors as source:line[:column].

    Errors: ConfigError for bad syntax, duplicate keys, keys that are not text or numbers, tags, cycles, numbers that do
    not fit into 64 bits, text with NUL or unpaired surrogates, and documents beyond MAX_DEPTH or MAX_VALUES.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = " (indent with spaces)" if mark and _tab_at(text, mark) else ""
        raise ConfigError(f"{_place(source, mark)}: {error.problem or error.context}{hint}") from None
    except yaml.reader.ReaderError as error:
        where = f"character {error.position + 1}" if isinstance(error.position, int) else "somewhere"
        raise ConfigError(f"{source}: {where} is a control character or not a valid character: remove it") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {error}") from None
    except _TooDeep:
        raise ConfigError(_too_deep(source)) from None
    return Given(None, source) if node is None else _Builder(source).build(node)


def plain(tree: "Tree | Given") -> Any:
    """The values without their origins."""
    return tree.value if isinstance(tree, Given) else {key: plain(below) for key, below in tree.items()}


def origins(tree: "Tree | Given", prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, origin) of every given value."""
    if isinstance(tree, Given):
        yield prefix, tree.origin
        return
    for key, below in tree.items():
        yield from origins(below, f"{prefix}.{key}" if prefix else key)


def merge(base: "Tree | Given", over: "Tree | Given") -> "Tree | Given":
    """Override `base` by `over`: sections are merged key by key; other values, also empty mappings, are replaced."""
    if isinstance(base, Given) or isinstance(over, Given):
        return over
    merged = dict(base)
    for key, below in over.items():
        merged[key] = merge(merged[key], below) if key in merged else below
    return merged


def scalar(text: str) -> Any:
    """The value of an unquoted scalar: null, bool, int, float or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _BASED_INT.fullmatch(text):
        return int(text, 0)
    return float(text) if _FLOAT.fullmatch(text) else text


def seconds(value: Any) -> Any:
    """Convert a duration to seconds: 90s, 15m, 2h, 1d, 1h30m, MM:SS, HH:MM:SS or D-HH:MM:SS (as in Slurm).

    Other types are returned unchanged. Errors: ValueError for any other text.
    """
    if not isinstance(value, str):
        return value
    match = _UNITS.fullmatch(value) or _CLOCK.fullmatch(value)
    if not match or not value:
        raise ValueError("must be a duration: seconds as a number, or like 90s, 15m, 2h, 24:00:00")
    days, hours, minutes, rest = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def dump(values: Any) -> str:
    """YAML text of plain values (dicts with text keys, lists, scalars), in the order given."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dump_inline(value: Any) -> str:
    """One line of YAML that reads back as `value`, also as an override on a command line."""
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.strip()[1:-1]


class _TooDeep(Exception):
    """The text is nested more than MAX_DEPTH deep."""


def _too_deep(source: str) -> str:
    return f"{source}: nested too deeply: more than {MAX_DEPTH} lists or mappings inside each other"


class _Loader(yaml.BaseLoader):
    """Stops as soon as the text is nested too deeply, because PyYAML's time grows with the square of the depth."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooDeep
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Builder:
    """Builds a Tree from PyYAML's nodes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.open: set[int] = set()
        self.num_values = 0

    def build(self, node: yaml.Node) -> "Tree | Given":
        if id(node) in self.open:
            raise ConfigError(f"{_place(self.source, node.start_mark)}: an alias that contains itself")
        self.num_values += 1
        if len(self.open) > MAX_DEPTH:  # with aliases a tree can be deeper than the text
            raise ConfigError(_too_deep(self.source))
        if self.num_values > MAX_VALUES:
            raise ConfigError(f"{self.source}: more than {MAX_VALUES} values, counting aliases; use fewer")
        self.open.add(id(node))
        try:
            return self._build(node)
        finally:
            self.open.remove(id(node))

    def _build(self, node: yaml.Node) -> "Tree | Given":
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in ("str", "seq", "map"):
            raise ConfigError(f"{_place(self.source, node.start_mark)}: the tag {node.tag} is not allowed here")
        origin = f"{self.source}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            return self._section(node) or Given({}, origin)
        if isinstance(node, yaml.SequenceNode):
            return Given([plain(self.build(item)) for item in node.value], origin)
        assert isinstance(node, yaml.ScalarNode), "YAML has three kinds of node"
        return Given(self._value(node), origin)

    def _section(self, node: yaml.MappingNode) -> Tree:
        section: Tree = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            place = _place(self.source, key_node.start_mark)
            key = self._value(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise ConfigError(f"{place}: a key must be text; quote it if it is meant as text")
            name = str(key)
            if name in section:
                raise ConfigError(f"{place}: duplicate key {name!r} (first on line {first_line[name]})")
            first_line[name] = key_node.start_mark.line + 1
            section[name] = self.build(value_node)
        return section

    def _value(self, node: yaml.ScalarNode) -> Any:
        value = scalar(node.value) if node.style is None else node.value
        if fault := _fault(node.value, value):
            shown = ascii(node.value) if len(node.value) <= _MAX_SHOWN else f"{node.value[:_MAX_SHOWN]!a}..."
            raise ConfigError(f"{_place(self.source, node.start_mark)}: {shown} {fault}")
        return value


def _fault(text: str, value: Any) -> str | None:
    """Why a scalar, written as `text`, is not allowed; None if it is."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "is a number that does not fit into 64 bits; quote it if it is meant as text"
    if isinstance(value, float) and math.isinf(value) and text not in _WORDS:
        return "is too large a number; quote it if it is meant as text, or write .inf"
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
        return "contains a NUL or an unpaired surrogate, which file names and messages cannot contain"
    return None


def _place(source: str, mark: yaml.Mark | None) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source


def _tab_at(text: str, mark: yaml.Mark) -> bool:
    lines = text.splitlines()
    return mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]


_TAGS = {str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}


class _Dumper(yaml.SafeDumper):
    """Quotes all text that any version of YAML could read as another type, and only that."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return "tag:yaml.org,2002:" + _TAGS[type(scalar(value))]
        return super().resolve(kind, value, implicit)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    old_tag = yaml.SafeDumper.resolve(dumper, yaml.ScalarNode, text, (True, False))
    style = None if scalar(text) is text and old_tag.endswith(":str") else "'"
    if any(separator in text for separator in _LINE_SEPARATORS):
        style = '"'  # the only style in which PyYAML escapes line separators; other styles lose them
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    # repr is the shortest text that reads back to the same bits.
    text = repr(number) if math.isfinite(number) else {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[repr(number)]
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
