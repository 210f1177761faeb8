"""Durations of everything in a run, for the simulator: from a distribution, or measured in a real run.

Invariant: a duration is a pure function of the seed and of the activity. The same evaluation takes equally long on
every worker, in every mode and every time it is repeated, so that modes are compared on the same durations.

Two effects are not modelled: differences in speed between workers, and workers that slow each other down (with another
number of workers on the same machine, durations change).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import TYPE_CHECKING, Literal, Protocol

from hpc_es.config.yaml12 import seconds
from hpc_es.errors import ConfigError, StoreError
from hpc_es.records import EvalId, Purpose
from hpc_es.seeds import derive

if TYPE_CHECKING:
    import pandas as pd

    from hpc_es.store import Run

Quantile = Callable[[float], float]
"""A distribution of seconds, as its quantile function on (0, 1)."""
Seconds = Quantile | float

Resample = Literal["none", "versions", "evaluations"]
"""How the durations of a run's evaluations are reused. `none` keeps them, slot by slot, as in the run; `versions`
shuffles them within each version; `evaluations` draws each one independently from the whole run."""
LOAD_MEMBERS = 2
"""Reading a checkpoint takes about as long as applying this many members of an update."""

_normal = NormalDist().inv_cdf


def empirical(seconds: Sequence[float]) -> Quantile:
    """The distribution with equal probability for each measured value; there must be at least one."""
    ordered = sorted(map(float, seconds))
    return lambda u: ordered[int(u * len(ordered))]


def around(seconds: float) -> Quantile:
    """The uniform distribution from 0.5 to 1.5 times the given mean."""
    return lambda u: seconds * (0.5 + u)


class Evaluations(Protocol):
    """Durations of perturbing and rolling out, in seconds."""

    def seconds(self, eval_id: EvalId, kind: Purpose, seed: int) -> float: ...


@dataclass(frozen=True)
class Costs:
    """Durations of everything besides evaluations, in seconds."""

    catch_up: Seconds = 0.0
    """A worker applies one update."""
    prepare: Seconds = 0.0
    """A worker prepares an evaluation without an update to apply."""
    load: float = 0.0
    """A worker reads a checkpoint."""
    dispatch: Seconds = 0.0
    """From the head's lease until the worker starts: fsync and message."""
    report: Seconds = 0.0
    """From the end of the evaluation until the head has the result."""
    first_starts: tuple[float, ...] = ()
    """From the start of the head until the k-th worker is connected; further workers use `start`."""
    start: Seconds = 0.0
    head_update: Seconds = 0.0
    """The head applies an update to its arena."""
    checkpoint: Seconds = 0.0


@dataclass(frozen=True)
class Durations:
    evaluations: Evaluations
    costs: Costs = Costs()
    seed: int = 0

    def evaluation(self, eval_id: EvalId, kind: Purpose) -> float:
        """Seconds of perturbing and rolling out."""
        return self.evaluations.seconds(eval_id, kind, self.seed)

    def catch_up(self, eval_id: EvalId, num_versions: int, *, load: bool) -> float:
        """Seconds to bring a worker's arena forward by `num_versions`, after reading a checkpoint if `load`."""
        each = self.costs.catch_up if num_versions else self.costs.prepare
        seconds = max(num_versions, 1) * self._draw(each, "catch up", *_key(eval_id))
        return seconds + self.costs.load * load

    @property
    def usual_catch_up(self) -> float:
        """Median seconds to bring an arena forward by one version: the estimate on which workers base their choice."""
        each = self.costs.catch_up
        return each if isinstance(each, (int, float)) else each(0.5)

    def dispatch(self, eval_id: EvalId) -> float:
        return self._draw(self.costs.dispatch, "dispatch", *_key(eval_id))

    def report(self, eval_id: EvalId) -> float:
        return self._draw(self.costs.report, "report", *_key(eval_id))

    def start(self, number: int, incarnation: int) -> float:
        """Seconds from a worker's launch until it is connected."""
        if incarnation == 0 and number < len(self.costs.first_starts):
            return self.costs.first_starts[number]
        return self._draw(self.costs.start, "start", number, incarnation)

    def head_update(self, version: int) -> float:
        return self._draw(self.costs.head_update, "head", version)

    def checkpoint(self, version: int) -> float:
        return self._draw(self.costs.checkpoint, "checkpoint", version)

    def _draw(self, seconds: Seconds, *labels: str | int) -> float:
        return seconds if isinstance(seconds, (int, float)) else seconds(uniform(self.seed, *labels))


def uniform(seed: int, *labels: str | int) -> float:
    """A uniform random number in the open interval (0, 1), as a pure function of the arguments."""
    return ((derive(seed, *labels) >> 12) + 0.5) / 2**52


def _key(eval_id: EvalId) -> tuple[int, int, int]:
    """Labels for the random numbers of an evaluation."""
    return eval_id.version, eval_id.table_slot, eval_id.replacement


