"""The plain data of a run: what is dispatched, what comes back, what an update is.

These structs travel on the wire and stand in the journal, so they hold no behaviour. Encoded by msgspec as
msgpack; fields are only ever added at the end, with a default. Words as in the design's table. None of them can be part
of a reference cycle, so the garbage collector need not look at them (gc=False). What a worker may say in them is stated
in the types (see hpc_es.bounds), and is what the columns of run.h5 can hold.
"""

import hashlib
import math
from typing import Annotated, Literal, get_args

from msgspec import Struct

from hpc_es.bounds import Between, Hexadecimal, OneOf, Text, Verbatim
from hpc_es.errors import VerifyError

MAX_PROPOSAL = 10_000
"""Most characters of a proposed context."""
MAX_REWARD = 1e100
"""The largest reward, either way: the squares of a cohort's fitness must stay finite."""

Count = Annotated[int, Between(0, 2**31 - 1)]
Version = Annotated[int, Between(0, 2**53)]
Digest = Annotated[int, Between(0, 2**64 - 1)]
Seconds = Annotated[float, Between(0.0, 1e9)]
"""Any duration that a worker measured; the head checks a tighter bound, since it knows the age of the run."""
Reward = Annotated[float, Between(-MAX_REWARD, MAX_REWARD)]

Purpose = Literal["train", "centre", "eval", "propose"]
"""Why an evaluation is made: "train", a candidate for an update; "centre", the unperturbed policy on the batch that the
candidates of its version play; "eval", the unperturbed policy on the evaluation tasks; "propose", a new context."""


FIRST_PROPOSAL, FIRST_CENTRE = -(2**30), -(2**31)
"""Slots in tables, see EvalId.table_slot."""


class EvalId(Struct, frozen=True, gc=False, array_like=True, order=True):
    """Names one evaluation for good: version at dispatch, slot in the plan of its purpose, replacement count, purpose.

    Slots count from 0 for every purpose: members of a version, or batches of evaluation tasks.
    """

    version: Version
    slot: Count
    replacement: Count = 0
    purpose: Annotated[str, OneOf(get_args(Purpose))] = "train"

    def __str__(self) -> str:
        slot = str(self.slot) if self.purpose == "train" else f"{self.purpose}{self.slot}"
        return f"{self.version}.{slot}" + (f"r{self.replacement}" if self.replacement else "")

    @property
    def table_slot(self) -> int:
        """The number that stands for slot and purpose in the tables of run.h5, unique within a version: from 0 for
        "train", from -1 downwards for "eval", from -2^30 downwards for "propose", -2^31 for "centre"."""
        first = {"eval": -1, "propose": FIRST_PROPOSAL, "centre": FIRST_CENTRE}.get(self.purpose)
        return self.slot if first is None else first - self.slot

    @property
    def next_replacement(self) -> "EvalId":
        """The id of the evaluation that replaces this one if it is void."""
        return EvalId(self.version, self.slot, self.replacement + 1, self.purpose)


def from_first_release(eval_id: EvalId) -> EvalId:
    """The id that a record of the first release names: there, slots below 0 told the purpose (see table_slot)."""
    version, slot, replacement = eval_id.version, eval_id.slot, eval_id.replacement
    if slot >= 0:
        return eval_id
    if slot == FIRST_CENTRE:
        return EvalId(version, 0, replacement, "centre")
    return EvalId(version, -1 - slot, replacement, "eval")


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


class Candidate(Struct, frozen=True, gc=False):
    """What an evaluation scores: theta_version, a perturbation of it or none, and a context or none."""

    version: Version
    member: Member | None = None
    """None: the unperturbed theta_version."""
    context: str = ""
    """Id of the context that the policy sees beside its task (see Context); empty: none."""


