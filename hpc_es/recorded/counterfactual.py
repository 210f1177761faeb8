"""What would each update have been with other shaping, weights, baselines or members? From the log alone.

Invariants: no rollouts, no model; the committed updates are taken as recorded, the others are made by the head's own
function from the recorded results under a changed configuration. Each update is asked by itself: the fitness is what
was measured around the theta that the run had, so this is the first step of another run and not the whole of it.

An update is sum(c_i * T(seed_i)), and noise vectors of different seeds count as orthogonal (their cosine is about
1 / sqrt(D) in D parameters), so cosines and norms follow from the coefficients: c of one seed and subspace are summed
first, which treats mirrored pairs exactly. `exact_cosine` takes the noise itself, on a sample of elements.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_es import methods
from hpc_es.config import Config, compare, load
from hpc_es.errors import ConfigError, VerifyError
from hpc_es.methods.base import Cohort
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import AuditedHistory, cohort_of
from hpc_es.records import Assignment, Commit, Result
from hpc_es.seeds import derive
from hpc_es.staleness import lag
from hpc_es.store.journal import read_journal

if TYPE_CHECKING:
    import numpy as np

    from hpc_es.noise import Matrix

    Array = np.ndarray[Any, np.dtype[Any]]

DEFAULT_SHARE = 0.25
_EXACT_RANGES = 64

Noise = tuple[int, int, int]
"""(seed, subspace, partition seed)"""
Direction = Mapping[Noise, float]
"""Coefficient of each noise in an update."""


class Range(NamedTuple):
    """Consecutive elements of a tensor, from the first of a block."""

    name: str
    start: int
    num_elements: int
    matrix: "Matrix | None" = None
    """What noise of low rank sees of the tensor."""


@dataclass(frozen=True)
class Drop:
    """Which members of a cohort are left out."""

    kind: str
    """stale: of lag `amount` or more. slowest, longest, random: the share `amount` that took the most worker-seconds,
    the most tokens, or that a die chose (the control: what losing as many costs anyway)."""
    amount: float

    @classmethod
    def parse(cls, text: str) -> "Drop":
        """stale, stale:4, slowest, slowest:0.25, longest:0.5, random:0.25. Errors: ConfigError."""
        kind, colon, amount = text.partition(":")
        given = _number(amount) if colon else 1.0 if kind == "stale" else DEFAULT_SHARE
        if kind == "stale" and given is not None and given >= 1 and given.is_integer():
            return cls(kind, given)
        if kind in ("slowest", "longest", "random") and given is not None and 0 < given < 1:
            return cls(kind, given)
        raise ConfigError(
            f"--drop {text} must be stale or stale:LAG with a lag from 1, or slowest, longest or random, each with "
            f"a share between 0 and 1, e.g. slowest:{DEFAULT_SHARE}"
        )

    def kept(self, cohort: Cohort, update: int) -> list[tuple[Assignment, Result]]:
        """The members that stay, in the order of the cohort."""
        if self.kind == "stale":
            return [pair for pair in cohort if lag(pair[1].eval_id.version, update) < self.amount]
        measure = {"slowest": _seconds, "longest": _tokens, "random": _die}[self.kind]
        num_dropped = int(self.amount * len(cohort) + 0.5)
        ranked = sorted(range(len(cohort)), key=lambda i: (measure(cohort[i][1]), i))
        return [cohort[i] for i in sorted(ranked[: len(cohort) - num_dropped])]


@dataclass(frozen=True)
class Line:
    """One update. None where the committed update, or the other, is null."""

    update: int
    num_members: int
    num_kept: int
    cosine: float | None
    norm_ratio: float | None
    """Norm of the other update divided by that of the committed one."""
    lag_mean: float
    exact_cosine: float | None = None
    """From the noise itself, on a sample of elements."""


@dataclass(frozen=True)
class Counterfactual:
    lines: tuple[Line, ...]
    changes: tuple[str, ...]
    """What was changed, old -> new."""
    whole_cosine: float | None
    """Cosine of the sums of all updates, before any optimiser: large updates count for more."""
    whole_norm_ratio: float | None

    def mean(self, column: str) -> float | None:
        """Mean of "cosine" or "norm_ratio" over the updates that have one."""
        values = [value for line in self.lines if (value := getattr(line, column)) is not None]
        return math.fsum(values) / len(values) if values else None

    def lowest(self) -> Line | None:
        """The update that would have differed most."""
        lines = [line for line in self.lines if line.cosine is not None]
        return min(lines, key=lambda line: line.cosine or 0.0, default=None)


def counterfactual(
    run: Path, overrides: Sequence[str] = (), *, drop: Drop | None = None, sample: int = 0
) -> Counterfactual:
    """Every update of a run beside what other settings would have made of the same results.

    `overrides`: key=value for keys that the method can answer. `sample`: number of elements of the base model for exact
    cosines; 0: none. Errors: ConfigError when nothing is changed, or when the log cannot answer; VerifyError when the
    log lacks a result, or the centre's for es.baseline=centre; StoreError, ModelError.
    """
    history = AuditedHistory(read_journal(run))
    config = changed_config(run, history.config, overrides)
    method = methods.make(config)
    changes = tuple(_changes(history.config, config, drop))
    if not changes:
        raise ConfigError("nothing would change: give an option, e.g. --shaping centred_ranks, or --drop stale")
    ranges = sample_ranges(history.config, sample) if sample else ()
    lines, committed, others = [], list[Direction](), list[Direction]()
    for commit in history.commits.values():
        cohort = _whole_cohort(history, commit)
        kept = drop.kept(cohort, commit.version) if drop else cohort
        other = method.commit(commit.version, kept, history.centres) if len(kept) > 1 else None
        committed.append(direction(commit))
        others.append(direction(other))
        body = commit.seeds
        exact = exact_cosine(committed[-1], others[-1], body.num_subspaces, ranges, body.rank) if ranges else None
        lines.append(_line(commit, kept, committed[-1], others[-1], exact))
    whole, other_whole = (_sum(itertools.chain(*(d.items() for d in part))) for part in (committed, others))
    return Counterfactual(tuple(lines), changes, cosine(whole, other_whole), norm_ratio(whole, other_whole))


def changed_config(run: Path, config: Config, overrides: Sequence[str]) -> Config:
    """The run's configuration with the overrides. Errors: ConfigError for a key that the log cannot answer."""
    changed = load(RunPaths(run).config, overrides).config
    answerable = methods.find(config.method).answerable
    if not answerable:
        raise ConfigError(f"method={config.method} has updates that cannot be computed again from the log alone")
    for key in (text.partition("=")[0].strip() for text in overrides):
        if not any(key == known or key.startswith(f"{known}.") for known in answerable):
            raise ConfigError(
                f"{key} cannot be changed without new rollouts; the log answers for {', '.join(answerable)}: "
                "`hpc-es fork` begins another run"
            )
    return config.model_copy(update={"es": changed.es})