# --- from a distribution ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogNormal:
    """Evaluations that take exp(log(median) + sigma * z) seconds, with z standard normal.

    `shared` is the part of z's variance that all members of a version have in common, because they play the same tasks.
    With sigma 0 every evaluation takes `median`.
    """

    median: float
    sigma: float
    shared: float = 0.0
    eval: float = 1.0
    """Factor on the duration for a batch of evaluation tasks."""

    def seconds(self, eval_id: EvalId, kind: Purpose, seed: int) -> float:
        seconds = self.median if kind == "train" else self.median * self.eval
        if self.sigma == 0:
            return seconds
        z = math.sqrt(1 - self.shared) * _normal(uniform(seed, "evaluation", *_key(eval_id)))
        if self.shared:
            z += math.sqrt(self.shared) * _normal(uniform(seed, "version", eval_id.version))
        return seconds * math.exp(self.sigma * z)


# --- from a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Evaluations with the durations measured in a run.

    `groups` are the run's training evaluations by dispatch version (neighbours are joined until there are enough for a
    cohort). Version v uses those of group v mod len(groups), each once, so that the members of a version keep their
    common part and barriers take as long as in the run.
    """

    groups: tuple[tuple[float, ...], ...]
    evals: Quantile | None
    """Durations of batches of evaluation tasks; None if the run has none."""
    resample: Resample = "none"
    _orders: dict[int, tuple[float, ...]] = field(default_factory=dict, compare=False)
    _all: list[float] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self._all.extend(seconds for group in self.groups for seconds in group)

    def seconds(self, eval_id: EvalId, kind: Purpose, seed: int) -> float:
        if kind == "eval":
            if self.evals is None:
                raise ConfigError("the durations have no evaluation on held-out tasks: simulate with eval.num_tasks=0")
            return self.evals(uniform(seed, "evaluation", *_key(eval_id)))
        if self.resample == "evaluations" or kind == "centre":
            return self._all[int(uniform(seed, "evaluation", *_key(eval_id)) * len(self._all))]
        order = self._order(eval_id.version, seed)
        return order[(eval_id.slot + eval_id.replacement) % len(order)]

    def _order(self, version: int, seed: int) -> tuple[float, ...]:
        if version not in self._orders:
            group = self.groups[version % len(self.groups)]
            if self.resample == "versions":
                keys = [uniform(seed, "order", version, place) for place in range(len(group))]
                group = tuple(group[place] for place in sorted(range(len(group)), key=keys.__getitem__))
            self._orders[version] = group
        return self._orders[version]


def of_run(run: "Run", *, population: int, resample: Resample = "none", seed: int = 0) -> Durations:
    """Durations measured in a run, without void evaluations. Errors: StoreError when it has no finished evaluation."""
    evaluations = run.evaluations
    measured = evaluations[
        (evaluations["source"] == "run") & evaluations["seconds_rollout"].notna() & (evaluations["error"] == "")
    ].sort_values(["dispatch_version", "slot", "replacement"])
    seconds = measured["seconds_perturb"] + measured["seconds_rollout"]
    train, evals = measured["kind"] == "train", measured["kind"] == "eval"
    if not train.any():
        raise StoreError("the run has no finished training evaluation, so it has no durations to simulate with")
    by_version = [group.tolist() for _, group in seconds[train].groupby(measured["dispatch_version"][train])]
    groups = tuple(tuple(group) for group in _joined(by_version, population))
    held_out = empirical(list(seconds[evals])) if evals.any() else None
    return Durations(Measured(groups, held_out, resample), _costs_of(run, measured, population), seed)


def _joined(groups: list[list[float]], size: int) -> list[list[float]]:
    """Join neighbouring groups until each has at least `size` entries; the rest goes to the last group."""
    joined: list[list[float]] = [[]]
    for group in groups:
        if len(joined[-1]) >= size:
            joined.append([])
        joined[-1].extend(group)
    if len(joined) > 1 and len(joined[-1]) < size:
        rest = joined.pop()
        joined[-1].extend(rest)
    return joined


def _costs_of(run: "Run", measured: "pd.DataFrame", population: int) -> Costs:
    measured = measured.sort_values("time_started", kind="stable")
    missed = measured["dispatch_version"] - measured.groupby("worker")["dispatch_version"].shift()
    head_updates = list(run.updates["seconds_update"].dropna())
    steps = list((measured["seconds_update"] / missed)[missed >= 1]) or head_updates or [0.0]
    starts = _starts(run)
    return Costs(
        catch_up=empirical(steps),
        prepare=empirical(list(measured["seconds_update"][missed == 0]) or [0.0]),
        load=LOAD_MEMBERS / population * fmean(steps),
        dispatch=empirical(_not_negative(measured["time_started"] - measured["time_leased"])),
        report=empirical(_not_negative(measured["time_received"] - measured["time_finished"])),
        first_starts=tuple(starts),
        start=empirical(starts or [0.0]),
        head_update=empirical(head_updates or [0.0]),
        checkpoint=_checkpoint_seconds(run),
    )


def _starts(run: "Run") -> list[float]:
    """Seconds from the head's first start until each seat's first worker was connected, shortest first."""
    begins = run.events.loc[run.events["what"] == "head started", "time"]
    if begins.empty or run.workers.empty:
        return []
    return sorted(_not_negative(run.workers.groupby("seat")["time_joined"].min() - begins.iloc[0]))


def _checkpoint_seconds(run: "Run") -> float:
    """Median seconds from a version's digest until its checkpoint was written; 0 without checkpoints."""
    updates = run.updates.set_index("version")
    saved = run.events["what"].str.extract(r"^checkpoint of version (\d+)$")[0].dropna().astype(int)
    saved = saved[saved.isin(updates.index)]
    ready = updates["time_committed"] + updates["seconds_update"]
    seconds = run.events["time"][saved.index] - ready.loc[saved].to_numpy()
    return max(median(seconds.dropna()), 0.0) if seconds.notna().any() else 0.0