class Context(Struct, frozen=True, gc=False):
    """A text that the policy sees: a system prompt, a skill, a parent heuristic with its instruction."""

    id: str
    """Hash of the text (see context_id)."""
    text: str
    parents: tuple[str, ...] = ()
    """Ids of the contexts that it was made from."""
    operator: str = ""
    """How it was made from them; empty for one that the run began with."""
    proposed_by: EvalId | None = None
    score: float = math.nan
    """Fitness of the evaluation that proposed it."""


def context_id(text: str) -> str:
    """Id of a context: the first 128 bits of the BLAKE2b hash of its text, in hexadecimal."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Assignment(Struct, frozen=True, gc=False):
    """One evaluation to be made: a candidate on one batch of tasks."""

    eval_id: EvalId
    update: int
    """The update that this evaluation is meant for; 0 for evaluations of the unperturbed policy."""
    candidate: Candidate
    tasks: tuple[int, ...]
    """Task indices within the training or evaluation environment."""
    sampling_seed: int
    """Seeds of the episodes derive from this and the task's position."""

    @property
    def version(self) -> int:
        return self.eval_id.version

    @property
    def purpose(self) -> Purpose:
        return self.eval_id.purpose  # type: ignore[return-value]

    @property
    def member(self) -> Member | None:
        return self.candidate.member


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
    text: Annotated[str, Verbatim(MAX_PROPOSAL)] = ""
    """The context that an evaluation with purpose "propose" wrote."""
    trace: Annotated[str, Hexadecimal(32)] = ""
    """Hash of the file with the sampled tokens (see traces.py); empty: none was written."""


class Consumed(Struct, frozen=True, gc=False, array_like=True):
    """One evaluation that a commit consumes."""

    eval_id: EvalId
    fitness: float


class Term(Struct, frozen=True, gc=False, array_like=True):
    """One term of an update by seeds: the perturbation of one consumed evaluation and its coefficient."""

    seed: int
    sign: int
    sigma: float
    subspace: int
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


class Seeds(Struct, frozen=True, gc=False, tag="seeds"):
    """Body of a commit: theta_version follows from theta_{version-1}, and from these numbers alone."""

    alpha: float
    terms: tuple[Term, ...]
    """One per consumed evaluation, in the same order."""
    num_subspaces: int = 1
    partition_seed: int = 0
    """Seed of the partition for this update; stale members may carry that of another (see Term)."""
    step: OptimiserStep | None = None
    """With an optimiser, alpha is in here, and not in the coefficients."""


class Weights(Struct, frozen=True, gc=False, tag="weights"):
    """Body of a commit: theta_version is what a trainer wrote, in the checkpoint of that version."""

    digest: int
    """Digest of theta_version."""
    update_norm: float
    """Euclidean norm of theta_version - theta_{version-1}."""
    metrics: dict[str, float] = {}
    """What the trainer measured: loss, KL divergence, gradient norm, ... by name."""


class PoolChange(Struct, frozen=True, gc=False):
    """How a commit changes the pool of contexts."""

    added: tuple[str, ...] = ()
    """Ids of contexts."""
    removed: tuple[str, ...] = ()


class Commit(Struct, frozen=True, gc=False):
    """Update `version` turns theta_{version-1} into theta_version.

    The header names what was consumed, sorted by (dispatch version, slot); the body says how theta changes. A null
    commit leaves theta and the optimiser's state untouched.
    """

    version: int
    consumed: tuple[Consumed, ...]
    body: Seeds | Weights
    null: bool = False
    pool: PoolChange | None = None

    @property
    def lags(self) -> tuple[int, ...]:
        """Lag of every consumed evaluation: versions between its dispatch and theta_{version-1}."""
        return tuple([self.version - 1 - each.eval_id.version for each in self.consumed])

    @property
    def seeds(self) -> Seeds:
        """The body of an update by seeds. Errors: VerifyError when the body is weights."""
        if isinstance(self.body, Seeds):
            return self.body
        raise VerifyError(f"update {self.version} is weights of a trainer: it cannot be computed from seeds")
