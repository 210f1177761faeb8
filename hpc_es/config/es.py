"""The settings of evolution strategies: population, shaping, schedules, and how stale a result may be.

Defaults are those of ES at Scale (Qiu et al., 2025); whatever goes beyond it is off.
"""

import itertools
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hpc_es.config.fields import Model


class Schedule(Model):
    """A value over the updates. A bare number in YAML means constant."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    """How the value goes from `start` to `end`."""
    start: float = Field(ge=0, le=1e6)
    """Value at the first update. Bounded, so that no coefficient leaves the range of float32."""
    end: float | None = Field(None, ge=0, le=1e6)
    """Value at the last update, exactly; for cosine and linear."""

    @model_validator(mode="before")
    @classmethod
    def _number_means_constant(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"kind": "constant", "start": value}
        if not isinstance(value, (dict, Schedule)):
            raise ValueError("must be a number, or a section with kind, start and end")
        return value

    @model_validator(mode="after")
    def _ends(self) -> "Schedule":
        if self.kind == "constant" and self.end is not None and self.end != self.start:
            raise ValueError("a constant schedule has no `end`; use kind: cosine or kind: linear")
        if self.kind != "constant" and self.end is None:
            raise ValueError(f"a {self.kind} schedule needs `end`, the value at the last update")
        if self.start == 0:
            raise ValueError("`start` must be above 0 (a schedule may end at 0, it cannot start there)")
        return self


class LagWeightConfig(Model):
    """Factor of a member's coefficient by its lag; not normalised, so a stale cohort makes a smaller step."""

    kind: Literal["none", "inverse", "exponential"] = "none"
    """inverse: (1 + lag)^-rate (staleness-aware SGD; Zhang et al., 2016). exponential: exp(-rate * lag)."""
    rate: float = Field(1.0, gt=0, le=100)
    """Rate of the decay over lag."""


class OptimiserConfig(Model):
    """What turns the ES gradient g = sum(w_i * u_i * eps_i) into a step. Its state is part of theta's digest."""

    kind: Literal["none", "momentum", "adam"] = "none"
    """none: theta += alpha * g."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of g (momentum, adam)."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of g^2 (adam)."""
    epsilon: float = Field(1e-8, ge=1e-12, le=1)
    """Added to the root of the mean of g^2 (adam). Bounded, so that it is not zero in float32."""


class EsConfig(Model):
    """theta += alpha / N * sum(u_i * eps_i), not divided by sigma (Qiu et al., 2025)."""

    population: int = Field(30, gt=1, le=10**6)
    """Number of members per update, N."""
    sigma: Schedule = Schedule(start=1e-3)
    """Standard deviation of a perturbation, in units of the parameters."""
    alpha: Schedule = Schedule(start=5e-4)
    """Step size."""
    subspaces: int = Field(1, ge=1, le=64)
    """K disjoint random parts of all parameters, drawn again for every update; each member perturbs one part, with
    sqrt(K) * sigma (CoPES; Wang et al., 2026). 1: every member perturbs everything."""
    rank: int = Field(0, ge=0, le=16)
    """Rank r of the noise of matrices, A B^T / sqrt(r) (EGGROLL; Sarkar et al., 2025); other tensors, such as norms and
    biases, then stay as they are. 0: full rank, and all tensors."""
    mirrored: bool = False
    """Whether members come in +/- pairs that share their noise."""
    shaping: Literal["zscore", "centred_ranks"] = "zscore"
    """How fitness becomes utilities: standard deviations from the cohort's mean, or ranks from -0.5 to 0.5."""
    baseline: Literal["none", "batch", "centre"] = "none"
    """Subtracted from the fitness before shaping, for each task batch (one per dispatch version): the mean of the
    batch's members in the cohort, or the fitness of the unperturbed centre, which costs one evaluation per version."""
    lag_weight: LagWeightConfig = LagWeightConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    control: Literal["none", "random-walk"] = "none"
    """random-walk: a control experiment in which seeded random numbers replace the utilities, so that updates carry no
    information."""
    tasks_per_member: int = Field(16, ge=1, le=10**6)
    """Episodes T that one evaluation plays; the same tasks for all members of a version."""

    @model_validator(mode="after")
    def _full_rank_in_subspaces(self) -> "EsConfig":
        if self.rank and self.subspaces > 1:
            raise ValueError(
                f"es.rank={self.rank} cannot be combined with es.subspaces={self.subspaces}: subspaces part single "
                "elements, and low-rank noise has none of its own; set es.rank=0, or es.subspaces=1"
            )
        return self

    @model_validator(mode="after")
    def _equal_shares(self) -> "EsConfig":
        if self.mirrored and self.population % 2:
            raise ValueError(
                f"es.population={self.population} must be even when es.mirrored is on: members come in +/- pairs"
            )
        if self.population % (self.subspaces * (2 if self.mirrored else 1)):
            whole, each = ("pairs", 2 * self.subspaces) if self.mirrored else ("members", self.subspaces)
            raise ValueError(
                f"es.population={self.population} must be a multiple of {each}, so that each of es.subspaces="
                f"{self.subspaces} gets equally many {whole}"
            )
        return self


class Sync(Model):
    """Every update consumes N fresh evaluations; workers wait at a barrier."""

    mode: Literal["sync"] = "sync"


class Natural(Model):
    """Commit as soon as N results have a lag within the bound, without a barrier."""

    mode: Literal["natural"]
    max_lag: int = Field(1, ge=0)
    """Largest lag in versions, counted at the commit."""
    overdue: Literal["discard", "hold"] = "discard"
    """What happens to a result beyond the bound. discard: it is dropped. hold: a commit waits while it would make a
    running evaluation exceed the bound."""


class Controlled(Model):
    """Every cohort has a share of results of exactly one lag; the rest is fresh."""

    mode: Literal["controlled"]
    lag: int = Field(ge=1)
    """Lag L in versions: dispatched at v, consumed by update v + L + 1."""
    share: float = Field(gt=0, le=1)
    """Share f: floor(f * N + 0.5) results of each cohort have lag L."""


class Tail(Model):
    """Every cohort has given numbers of results of each lag."""

    mode: Literal["tail"]
    counts: dict[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    """Number of results per cohort by lag; they sum to es.population."""


class Staircase(Model):
    """The lag of whole cohorts climbs, so that each step begins with a cohort measured around theta_0 again."""

    mode: Literal["staircase"]
    steps: tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]], ...] = (
        (1, 0),
        (33, 32),
        (65, 64),
        (129, 128),
    )
    """Pairs (first update, lag), increasing in both."""
    isolated: bool = False
    """Whether only the update at which a step begins is stale, and those between are fresh."""

    @model_validator(mode="after")
    def _climbs(self) -> "Staircase":
        updates = [update for update, _ in self.steps]
        if not updates or updates[0] != 1 or any(b <= a for a, b in itertools.pairwise(updates)):
            raise ValueError(f"steps begin at updates {updates}: the first must begin at 1, and each after the last")
        for update, lag in self.steps:
            if lag > update - 1:
                raise ValueError(
                    f"the step [{update}, {lag}] needs version {update - 1 - lag}: the lag of update {update} can be "
                    f"at most {update - 1}"
                )
        return self


StalenessConfig = Annotated[Sync | Natural | Controlled | Tail | Staircase, Field(discriminator="mode")]
"""Which evaluations an update consumes (bounded-staleness asynchronous ES; Hoy et al., 2026)."""
