"""The plain data of evolution strategies: what is dispatched, what comes back, what an update is.

These structs travel on the wire and stand in the journal, so they hold no behaviour. Encoded by msgspec as
msgpack; fields are only ever added at the end, with a default. Words as in the design's table. None of them can be part
of a reference cycle, so the garbage collector need not look at them (gc=False). What a worker may say in them is stated
in the types (see hpc_es.bounds), and is what the columns of run.h5 can hold.
"""

from typing import Annotated, Literal

from msgspec import Struct

from hpc_es.bounds import Between, OneOf, Text

MAX_REWARD = 1e100
"""The largest reward, either way: the squares of a cohort's fitness must stay finite."""

Count = Annotated[int, Between(0, 2**31 - 1)]
Version = Annotated[int, Between(0, 2**53)]
Digest = Annotated[int, Between(0, 2**64 - 1)]
Seconds = Annotated[float, Between(0.0, 1e9)]
"""Any duration that a worker measured; the head checks a tighter bound, since it knows the age of the run."""
Reward = Annotated[float, Between(-MAX_REWARD, MAX_REWARD)]

Kind = Literal["train", "eval", "centre"]
"""A member for an update; the unperturbed centre on the evaluation tasks, or on the batch that the members play."""

CENTRE_SLOT = -(2**31)
"""Slot of the unperturbed centre on the training batch of its version."""


class EvalId(Struct, frozen=True, gc=False, array_like=True, order=True):
    """Names one evaluation for good: the version at dispatch, the slot in the plan, the replacement count.

    Slots from 0 are members; evaluation batches of the unperturbed centre are -1, -2, ..., CENTRE_SLOT is the
    centre on the members' own batch.
    """

    version: Version
    slot: Annotated[int, Between(CENTRE_SLOT, 2**31 - 1)]
    replacement: Count = 0

    def __str__(self) -> str:
        slot = "centre" if self.slot == CENTRE_SLOT else self.slot
        return f"{self.version}.{slot}" + (f"r{self.replacement}" if self.replacement else "")


class Member(Struct, frozen=True, gc=False):
    """One perturbation around a policy version: w = cast(theta + sigma * sign * eps(seed)) (design, section 4)."""

    seed: int
    """64-bit member seed."""
    sign: int
    """+1, or -1 for the second half of a mirrored pair."""
    sigma: float
    """Standard deviation of the noise, already scaled for the subspace."""
    subspace: int = 0
    num_subspaces: int = 1
    partition_seed: int = 0
    """64-bit seed of the partition into subspaces; unused when num_subspaces is 1."""


class Assignment(Struct, frozen=True, gc=False):
    """One evaluation to be made: a member (None: the unperturbed centre) on one task batch."""

    eval_id: EvalId
    update: int
    """The update that this evaluation is meant for; 0 for evaluations of the centre."""
    kind: Kind
    member: Member | None
    tasks: tuple[int, ...]
    """Task indices within the training or evaluation environment."""
    sampling_seed: int
    """Seeds of the episodes derive from this and the task's position; equal for all members of a version."""

    @property
    def version(self) -> int:
        return self.eval_id.version


class Episode(Struct, frozen=True, gc=False):
    """One task played to its end under one member."""

    task: Annotated[int, Between(0, 2**53)]
    reward: Reward
    success: bool
    turns: Count
    invalid_actions: Count
    tokens_in: Count
    tokens_out: Count
    seconds_generating: Seconds
    seconds_in_env: Seconds
    ended: Annotated[str, OneOf(("terminated", "truncated", "context", "time"))]
    """Why it ended: "terminated", "truncated", "context" (the prompt left no room for an answer) or "time"."""
    retries: Count = 0


class Result(Struct, frozen=True, gc=False):
    """What came of an assignment. Either `error` is None and `fitness` is finite, or the evaluation is void."""

    eval_id: EvalId
    fitness: float
    """Mean episode reward (see results.py); higher is better, always. NaN when `error` is set."""
    episodes: tuple[Episode, ...]
    digest: Digest
    """Digest of theta at `eval_id.version` in the arena that was perturbed."""
    seconds_update: Seconds
    """Bringing the arena to the version."""
    seconds_perturb: Seconds
    seconds_rollout: Seconds
    error: Annotated[str, Text()] | None = None


class UpdateMember(Struct, frozen=True, gc=False, array_like=True):
    """One accepted evaluation inside a commit."""

    eval_id: EvalId
    seed: int
    sign: int
    sigma: float
    subspace: int
    fitness: float
    utility: float
    coefficient: float
    """The fp32 c_i that multiplies the table value T_i; exact in float64."""
    partition_seed: int = 0
    """Seed of the partition that its subspace belongs to; unused when the commit has one subspace."""


class OptimiserStep(Struct, frozen=True, gc=False, array_like=True):
    """Scalars of one step on the ES gradient g, as fp32 values exact in float64 (see methods/es/optimiser.py)."""

    kind: Literal["momentum", "adam"]
    rate: float
    """theta += rate * m (momentum), or rate * m / (sqrt(v) + epsilon) (adam)."""
    decay_m: float
    gain_m: float
    """m = decay_m * m + gain_m * g."""
    decay_v: float = 0.0
    gain_v: float = 0.0
    """v = decay_v * v + gain_v * g^2 (adam)."""
    epsilon: float = 0.0


class Commit(Struct, frozen=True, gc=False):
    """Update `version` turns theta_{version-1} into theta_version. These records are the model.

    Members are sorted by (dispatch version, slot). A null commit leaves theta and the optimiser's state untouched.
    """

    version: int
    alpha: float
    members: tuple[UpdateMember, ...]
    null: bool = False
    num_subspaces: int = 1
    partition_seed: int = 0
    """Seed of the partition for this update; stale members may carry that of another (see UpdateMember)."""
    step: OptimiserStep | None = None
    """With an optimiser, alpha is in here, and not in the coefficients."""