def _not_negative(seconds: "pd.Series[float]") -> list[float]:
    return [max(float(value), 0.0) for value in seconds.dropna()] or [0.0]


# --- from the command line --------------------------------------------------------------------------------------

MAX_S = 1e9
"""Largest duration in seconds, thirty years. With larger ones, floating-point time would lose short durations."""
_MAX = {"sigma": 5, "shared": 1}
"""Largest values of parameters that are not durations; `shared` is a part of the variance, so at most 1."""
_DISTRIBUTIONS = {"lognormal": ("median", "sigma", "shared"), "constant": ("seconds",)}
_COSTS = {
    "update": "a worker applies one update",
    "dispatch": "an assignment is under way",
    "report": "a result is under way",
    "start": "mean until a worker is connected, uniform within half of it",
    "head_update": "the head applies an update",
    "checkpoint": "the head writes a checkpoint",
}
FORMS = (
    "a run folder, a run.h5, constant:SECONDS, or lognormal:median=60,sigma=0.8; the last two also with eval=FACTOR, "
    + ", ".join(f"{key}=" for key in _COSTS)
)


def parse(text: str, *, population: int, resample: Resample = "none", seed: int = 0) -> Durations:
    """Parse the value of --durations. Errors: ConfigError, StoreError."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _DISTRIBUTIONS:
        if not Path(text).exists():
            raise ConfigError(f"--durations {text}: must be {FORMS}")
        from hpc_es.store import read

        return of_run(read(text), population=population, resample=resample, seed=seed)
    values = _values(text, kind, rest)
    if kind == "constant":
        evaluations = LogNormal(values["seconds"], 0.0, eval=values.get("eval", 1.0))
    else:
        evaluations = LogNormal(
            values["median"], values.get("sigma", 0.8), values.get("shared", 0.0), values.get("eval", 1.0)
        )
    of = {key: values.get(key, 0.0) for key in _COSTS}
    costs = Costs(
        catch_up=of["update"],
        load=LOAD_MEMBERS / population * of["update"],
        dispatch=of["dispatch"],
        report=of["report"],
        start=around(of["start"]) if of["start"] else 0.0,
        head_update=of["head_update"],
        checkpoint=of["checkpoint"],
    )
    return Durations(evaluations, costs, seed)


def _values(text: str, kind: str, rest: str) -> dict[str, float]:
    """Parse key=value, ...; a number without a key belongs to the first key."""
    first, *others = _DISTRIBUTIONS[kind]
    allowed = (first, *others, "eval", *_COSTS)
    values = {}
    for item in rest.split(","):
        key, _, value = item.rpartition("=")
        key = key or first
        if key not in allowed:
            raise ConfigError(f"--durations {text}: {key!r} is unknown; allowed: {', '.join(allowed)}")
        try:
            number = _number(value) if key not in ("sigma", "shared", "eval") else float(value)
        except ValueError as error:
            raise ConfigError(f"--durations {text}: {item!r} is not a number or a duration like 90s") from error
        if not math.isfinite(number):
            raise ConfigError(f"--durations {text}: {item!r} must be a finite number")
        if number < 0 or (key == first and number == 0):
            raise ConfigError(f"--durations {text}: {item!r} must not be negative, and {first} must be above 0")
        if number > _MAX.get(key, MAX_S):
            raise ConfigError(f"--durations {text}: {item!r} must be at most {_MAX.get(key, MAX_S):g}")
        values[key] = number
    if first not in values:
        raise ConfigError(f"--durations {text}: {first}= is missing")
    return values


def parse_seconds(text: str, option: str) -> float:
    """Parse seconds, given as a number or like 90s and 2h. Errors: ConfigError."""
    try:
        number = _number(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: must be a duration: seconds as a number, or like 90s, 15m, 2h") from error
    if not 0 < number <= MAX_S:
        raise ConfigError(f"{option} {text}: must be a duration above 0, at most {MAX_S:g} s")
    return number


def _number(text: str) -> float:
    """Parse a number or a duration. Errors: ValueError."""
    try:
        return float(text)
    except ValueError:
        return float(seconds(text))