def _whole_cohort(history: AuditedHistory, commit: Commit) -> Cohort:
    """The evaluations that a commit consumed, with their results. Errors: VerifyError when the journal lacks one."""
    cohort = cohort_of(history, commit)
    if len(cohort) < len(commit.consumed):
        there = {result.eval_id for _, result in cohort}
        missing = next(each.eval_id for each in commit.consumed if each.eval_id not in there)
        raise VerifyError(f"update {commit.version}: evaluation {missing} is not in the journal")
    return cohort


def _line(commit: Commit, kept: Cohort, a: Direction, b: Direction, exact: float | None) -> Line:
    lags = commit.lags
    return Line(
        update=commit.version,
        num_members=len(commit.consumed),
        num_kept=len(kept),
        cosine=cosine(a, b),
        norm_ratio=norm_ratio(a, b),
        lag_mean=sum(lags) / len(lags),
        exact_cosine=exact,
    )


def _changes(before: Config, after: Config, drop: Drop | None) -> Iterator[str]:
    harmful, _ = compare(before, after)
    yield from map(str, harmful)
    if drop is not None:
        yield f"drop: none -> {drop.kind}:{drop.amount:g}"


# --- directions -------------------------------------------------------------------------------------------------


def direction(commit: Commit | None) -> Direction:
    """The coefficients of an update by the noise that they multiply; empty for a null one."""
    if commit is None or commit.null:
        return {}
    parted = commit.seeds.num_subspaces > 1
    terms = commit.seeds.terms
    return _sum(((t.seed, t.subspace, t.partition_seed if parted else 0), t.coefficient) for t in terms)


