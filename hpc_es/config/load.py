"""From YAML files and dotted overrides to a checked Config, and back.

Invariants: a key that the schema does not know never passes; every value of the result can say where it came from;
`load(path)` of what `save` wrote is the same Config. Relative `model.path` and `run.dir` are relative to the working
directory of the command, as on any command line; `extends: other.yaml` (or a list) is relative to the file that says
so.
"""

import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpc_es.config import yaml12
from hpc_es.config.explain import explain
from hpc_es.config.schema import HARMLESS, TAGGED, Config
from hpc_es.config.yaml12 import Given, Tree
from hpc_es.errors import ConfigError
from hpc_es.files import read_bytes
from hpc_es.paths import RunPaths

DEFAULT = "default"
MEASURE = ("task", "sampling", "eval", "engine")
"""Sections that say what parameters are measured by: an evaluation made later may have others than its run."""


@dataclass(frozen=True)
class Loaded:
    config: Config
    origins: dict[str, str]
    """Dotted key of every value in `config` -> file:line, "override", or "default"."""


@dataclass(frozen=True)
class Difference:
    """One key that two configurations give different values. Absent on one side: None."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.old)} -> {json.dumps(self.new)}"


def load(path: Path | str, overrides: Sequence[str] = (), *, site: Path | str | None = None) -> Loaded:
    """Read a config file, or that of a run folder, lay the overrides over it in order, and check the whole.

    An override is `key=value`, or another YAML file that says only what is different (configs/staleness, say).
    `site` is laid over what the config file extends and under what it says itself; it holds harmless keys only.

    Errors: ConfigError that names each wrong key, its value, where it stands, and what is allowed.
    """
    path = Path(path)
    file = RunPaths(path).config if path.is_dir() else path
    tree = _read(file, (), _read_site(Path(site)) if site else {})
    for override in overrides:
        is_file = "=" not in override and override.endswith((".yaml", ".yml"))
        tree = _merge(tree, _read(Path(override), ()) if is_file else _override(override))
    config = _checked(tree)
    given = dict(yaml12.origins(tree))
    return Loaded(config, {key: _origin_of(key, given) for key, _ in flatten(config)})


def refuse_moved(root: Path, config: Config) -> None:
    """Resuming a run folder must not begin another run. Errors: ConfigError when the folder was moved."""
    place = config.run.dir / config.run.name
    if place.resolve() != root.resolve():
        renamed = f" run.name={root.resolve().name}" if root.resolve().name != config.run.name else ""
        raise ConfigError(
            f"{root} says that it is {place} (run.dir and run.name, seen from {Path.cwd()}): run this where it began, "
            f"or add run.dir={root.parent}{renamed}"
        )


def settle(values: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str) -> Config:
    """Check plain values (see Config.model_dump) with overrides laid over them; `origin` is where they are from.

    Errors: as `load`.
    """
    tree = _relabel(yaml12.parse(yaml12.dump(dict(values)), origin), origin)
    assert not isinstance(tree, Given), "a mapping is a tree"
    for override in overrides:
        tree = _merge(tree, _override(override))
    return _checked(tree)


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration, atomically."""
    text = yaml12.dump(config.model_dump(mode="json"))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def from_record(text: str) -> Config:
    """The configuration that a journal has, as JSON. Errors: ConfigError when another hpc_es wrote it."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"the journal's configuration is not of this hpc_es:\n{explain(error, {})}") from None


def flatten(config: Config) -> list[tuple[str, Any]]:
    """(dotted key, plain value) of every setting, in the schema's order. Lists and empty mappings are values."""
    return list(_leaves(config.model_dump(mode="json"), ""))


