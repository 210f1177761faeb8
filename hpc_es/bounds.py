"""Rules for the fields of a struct, stated in their types, and the functions that check them.

    turns: Annotated[int, Between(0, 2**31 - 1)]

Decoding ignores these rules, so that a journal which breaks one can still be read. `fault` checks them, for code that
must not trust what was sent. Free text breaks no rule; `tidied` cuts and escapes it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hpc_es.quoting import quote, quote_value

AnyStruct = TypeVar("AnyStruct", bound=Struct)


class Fault(NamedTuple):
    """A field that breaks its rule."""

    field: str
    """Name with its path: result.episodes[3].turns."""
    value: object
    rule: str

    def __str__(self) -> str:
        return f"{self.field} is {quote_value(self.value)}; it must be {self.rule}"


# --- rules ----------------------------------------------------------------------------------------------------------


class Rule(Protocol):
    """A rule for one field. Its text, str(rule), follows "must be"."""

    def admits(self, value: Any) -> bool: ...

    def strict(self, plain: Any) -> Any:
        """The type that makes msgspec check the rule; `plain` if msgspec cannot."""
        ...


@dataclass(frozen=True)
class Between:
    """A number within these bounds, which are included; so it is finite."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"a number from {self.least} to {self.most}"

    def admits(self, value: float) -> bool:
        return self.least <= value <= self.most

    def strict(self, plain: Any) -> Any:
        # msgspec takes bounds of at most 63 bits, and decoded integers have at most 64 bits anyway.
        most = None if self.most >= 2**63 and plain is int else self.most
        return Annotated[plain, Meta(ge=self.least, le=most)]


