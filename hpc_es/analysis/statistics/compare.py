"""Decide whether A is better than B, from held-out tasks that both have played.

Invariants: only the same tasks are compared, and every other difference between the two sides is named. Interval and
p-value use fixed seeds, so that the same runs always give the same verdict; "better" needs both of them.

d_t is the difference A - B on task t, averaged over its repeats and over seeds. With one run per side the interval is
a bootstrap over tasks: it generalises to other tasks, not to other runs. With several, runs are paired by run.seed, and
seeds and tasks are resampled independently (the pigeonhole bootstrap; Owen, 2007): wider than needed with many
seeds, and still too narrow with two or three. The p-value flips the signs of the d_t.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.analysis.statistics import held_out
from hpc_es.analysis.statistics.held_out import Ceiling
from hpc_es.analysis.statistics.intervals import Paired, paired_runs
from hpc_es.analysis.statistics.progress import progress
from hpc_es.analysis.statistics.runs import flat_settings, seed
from hpc_es.config import Difference
from hpc_es.config.schema import HARMLESS
from hpc_es.errors import ConfigError
from hpc_es.store import Run

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Policy:
    """One version of one run, with its results on held-out tasks."""

    run: Run
    version: int
    seed: int
    outcomes: "pd.DataFrame"
    """Mean reward and success of each task over its repeats. Index: task."""


@dataclass(frozen=True)
class Costs:
    """Cost of training up to the compared version, averaged over a side's runs."""

    updates: float
    evaluations: float
    tokens: float
    worker_seconds: float
    wall_clock_s: float
    """Wall-clock time during which a head was running."""


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`."""

    label_a: str
    label_b: str
    reward: Paired
    success: Paired
    costs_a: Costs
    costs_b: Costs
    differences: tuple[str, ...]
    """Differing versions and settings that could change a result."""
    ceiling: Ceiling | None
    """Set if not all of these tasks can be solved."""

    @property
    def verdict(self) -> str:
        """Verdict on the mean episode reward."""
        return self.reward.verdict


def compare(a: Sequence[Policy], b: Sequence[Policy], *, num_tasks: int | None = None) -> Comparison:
    """Compare two sides, each of one run or of several seeds. `num_tasks` limits the comparison to the first tasks.

    Errors: ConfigError if the sides cannot be paired, which names what differs.
    """
    pairs = _pairs(a, b)
    tasks = _common_tasks([*a, *b], num_tasks)
    reward, success = (
        paired_runs(
            [(x.outcomes[measure][tasks].to_numpy(float), y.outcomes[measure][tasks].to_numpy(float)) for x, y in pairs]
        )
        for measure in ("reward", "success")
    )
    return Comparison(
        _label(a),
        _label(b),
        reward,
        success,
        _costs(a),
        _costs(b),
        tuple(_differences(pairs)),
        held_out.ceiling(a[0].run, tasks, held_out.best_source(a[0].run, a[0].version)),
    )


def policy(run: Run, version: int | None = None) -> Policy:
    """Policy of a version, by default the newest evaluated one. Errors: ConfigError if it was not evaluated."""
    name = run.attrs["run_id"]
    known = sorted(int(v) for v in held_out.comparable(run)["version"].unique())
    if not known:
        raise ConfigError(f"{name} has no evaluation on held-out tasks: `hpc-es eval {name}` makes one")
    version = known[-1] if version is None else version
    if version not in known:
        raise ConfigError(
            f"{name} was not evaluated at version {version}, only at {', '.join(map(str, known))}: `hpc-es eval "
            f"RUN --version {version}` does it"
        )
    return Policy(run, version, seed(run), outcomes_by_task(run, version))


def outcomes_by_task(run: Run, version: int) -> "pd.DataFrame":
    """Reward and success of each held-out task under the unperturbed theta_version; accepted evaluations only.

    Uses the run's own evaluation or a later one with the same decoding (`hpc-es eval`), as `held_out.best_source`
    chooses.
    """
    return held_out.by_task(held_out.episodes(run, version, held_out.best_source(run, version)))


def parse_side(text: str) -> list[tuple[Path, int | None]]:
    """Parse RUN, RUN@VERSION, or several of these separated by commas. Errors: ConfigError."""
    side = []
    for part in text.split(","):
        name, at, version = part.partition("@")
        if not name or (at and not re.fullmatch("[0-9]{1,18}", version)):
            raise ConfigError(f"{part!r} must be a run folder, or RUN@VERSION with a whole number, e.g. runs/a@40")
        side.append((Path(name), int(version) if at else None))
    return side


# --- checks and pairs --------------------------------------------------------------------------------------------


