"""What a field may hold, stated in its type, and the check of a whole struct.

    turns: Annotated[int, Between(0, 2**31 - 1)]

Decoding does not look at these rules, so that a journal which breaks one can still be read. `fault` does, for all who
must not believe what was sent. Free text breaks no rule; `tidied` cuts and escapes it.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import astuple, replace

from hpc_es.quoting import quote, quote_value

AnyStruct = TypeVar("AnyStruct", bound=Struct)


class Fault(NamedTuple):
    """A field that breaks its rule."""

    field: str
    """With its path: result.episodes[3].turns."""
    value: object
    rule: str

    def __str__(self) -> str:
        return f"{self.field} is {quote_value(self.value)}; it must be {self.rule}"


# --- rules ----------------------------------------------------------------------------------------------------------


class Rule(Protocol):
    """Its text, str(rule), follows "must be"."""

    def admits(self, value: Any) -> bool: ...

    def admits_all(self, values: Collection[Any]) -> bool:
        """None of the values breaks it. There is at least one."""
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

    def admits_all(self, values: Collection[float]) -> bool:
        if not (self.least <= min(values) and max(values) <= self.most):
            return False
        return isinstance(self.most, int) or not math.isnan(sum(values))  # min and max may miss a NaN


@dataclass(frozen=True)
class OneOf:
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"

    def admits(self, value: str) -> bool:
        return value in self.words

    def admits_all(self, values: Collection[str]) -> bool:
        return set(values) <= set(self.words)


@dataclass(frozen=True)
class Name:
    """A short text that identifies something, so it is never cut."""

    least: int = 1
    most: int = 255

    def __str__(self) -> str:
        return f"a text of {self.least} to {self.most} printable characters"

    def admits(self, value: str) -> bool:
        return self.least <= len(value) <= self.most and value.isprintable()

    def admits_all(self, values: Collection[str]) -> bool:
        return all(map(self.admits, values))


@dataclass(frozen=True)
class Facts:
    """A small table of names with free texts."""

    most: int = 40
    name: Name = Name(1, 100)
    most_characters: int = 300

    def __str__(self) -> str:
        return f"a table of at most {self.most} names, each {self.name}"

    def admits(self, value: dict[str, str]) -> bool:
        return len(value) <= self.most and self.name.admits_all(value)

    def admits_all(self, values: Collection[dict[str, str]]) -> bool:
        return all(map(self.admits, values))


@dataclass(frozen=True)
class Text:
    """Free text for people: any is admitted, and `tidied` cuts it to so many characters."""

    most_characters: int = 2000

    def admits(self, value: str) -> bool:
        return True

    def admits_all(self, values: Collection[str]) -> bool:
        return True


# --- the check of a struct ------------------------------------------------------------------------------------------

_Check = Callable[[Any], Fault | None]
"""Of one field's value. The path in what it finds begins behind the field's name."""


def fault(struct: Struct) -> Fault | None:
    """The first field that breaks its rule, in `struct` or in a struct below it."""
    for name, check in _checks(type(struct)):
        if found := check(getattr(struct, name)):
            return found._replace(field=f"{name}{found.field}")
    return None


@lru_cache
def _checks(kind: type[Struct]) -> tuple[tuple[str, _Check], ...]:
    """By field, where there is anything to check."""
    found = ((name, _check_of(hint)) for name, hint in get_type_hints(kind, include_extras=True).items())
    return tuple((name, check) for name, check in found if check is not None)


def _check_of(hint: Any) -> _Check | None:
    match shape(hint):
        case "ruled", rule:
            return lambda value: None if rule.admits(value) else Fault("", value, str(rule))
        case "optional", inner if (check := _check_of(inner)) is not None:
            return lambda value: None if value is None else check(value)
        case "many", inner if isinstance(inner, type) and issubclass(inner, Struct):
            return _check_all(inner)
        case "struct", _:
            return _below
    return None


def _below(struct: Struct) -> Fault | None:
    found = fault(struct)
    return found and found._replace(field=f".{found.field}")


def _check_all(kind: type[Struct]) -> _Check:
    """Of many structs: each field of all of them at once, which takes a fraction of the time."""
    shapes = [shape(hint) for hint in get_type_hints(kind, include_extras=True).values()]
    rules = [(number, rule) for number, (what, rule) in enumerate(shapes) if what == "ruled"]

    def check(structs: tuple[Struct, ...]) -> Fault | None:
        columns = list(zip(*map(astuple, structs), strict=True))
        if not columns or all(rule.admits_all(columns[number]) for number, rule in rules):
            return None
        faults = ((number, fault(struct)) for number, struct in enumerate(structs))
        number, found = next((number, found) for number, found in faults if found)
        return found._replace(field=f"[{number}].{found.field}")

    return check


# --- free text ------------------------------------------------------------------------------------------------------


def tidied(struct: AnyStruct) -> AnyStruct:
    """The same with every free text cut and escaped, also those of structs below it."""
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
    """What a type is to us, and the rule or type in it."""
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