def config_digest(config: Config) -> str:
    """16 hex digits over every setting that can change a bit of the result; harmless ones do not count."""
    settings = {key: value for key, value in flatten(config) if not _harmless(key)}
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def compare(old: Config, new: Config) -> tuple[list[Difference], list[Difference]]:
    """(differences that change what the run computes, harmless differences), in the schema's order."""
    before, after = dict(flatten(old)), dict(flatten(new))
    differences = [
        Difference(key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]
    return [d for d in differences if not _harmless(d.key)], [d for d in differences if _harmless(d.key)]


def refuse_another(recorded: str, config: Config, path: Path) -> None:
    """Errors: ConfigError when `config`, read from `path`, computes something else than what a journal began with."""
    harmful, _ = compare(from_record(recorded), config)
    if harmful:
        raise ConfigError(
            f"{path} is not what this run began with: {'; '.join(map(str, harmful))}; set it back, or choose another "
            "run.name"
        )


def refuse_evaluation_of_another(recorded: str, evaluated: str) -> None:
    """Errors: ConfigError when the run that a later evaluation was made for was not configured as this one.

    Only what both name is compared, since another hpc_es may have written either.
    """
    run, other = (dict(_leaves(json.loads(text), "")) for text in (recorded, evaluated))
    may_differ = (*MEASURE, "model.path")  # the base model may have moved
    differences = [
        Difference(key, run[key], other[key])
        for key in run
        if key in other and run[key] != other[key] and not _harmless(key) and not _is_below(key, may_differ)
    ]
    if differences:
        raise ConfigError(f"it is an evaluation of another run: {'; '.join(map(str, differences))}; move it back there")


def _checked(tree: Tree) -> Config:
    try:
        return _validate(yaml12.plain(tree))
    except ValidationError as error:
        raise ConfigError(explain(error, dict(yaml12.origins(tree)))) from None


def _validate(values: Any) -> Config:
    # By way of JSON: strict there means that "4", 4.0 and true are no integers, while lists still become tuples.
    return Config.model_validate_json(json.dumps(values), strict=True)


def _read_site(path: Path) -> Tree:
    """A file that says what differs between clusters."""
    tree = _read(path, ())
    for key, origin in yaml12.origins(tree):
        if not _harmless(key):
            raise ConfigError(
                f"{key} ({origin}) cannot stand in a site file, since it can change what the run computes; a site file "
                f"may set {', '.join(HARMLESS)}"
            )
    return tree


def _read(path: Path, descendants: tuple[Path, ...], between: Tree | None = None) -> Tree:
    """A config file laid over `between`, and that over the file that it extends."""
    try:
        text = read_bytes(path).decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file (working directory {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    tree = yaml12.parse(text, str(path))
    if isinstance(tree, Given):
        raise ConfigError(f"{path}: a config file is a mapping of sections (run, model, task, ...), not {tree.value!r}")
    base = tree.pop("extends", None)
    merged: Tree = {}
    for name in _parents(path, base):
        parent = path.parent / name
        if not name or parent.is_dir():
            assert isinstance(base, Given)
            raise ConfigError(f"{base.origin}: extends={name!r} must name a config file")
        family = (*descendants, path.resolve())
        if parent.resolve() in family:
            assert isinstance(base, Given)
            raise ConfigError(f"{base.origin}: extends={name} leads back to {parent.name}")
        merged = _merge(merged, _read(parent, family))
    return _merge(_merge(merged, between or {}), tree)


def _parents(path: Path, base: "Tree | Given | None") -> list[str]:
    """What a file extends: one config file, or several, each laid over those before it."""
    if base is None:
        return []
    names = base.value if isinstance(base, Given) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: extends must be the name of a config file, or a list of such names")
    return names


def _merge(base: Tree, over: Tree) -> Tree:
    for section, tag in TAGGED.items():
        after = over.get(section)
        if isinstance(after, dict) and tag in after:  # who names the kind begins the section anew
            base = {key: value for key, value in base.items() if key != section}
    merged = yaml12.merge(base, over)
    assert isinstance(merged, dict), "two mappings merge to a mapping"
    return merged


def _override(text: str) -> Tree:
    """`a.b=value` as a tree of one leaf; the value is YAML."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"override {text!r} must have the form section.key=value, e.g. es.population=16, or be a .yaml file"
        )
    if len(parts) > yaml12.MAX_DEPTH:
        raise ConfigError(f"override {key[:100]}...: {len(parts)} parts are too many for a key")
    tree = _relabel(yaml12.parse(_quoted_address(value), f"override {key}"), "override")
    for part in reversed(parts):
        tree = {part: tree}
    assert isinstance(tree, dict), "there is at least one part"
    return tree


def _quoted_address(value: str) -> str:
    """`[::1]` as the text that it is, where YAML would see a list, or nothing that it knows."""
    found = re.fullmatch(r"\[(.*:.*)\]", value.strip())
    try:
        ipaddress.IPv6Address(found[1] if found else "")
    except ValueError:
        return value
    return f"'{value.strip()}'"


def _relabel(tree: Tree | Given, origin: str) -> Tree | Given:
    if isinstance(tree, Given):
        return Given(tree.value, origin)
    return {key: _relabel(below, origin) for key, below in tree.items()}


def _origin_of(key: str, given: dict[str, str]) -> str:
    """The origin of the key, or of the value that stands for its whole section (`es.sigma: 1e-3`)."""
    while key not in given:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return DEFAULT
    return given[key]


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _harmless(key: str) -> bool:
    return _is_below(key, HARMLESS)


def _is_below(key: str, sections: Sequence[str]) -> bool:
    return any(key == known or key.startswith(known + ".") for known in sections)
