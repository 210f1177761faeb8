"""Groups runs of equal settings into conditions, and gives every condition a distinct name.

Invariant: two runs belong to one condition exactly when their configurations differ only in run.seed and in keys that
change no bit of a result. No seed occurs twice in a condition, also if its name was given by the user. Names are those
of the asynchronous-ES paper (Hoy et al., 2026): Sync, Async-1, Lag-4 50 %, Tail-32, Staircase.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_es.config.load import from_record
from hpc_es.config.schema import HARMLESS
from hpc_es.errors import ConfigError
from hpc_es.store import Run, read

Source = Run | str | os.PathLike[str]
"""A run, its run folder, or its run.h5."""
Runs = Source | Sequence[Source] | Mapping[str, Source | Sequence[Source]]
"""Argument of tables and figures: one run, several, or a mapping from condition names to runs."""

_APART = ("run.seed", *HARMLESS)
_MAX_KEYS = 2
"""Largest number of differing settings that a condition's name lists."""
_PLAIN = {"es.subspaces": 1, "es.mirrored": False, "es.shaping": "zscore", "es.baseline": "none"}
_PLAIN |= {"es.lag_weight.kind": "none", "es.optimiser.kind": "none", "es.control": "none"}
_WORDS = {
    "es.subspaces": "CoPES-{}",
    "es.mirrored": "mirrored",
    "es.shaping": "{}",
    "es.baseline": "{} baseline",
    "es.lag_weight.kind": "{} lag weight",
    "es.optimiser.kind": "{}",
    "es.control": "{}",
}


@dataclass(frozen=True)
class Condition:
    """Runs that differ in nothing but their seeds."""

    label: str
    runs: tuple[Run, ...]


def conditions_of(runs: Runs) -> list[Condition]:
    """Group runs into conditions, in order of first appearance. A mapping gives the conditions and their names.

    Errors: ConfigError for an argument that is not a run, for a seed that occurs twice in a condition, and for a name
    given to runs of different settings; those of hpc_es.read for a path.
    """
    if isinstance(runs, Mapping):
        named = [Condition(label, tuple(_sequence(members))) for label, members in runs.items()]
        for condition in named:
            _check_settings(condition)
            _check_seeds(condition)
        return named
    groups: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in _sequence(runs):
        flat = compared_settings(run)
        key = json.dumps(flat, sort_keys=True)
        groups.setdefault(key, []).append(run)
        settings[key] = flat
    names = {key: str(members[0].attrs["run_id"]) for key, members in groups.items()}
    labels = _distinct({key: condition_label(members[0]) for key, members in groups.items()}, settings, names)
    found = [Condition(labels[key], tuple(members)) for key, members in groups.items()]
    for condition in found:
        _check_seeds(condition)
    return found


def labelled(runs: Runs) -> list[tuple[str, Run]]:
    """Every run with a distinct label: its condition, and its seed if the condition has several runs."""
    named = []
    for condition in conditions_of(runs):
        for run in condition.runs:
            label = condition.label if len(condition.runs) == 1 else f"{condition.label}, seed {seed(run)}"
            named.append((label, run))
    counts = {label: [other for other, _ in named].count(label) for label, _ in named}
    return [(label if counts[label] == 1 else f"{label} ({run.attrs['run_id']})", run) for label, run in named]


def labelled_within(condition: Condition) -> list[tuple[str, Run]]:
    """Runs of a condition with labels that number them: "Sync: sync1, 2 of 3 runs"."""
    total = len(condition.runs)
    if total == 1:
        return [(condition.label, condition.runs[0])]
    return [
        (f"{condition.label}: {run.attrs['run_id']}, {number} of {total} runs", run)
        for number, run in enumerate(condition.runs, start=1)
    ]


def settings(run: Run) -> dict[str, Any]:
    """Nested configuration with current defaults, or as recorded if another version of hpc_es wrote it."""
    try:
        return from_record(str(run.attrs["config"])).model_dump(mode="json")
    except ConfigError:
        return run.config


def flat_settings(run: Run) -> dict[str, Any]:
    """Configuration as dotted keys and values; lists and empty mappings are values."""
    return dict(_leaves(settings(run), ""))


def compared_settings(run: Run) -> dict[str, Any]:
    """The part of `flat_settings` that is equal in all runs of a condition."""
    return {key: value for key, value in flat_settings(run).items() if not _is_apart(key)}


def place(run: Run) -> str:
    """Name of a run for messages, with its folder if that is named differently."""
    name = str(run.attrs["run_id"])
    return name if run.folder is None or run.folder.name == name else f"{name} ({run.folder})"


def seed(run: Run) -> int:
    """Return run.seed."""
    return int(run.config.get("run", {}).get("seed", 0))