def _pairs(a: Sequence[Policy], b: Sequence[Policy]) -> list[tuple[Policy, Policy]]:
    """Pair single runs regardless of their seeds, and several runs by run.seed."""
    for x, y in itertools.product(a, b):
        _refuse_other_tasks(x.run, y.run)
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    seeds_a, seeds_b = sorted(p.seed for p in a), sorted(p.seed for p in b)
    for label, seeds in (("A", seeds_a), ("B", seeds_b)):
        if len(set(seeds)) < len(seeds):
            raise ConfigError(
                f"the runs of {label} have the run.seeds {seeds}: several runs are paired by seed, so "
                "give each seed once"
            )
    if seeds_a != seeds_b:
        raise ConfigError(
            f"A has the run.seeds {seeds_a}, B has {seeds_b}: several runs are paired by seed, so both sides "
            "need the same seeds"
        )
    by_seed = {p.seed: p for p in b}
    return [(p, by_seed[p.seed]) for p in sorted(a, key=lambda p: p.seed)]


def _refuse_other_tasks(a: Run, b: Run) -> None:
    """Check that two runs were evaluated on the same tasks. Errors: ConfigError that names each difference."""
    (env_a, options_a), (env_b, options_b) = _evaluation_env(a), _evaluation_env(b)
    differing = [f"env: {env_a} and {env_b}"] if env_a != env_b else []
    differing += [
        f"{key}: {options_a.get(key, '(not given)')} and {options_b.get(key, '(not given)')}"
        for key in sorted({*options_a, *options_b})
        if options_a.get(key) != options_b.get(key)
    ]
    differing += _other_data(a, b)
    if differing:
        raise ConfigError(
            f"{a.attrs['run_id']} and {b.attrs['run_id']} were evaluated on different tasks ({'; '.join(differing)}): "
            "only the same tasks can be paired"
        )


def _other_data(a: Run, b: Run) -> list[str]:
    """First task with different ids in the two manifests: the options are the same, but the data are not."""
    facts_a, facts_b = held_out.task_facts(a) or [], held_out.task_facts(b) or []
    for number, (one, other) in enumerate(zip(facts_a, facts_b, strict=False)):
        if one.id != other.id:
            return [f"task {number}: {one.id} and {other.id}"]
    return []


def _evaluation_env(run: Run) -> tuple[str, dict[str, Any]]:
    task, evaluation = run.config.get("task", {}), run.config.get("eval", {})
    return str(task.get("env")), {**task.get("options", {}), **evaluation.get("options", {})}


def _common_tasks(policies: Sequence[Policy], num_tasks: int | None) -> list[int]:
    """Indices of the compared tasks. Errors: ConfigError if the policies have not all played the same tasks."""
    played = [sorted(int(task) for task in p.outcomes.index) for p in policies]
    if num_tasks is not None:
        if any(len(tasks) < num_tasks for tasks in played):
            raise ConfigError(f"--num-tasks {num_tasks} is more than the number of tasks played: {_counts(policies)}")
        played = [tasks[:num_tasks] for tasks in played]
    if any(tasks != played[0] for tasks in played):
        fewest = min(map(len, played))
        raise ConfigError(
            f"the policies were not evaluated on the same tasks: {_counts(policies)}; --num-tasks {fewest} compares "
            "the first tasks of each, `hpc-es eval RUN --version V --num-tasks N` plays more"
        )
    if len(played[0]) < 2:
        raise ConfigError("one held-out task is too few for a verdict: `hpc-es eval RUN --num-tasks N` plays more")
    return played[0]


def _counts(policies: Sequence[Policy]) -> str:
    return ", ".join(f"{p.run.attrs['run_id']}@{p.version} on {len(p.outcomes)} tasks" for p in policies)


def _differences(pairs: Sequence[tuple[Policy, Policy]]) -> list[str]:
    found: dict[str, None] = {}
    for a, b in pairs:
        if a.version != b.version:
            found[f"version: {a.version} -> {b.version}"] = None
        before, after = flat_settings(a.run), flat_settings(b.run)
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key) and not _harmless(key):
                found[str(Difference(key, before.get(key), after.get(key)))] = None
    return list(found)


def _harmless(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in HARMLESS)


def _label(side: Sequence[Policy]) -> str:
    return ", ".join(f"{p.run.attrs['run_id']}@{p.version}" for p in side)


def _costs(side: Sequence[Policy]) -> Costs:
    rows = []
    for p in side:
        frame = progress(p.run)
        rows.append(frame[frame["version"] <= p.version].iloc[-1])
    mean = {name: sum(float(row[name]) for row in rows) / len(rows) for name in rows[0].index}
    return Costs(mean["updates"], mean["evaluations"], mean["tokens"], mean["worker_seconds"], mean["wall_clock_s"])
