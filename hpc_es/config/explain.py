"""Error messages about a configuration.

Pydantic finds the errors; this module describes them: the key, the value, where it was set, and what is allowed.
Invariant: users never see pydantic's own messages.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hpc_es.config.schema import TAGGED, Config

_RULES = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list, like [a, b]",
    "dict_type": "must be a section of key: value pairs",
    "string_pattern_mismatch": "must match {pattern}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
}


def explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line per error. `origins`: dotted key -> where its value was set."""
    return "\n".join(_explain_one(fault, origins) for fault in error.errors())


def _explain_one(fault: ErrorDetails, origins: Mapping[str, str]) -> str:
    key, value, kind = _dotted(_without_tag(fault["loc"])), fault["input"], fault["type"]
    place = f" ({origins[key]})" if key in origins else ""
    if kind == "extra_forbidden":
        if fault["loc"][0] in TAGGED:
            section, tag = str(fault["loc"][0]), str(fault["loc"][1])
            return f"{key}: unknown key for {TAGGED[section]}={tag}{place}; {_remedy_in_kind(section, tag, key)}"
        return f"{key}: unknown key{place}; {_remedy(key)}"
    if kind == "missing":
        return f"{key} is missing: it has no default; set it in the config file or with {key}=..."
    if kind == "value_error":
        message = str(fault.get("ctx", {})["error"])
        if message.startswith("must "):
            return f"{key}={_shown(value)}{place} {message}"
        return message if message.startswith(f"{key}.") or not key else f"{key}{place}: {message}"
    if kind == "union_tag_not_found":
        return f"{key}.{_tag(fault)} is missing: it selects the kind of {key}"
    if kind == "union_tag_invalid":
        tags = fault["ctx"]["expected_tags"].replace("'", "")
        near = _near(fault["ctx"]["tag"], tags.split(", "))
        place = f" ({origins[f'{key}.{_tag(fault)}']})" if f"{key}.{_tag(fault)}" in origins else ""
        hint = f"; did you mean {near}?" if near else ""
        return f"{key}.{_tag(fault)}={fault['ctx']['tag']}{place} must be one of {tags}{hint}"
    if kind == "model_type":
        return f"{key}={_shown(value)}{place} must be a section with the keys {', '.join(_keys_of(key))}"
    rule = _RULES[kind].format(**fault.get("ctx", {})) if kind in _RULES else fault["msg"]
    if kind == "string_type" and isinstance(value, (int, float)):
        rule += "; put it in quotes"
    near = _near(str(value), _literals(fault)) if kind == "literal_error" else None
    return f"{key}={_shown(value)}{place} {rule}" + (f"; did you mean {near}?" if near else "")


def _without_tag(location: Sequence[str | int]) -> Sequence[str | int]:
    """Pydantic's location of a value, without the tag that it inserts for a section with several kinds."""
    untagged = [*location[:1], *location[2:]] if location and location[0] in TAGGED else location
    return [part for part in untagged if part != "[key]"]  # pydantic adds it if the key itself is wrong


def _tag(fault: ErrorDetails) -> str:
    return str(fault["ctx"]["discriminator"]).strip("'")


def _dotted(location: Sequence[str | int]) -> str:
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return key.removeprefix(".")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _literals(fault: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", fault.get("ctx", {})["expected"])


def _remedy(key: str) -> str:
    """Suggest the key with the most similar name, or list the valid keys if none is similar."""
    section, _, name = key.rpartition(".")
    everywhere = [known for known in _all_keys(Config, "") if known != key]
    siblings = _keys_of(section)
    same_name = next((known for known in everywhere if known.rpartition(".")[2] == name), None)
    sibling = _near(name, siblings)
    near = same_name or (f"{section}.{sibling}".removeprefix(".") if sibling else _near_name(name, everywhere))
    if near:
        return f"did you mean {near}?"
    return f"valid keys{' in ' + section if section else ''}: {', '.join(siblings)}"


def _remedy_in_kind(section: str, tag: str, key: str) -> str:
    """The same as `_remedy`, for a section with several kinds."""
    kinds = get_args(Config.model_fields[section].annotation)
    names = next(list(kind.model_fields) for kind in kinds if tag in str(kind.model_fields[TAGGED[section]].annotation))
    near = _near(key.rpartition(".")[2], names)
    return f"did you mean {section}.{near}?" if near else f"valid keys of {tag}: {', '.join(names)}"


def _near(word: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.75)), None)


def _near_name(name: str, known: Sequence[str]) -> str | None:
    """A key of any section whose last part is similar."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(known)}
    match = _near(name, list(by_name))
    return by_name[match] if match else None


def _all_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every dotted key of the schema; a section comes before its keys."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        kinds = get_args(field.annotation) or (field.annotation,)
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        yield from dict.fromkeys(known for kind in below for known in _all_keys(kind, f"{key}."))


def _keys_of(section: str) -> list[str]:
    prefix = f"{section}." if section else ""
    names = (key.removeprefix(prefix) for key in _all_keys(Config, "") if key.startswith(prefix))
    return [name for name in names if "." not in name]