@dataclass(frozen=True)
class OneOf:
    """One of a fixed set of words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"

    def admits(self, value: str) -> bool:
        return value in self.words

    def strict(self, plain: Any) -> Any:
        return Literal[self.words]


@dataclass(frozen=True)
class Name:
    """A short text that identifies something, so it is never cut."""

    least: int = 1
    most: int = 255

    def __str__(self) -> str:
        return f"a text of {self.least} to {self.most} printable characters"

    def admits(self, value: str) -> bool:
        return self.least <= len(value) <= self.most and value.isprintable()

    def strict(self, plain: Any) -> Any:
        return plain


@dataclass(frozen=True)
class Verbatim:
    """A text that is kept as it is, of at most `most` characters."""

    most: int

    def __str__(self) -> str:
        return f"a text of at most {self.most} characters"

    def admits(self, value: str) -> bool:
        return len(value) <= self.most

    def strict(self, plain: Any) -> Any:
        return Annotated[plain, Meta(max_length=self.most)]


@dataclass(frozen=True)
class Hexadecimal:
    """A hash as hexadecimal digits, or an empty text. Safe as a part of a file name."""

    digits: int

    def __str__(self) -> str:
        return f"empty, or {self.digits} hexadecimal digits in lower case"

    def admits(self, value: str) -> bool:
        return re.fullmatch(self._pattern, value) is not None

    def strict(self, plain: Any) -> Any:
        return Annotated[plain, Meta(pattern=rf"^({self._pattern})\Z")]

    @property
    def _pattern(self) -> str:
        return rf"([0-9a-f]{{{self.digits}}})?"


@dataclass(frozen=True)
class Facts:
    """A small table of names with free texts."""

    most: int = 40
    name: Name = Name(1, 100)
    most_characters: int = 300

    def __str__(self) -> str:
        return f"a table of at most {self.most} names, each {self.name}"

    def admits(self, value: dict[str, str]) -> bool:
        return len(value) <= self.most and all(map(self.name.admits, value))

    def strict(self, plain: Any) -> Any:
        return plain


@dataclass(frozen=True)
class Text:
    """Free text for people. Any text is admitted; `tidied` cuts it to `most_characters`."""

    most_characters: int = 2000

    def admits(self, value: str) -> bool:
        return True

    def strict(self, plain: Any) -> Any:
        return plain


# --- the check of a struct ------------------------------------------------------------------------------------------


def fault(struct: Struct) -> Fault | None:
    """The first field that breaks its rule, in `struct` or in a struct inside it; None if there is none."""
    strict, beside = _strictly(type(struct))
    try:  # msgspec takes a microsecond where Python takes ten
        msgspec.convert(struct, strict, from_attributes=True)
    except msgspec.ValidationError:
        return next(_faults(struct, type(struct), ""), None)
    for name, rule in beside:
        if not rule.admits(value := getattr(struct, name)):
            return Fault(name, value, str(rule))
    return None


@lru_cache
def _strictly(kind: type[Struct]) -> tuple[type[Struct], list[tuple[str, Rule]]]:
    """The same struct with types that msgspec checks, and the fields whose rules msgspec cannot check."""
    hints = get_type_hints(kind, include_extras=True)
    strict = msgspec.defstruct(kind.__name__, [(name, _strict(hint)) for name, hint in hints.items()], gc=False)
    beside = [(name, shape(hint)[1]) for name, hint in hints.items() if isinstance(shape(hint)[1], Name | Facts)]
    return strict, beside


def _strict(hint: Any) -> Any:
    match shape(hint):
        case "ruled", rule:
            return rule.strict(get_args(hint)[0])
        case "optional", inner:
            return _strict(inner) | None
        case "many", inner:
            return tuple[_strict(inner), ...]  # type: ignore[misc]
        case "struct", kind:
            strict, beside = _strictly(kind)
            if beside:
                raise TypeError(f"{kind.__name__} is inside another struct, where its {beside[0][0]} is not checked")
            return strict
    return Any


def _faults(value: Any, hint: Any, path: str) -> Iterator[Fault]:
    """All fields that break a rule in a value of this type."""
    match shape(hint):
        case "ruled", rule if not rule.admits(value):
            yield Fault(path, value, str(rule))
        case "optional", inner if value is not None:
            yield from _faults(value, inner, path)
        case "many", inner:
            for number, each in enumerate(value):
                yield from _faults(each, inner, f"{path}[{number}]")
        case "struct", kind:
            for name, inner in get_type_hints(kind, include_extras=True).items():
                yield from _faults(getattr(value, name), inner, f"{path}.{name}" if path else name)


# --- free text ------------------------------------------------------------------------------------------------------


def tidied(struct: AnyStruct) -> AnyStruct:
    """The struct with every free text cut and escaped, also in structs inside it."""
    changes = {}
    for name, tidy in _tidyings(type(struct)):
        value = getattr(struct, name)
        if (better := tidy(value)) is not value:
            changes[name] = better
    return replace(struct, **changes) if changes else struct


@lru_cache
def _tidyings(kind: type[Struct]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    found = ((name, _tidying_of(hint)) for name, hint in get_type_hints(kind, include_extras=True).items())
    return tuple((name, tidying) for name, tidying in found if tidying is not None)


def _tidying_of(hint: Any) -> Callable[[Any], Any] | None:
    match shape(hint):
        case "ruled", Text(most_characters=most):
            return lambda text: quote(text, most)
        case "ruled", Facts(most_characters=most):
            return lambda facts: {name: quote(text, most) for name, text in facts.items()}
        case "optional", inner if (tidying := _tidying_of(inner)) is not None:
            return lambda value: None if value is None else tidying(value)
        case "struct", kind if _tidyings(kind):
            return tidied
    return None


# --- types ----------------------------------------------------------------------------------------------------------


def shape(hint: Any) -> tuple[str, Any]:
    """Classify a type hint: (kind of hint, the rule or type in it)."""
    origin = get_origin(hint)
    if origin is Annotated:
        return "ruled", hint.__metadata__[0]
    if origin in (Union, UnionType):
        inner, *others = (part for part in get_args(hint) if part is not type(None))
        return ("plain", hint) if others else ("optional", inner)
    if origin is tuple:
        return "many", get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, Struct):
        return "struct", hint
    return "plain", hint