def cosine(a: Direction, b: Direction) -> float | None:
    """None when one of them is zero."""
    norms = math.sqrt(_dot(a, a)) * math.sqrt(_dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / norms)) if norms > 0 else None


def norm_ratio(a: Direction, b: Direction) -> float | None:
    """|b| / |a|; None when a is zero."""
    below = _dot(a, a)
    return math.sqrt(_dot(b, b) / below) if below > 0 else None


def sample_ranges(config: Config, num_elements: int) -> tuple[Range, ...]:
    """Places in the trained tensors of the base model, by size, with a fixed seed. Errors: ModelError."""
    import numpy as np

    from hpc_es.noise import BLOCK
    from hpc_es.params.layout import lay_out

    settings = config.model
    slots = [s for s in lay_out(settings.path, settings.include, settings.exclude) if s.trained]
    if config.es.rank:
        slots = [slot for slot in slots if slot.matrix]
    sizes = np.array([slot.stored.size for slot in slots], float)
    generator, length = np.random.default_rng(0), -(-num_elements // _EXACT_RANGES)
    ranges = []
    for place in generator.choice(len(slots), _EXACT_RANGES, p=sizes / sizes.sum()):
        tensor = slots[place].stored
        start = int(generator.integers(0, max(1, tensor.size - length + 1))) // BLOCK * BLOCK
        ranges.append(Range(tensor.name, start, min(length, tensor.size), slots[place].matrix))
    return tuple(ranges)


def exact_cosine(
    a: Direction, b: Direction, num_subspaces: int, ranges: Sequence[Range], rank: int = 0
) -> float | None:
    """The cosine of two updates on a sample of elements, from the noise itself; None when one of them is zero."""
    import numpy as np

    products = np.zeros(3)
    for place in ranges:
        x, y = (_values(d, num_subspaces, place, rank) for d in (a, b))
        products += [x @ y, x @ x, y @ y]
    norms = math.sqrt(products[1]) * math.sqrt(products[2])
    return float(products[0] / norms) if norms > 0 else None


def _values(d: Direction, num_subspaces: int, place: Range, rank: int) -> "Array":
    """sum(c * T), or sum(c * P), over a range of elements, float64 [count]."""
    import numpy as np

    from hpc_es.noise import Perturbation, kernels, tensor_id

    name, start, count, matrix = place
    total, zeros, values = np.zeros(count), np.zeros(count, np.float32), np.empty(count, np.float32)
    for (seed, subspace, partition_seed), coefficient in d.items():
        noisy = Perturbation(seed, 1.0, subspace, num_subspaces, partition_seed, rank)
        kernels().perturb(zeros, values, tensor_id(name), noisy, start=start, matrix=matrix)
        total += coefficient * values.astype(float)
    return total


def _dot(a: Direction, b: Direction) -> float:
    return math.fsum(value * b[key] for key, value in a.items() if key in b)


def _sum(parts: Iterable[tuple[Noise, float]]) -> Direction:
    total: dict[Noise, float] = {}
    for key, value in parts:
        total[key] = total.get(key, 0.0) + value
    return total


# --- what a drop looks at ---------------------------------------------------------------------------------------


def _seconds(result: Result) -> float:
    return result.seconds_update + result.seconds_perturb + result.seconds_rollout


def _tokens(result: Result) -> float:
    return sum(episode.tokens_in + episode.tokens_out for episode in result.episodes)


def _die(result: Result) -> float:
    eval_id = result.eval_id
    return derive(0, "drop", eval_id.version, eval_id.slot, eval_id.replacement)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
