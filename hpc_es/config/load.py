"""Load a checked Config from YAML files and dotted overrides, and save it.

Invariants: an unknown key is always an error; the origin of every value is known; `load` of a file that `save` wrote
gives the same Config. Relative paths in `model.path` and `run.dir` are relative to the command's working directory;
`extends: other.yaml` (or a list) is relative to the file that contains it.
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
LATER: dict[str, Any] = {"es.rank": 0}
"""Settings that digests of older configurations lack, with the value that changes nothing."""

MEASURE = ("task", "sampling", "eval", "engine")
"""Sections that define how parameters are measured. An evaluation made after a run may change them."""


@dataclass(frozen=True)
class Loaded:
    """A configuration, and where its values come from."""

    config: Config
    origins: dict[str, str]
    """Dotted key of every value in `config` -> file:line, "override", or "default"."""


@dataclass(frozen=True)
class Difference:
    """One key with different values in two configurations. None: the key is absent."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.old)} -> {json.dumps(self.new)}"


def load(path: Path | str, overrides: Sequence[str] = (), *, site: Path | str | None = None) -> Loaded:
    """Read a config file, or that of a run folder, apply the overrides in order, and check the result.

    An override is `key=value`, or another YAML file with some settings (for example in configs/staleness). `site`
    overrides the files that the config file extends, but not the config file itself; it may only set harmless keys.

    Errors: ConfigError that names each wrong key, its value, where it was set, and what is allowed.
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
    """Refuse to resume a run folder that was moved, since that would start another run. Errors: ConfigError."""
    place = config.run.dir / config.run.name
    if place.resolve() != root.resolve():
        renamed = f" run.name={root.resolve().name}" if root.resolve().name != config.run.name else ""
        raise ConfigError(
            f"the configuration in {root} belongs to the run folder {place} (run.dir and run.name, seen from "
            f"{Path.cwd()}): run this command in the directory where the run was started, or add "
            f"run.dir={root.parent}{renamed}"
        )


def settle(values: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str) -> Config:
    """Make a Config from plain values (see Config.model_dump) and overrides; `origin` names their source in errors.

    Errors: as for `load`.
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
    """Parse the configuration in a journal, which is JSON. Errors: ConfigError if this version cannot read it."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"the journal's configuration was written by another version of hpc_es:\n{explain(error, {})}"
        ) from None


def flatten(config: Config) -> list[tuple[str, Any]]:
    """(dotted key, plain value) of every setting, in the schema's order. Lists and empty mappings are values."""
    return list(_leaves(config.model_dump(mode="json"), ""))


def config_digest(config: Config) -> str:
    """Hash (16 hexadecimal digits) of all settings that can change a bit of the result: all but the harmless ones.

    A setting in LATER does not count at the value that changes nothing, so older digests stay valid.
    """
    later = LATER.items()
    settings = {key: value for key, value in flatten(config) if not _harmless(key) and (key, value) not in later}
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
    """Refuse a configuration, read from `path`, that gives other results than the recorded one. Errors: ConfigError."""
    harmful, _ = compare(from_record(recorded), config)
    if harmful:
        raise ConfigError(
            f"{path} differs from the configuration with which this run started: {'; '.join(map(str, harmful))}; "
            "restore it, or choose another run.name"
        )


def refuse_evaluation_of_another(recorded: str, evaluated: str) -> None:
    """Refuse a later evaluation that was made for a run with another configuration. Errors: ConfigError.

    Only keys in both are compared, since another version of hpc_es may have written either.
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
    """Read a site file: the settings of a cluster."""
    tree = _read(path, ())
    for key, origin in yaml12.origins(tree):
        if not _harmless(key):
            raise ConfigError(
                f"{key} ({origin}) must not be in a site file, since it can change the results of a run; a site file "
                f"may set {', '.join(HARMLESS)}"
            )
    return tree


def _read(path: Path, descendants: tuple[Path, ...], between: Tree | None = None) -> Tree:
    """Read a config file. Its values override `between`, which overrides the files that it extends."""
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
    """The files that a config file extends; later ones override earlier ones."""
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
        if isinstance(after, dict) and tag in after:  # naming the kind replaces the whole section
            base = {key: value for key, value in base.items() if key != section}
    merged = yaml12.merge(base, over)
    assert isinstance(merged, dict), "two mappings merge to a mapping"
    return merged


def _override(text: str) -> Tree:
    """Parse `a.b=value`, whose value is YAML, to a tree with one leaf."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"override {text!r} must have the form section.key=value, e.g. es.population=16, or be a .yaml file"
        )
    if len(parts) > yaml12.MAX_DEPTH:
        raise ConfigError(f"override {key[:100]}...: a key with {len(parts)} parts is too long")
    tree = _relabel(yaml12.parse(_quoted_address(value), f"override {key}"), "override")
    for part in reversed(parts):
        tree = {part: tree}
    assert isinstance(tree, dict), "there is at least one part"
    return tree


def _quoted_address(value: str) -> str:
    """Quote an IPv6 address in brackets, such as `[::1]`, which YAML would read as a list or not at all."""
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
    """The origin of a key, or of a value that was given for its whole section (`es.sigma: 1e-3`)."""
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