def condition_label(run: Run) -> str:
    """Name of a run's condition: its staleness, then what differs from plain ES, as in "Lag-4 50 %, CoPES-4"."""
    flat = flat_settings(run)
    method = [
        words.format(str(flat[key]).replace("_", " ").replace("-", " ") if isinstance(flat[key], str) else flat[key])
        for key, words in _WORDS.items()
        if flat.get(key, _PLAIN[key]) != _PLAIN[key]
    ]
    return ", ".join([staleness_label(settings(run).get("staleness", {})), *method])


def is_staircase(run: Run) -> bool:
    """Whether a run is a staircase, whose steps an average over updates would blur."""
    return settings(run).get("staleness", {}).get("mode") == "staircase"


def staleness_label(staleness: Mapping[str, Any]) -> str:
    """Name of a schedule in the asynchronous-ES paper: Sync, Async-1, Lag-4 50 %, Tail-32, Staircase."""
    match staleness.get("mode", "sync"):
        case "natural":
            return f"Async-{staleness['max_lag']}" + (" hold" if staleness.get("overdue") == "hold" else "")
        case "controlled":
            return f"Lag-{staleness['lag']} {100 * staleness['share']:g} %"
        case "tail":
            return f"Tail-{max((int(lag) for lag, count in staleness['counts'].items() if count), default=0)}"
        case "staircase":
            return "Staircase" + (" isolated" if staleness.get("isolated") else "")
        case mode:
            return str(mode).capitalize()


# --- telling conditions apart ------------------------------------------------------------------------------------


def _distinct(labels: dict[str, str], settings: dict[str, dict[str, Any]], names: dict[str, str]) -> dict[str, str]:
    """Make equal labels distinct.

    Appends population x tasks and key=value, or the name of the first run if too many keys differ, and a number if
    labels are still equal.
    """
    result: dict[str, str] = {}
    for key, label in labels.items():
        twins = [other for other, same in labels.items() if same == label]
        keys = dict.fromkeys(name for twin in twins for name in settings[twin])
        differing = [name for name in keys if len({json.dumps(settings[twin].get(name)) for twin in twins}) > 1]
        parts = [label, *_what_differs(differing, settings[key], names[key])]
        text, number = " ".join(parts), sum(taken.partition(" #")[0] == " ".join(parts) for taken in result.values())
        result[key] = f"{text} #{number + 1}" if number else text
    return result


def _what_differs(keys: Sequence[str], flat: Mapping[str, Any], name: str) -> Iterator[str]:
    size = ("es.population", "es.tasks_per_member")
    others = [key for key in keys if key not in size]
    if len(others) < len(keys):
        yield "x".join(str(flat.get(key, "?")) for key in size)
    if len(others) > _MAX_KEYS:
        yield name
        return
    for key in others:
        value = flat.get(key)
        yield f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _is_apart(key: str) -> bool:
    return any(key == known or key.startswith(known + ".") for known in _APART)


def _check_settings(condition: Condition) -> None:
    """Check that runs differ in their seeds only. Errors: ConfigError."""
    for run in condition.runs[1:]:
        first, other = compared_settings(condition.runs[0]), compared_settings(run)
        for key in first | other:
            if first.get(key) != other.get(key):
                values = (json.dumps(flat.get(key)) for flat in (first, other))
                raise ConfigError(
                    f"{place(condition.runs[0])} and {place(run)} cannot both be {condition.label!r}: {key} is "
                    f"{' and '.join(values)}; runs of one condition differ only in their seeds, so give them two names"
                )


def _check_seeds(condition: Condition) -> None:
    """Check that no run and no seed occurs twice. Errors: ConfigError."""
    seen: dict[int, Run] = {}
    for run in condition.runs:
        earlier = seen.get(seed(run))
        if earlier is None:
            seen[seed(run)] = run
            continue
        if earlier is run or (earlier.folder and run.folder and earlier.folder.resolve() == run.folder.resolve()):
            raise ConfigError(f"the run {place(run)} is given twice in {condition.label!r}; give it once")
        raise ConfigError(
            f"{place(earlier)} and {place(run)} of {condition.label!r} have the same seed, {seed(run)}: a deviation "
            "between runs needs independent runs; leave one out, or report them under two names"
        )


def _sequence(runs: Source | Sequence[Source]) -> list[Run]:
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else runs
    if not isinstance(several, Sequence):
        raise ConfigError(f"{runs!r} is not a run: give a run, its folder, several of these, or a mapping from names")
    return [_run(one) for one in several]


def _run(source: Source) -> Run:
    if isinstance(source, Run):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"{source!r} is not a run: give a run (hpc_es.read), or its folder or run.h5 as a path")
    return read(Path(source))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
