"""The plain data of a run: assignments, results and updates.

These structs are sent between head and workers and stored in the journal, encoded by msgspec as msgpack. Fields are
only ever added at the end, with a default. The design's table of words defines their names. They cannot be part of a
reference cycle, so the garbage collector need not track them (gc=False). The types state the allowed values in messages
of workers (see hpc_es.bounds); they are those that the columns of run.h5 can store.
"""

import hashlib
import math
from typing import Annotated, Literal, get_args

from msgspec import Struct

from hpc_es.bounds import Between, Hexadecimal, OneOf, Text, Verbatim
from hpc_es.errors import VerifyError

MAX_PROPOSAL = 10_000
"""Maximum number of characters of a proposed context."""
MAX_REWARD = 1e100
"""Largest absolute value of a reward: the squares of a cohort's fitness must stay finite."""

Count = Annotated[int, Between(0, 2**31 - 1)]
Version = Annotated[int, Between(0, 2**53)]
Digest = Annotated[int, Between(0, 2**64 - 1)]
Seconds = Annotated[float, Between(0.0, 1e9)]
"""A duration that a worker measured. The head checks a tighter bound, since it knows the age of the run."""
Reward = Annotated[float, Between(-MAX_REWARD, MAX_REWARD)]

Purpose = Literal["train", "centre", "eval", "propose"]
"""Why an evaluation is made: "train", a candidate for an update; "centre", the unperturbed policy on the batch that the
candidates of its version play; "eval", the unperturbed policy on the evaluation tasks; "propose", a new context."""


FIRST_PROPOSAL, FIRST_CENTRE = -(2**30), -(2**31)
"""First slots in tables, see EvalId.table_slot."""


class EvalId(Struct, frozen=True, gc=False, array_like=True, order=True):
    """Permanent id of an evaluation: version at dispatch, slot among those of its purpose, replacement count, purpose.

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
        """The number that encodes slot and purpose in the tables of run.h5, unique within a version: from 0 for
        "train", from -1 downwards for "eval", from -2^30 downwards for "propose", -2^31 for "centre"."""
        first = {"eval": -1, "propose": FIRST_PROPOSAL, "centre": FIRST_CENTRE}.get(self.purpose)
        return self.slot if first is None else first - self.slot

    @property
    def next_replacement(self) -> "EvalId":
        """The id of the evaluation that replaces this one if it is void."""
        return EvalId(self.version, self.slot, self.replacement + 1, self.purpose)


def from_first_release(eval_id: EvalId) -> EvalId:
    """Convert an id in a record of the first release, in which slots below 0 encoded the purpose (see table_slot)."""
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
    rank: int = 0
    """Rank of the noise of matrices, the only tensors that are perturbed then; 0: full rank, and every tensor."""


class Candidate(Struct, frozen=True, gc=False):
    """What an evaluation scores: theta_version, a perturbation of it or none, and a context or none."""

    version: Version
    member: Member | None = None
    """None: the unperturbed theta_version."""
    context: str = ""
    """Id of the context that the policy sees in addition to its task (see Context); empty if there is none."""


class Context(Struct, frozen=True, gc=False):
    """A text that the policy sees: a system prompt, a skill, a parent heuristic with its instruction."""

    id: str
    """Hash of the text (see context_id)."""
    text: str
    parents: tuple[str, ...] = ()
    """Ids of the contexts that it was made from."""
    operator: str = ""
    """How the context was made from its parents; empty for the initial contexts of a run."""
    proposed_by: EvalId | None = None
    """The evaluation that proposed it; None for an initial context."""
    score: float = math.nan
    """Fitness of the evaluation that proposed it."""


def context_id(text: str) -> str:
    """Id of a context: the first 128 bits of the BLAKE2b hash of its text, in hexadecimal."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Assignment(Struct, frozen=True, gc=False):
    """One evaluation to run: a candidate on one batch of tasks."""

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
    """The numbers of one episode: one task, played by one candidate."""

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
    """The result of an assignment. If `error` is None, `fitness` is finite; otherwise the evaluation is void."""

    eval_id: EvalId
    fitness: float
    """Mean episode reward (see results.py); higher is better, always. NaN when `error` is set."""
    episodes: tuple[Episode, ...]
    digest: Digest
    """Digest of theta at `eval_id.version` in the arena that was perturbed."""
    seconds_update: Seconds
    """Time to bring the arena to the version."""
    seconds_perturb: Seconds
    seconds_rollout: Seconds
    error: Annotated[str, Text()] | None = None
    text: Annotated[str, Verbatim(MAX_PROPOSAL)] = ""
    """The context that an evaluation with purpose "propose" proposes."""
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
    """The fp32 c_i that multiplies the table value T_i, or the integer P_i of low rank; exact in float64."""
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
    """Body of a commit: theta_version can be computed from theta_{version-1} and these numbers alone."""

    alpha: float
    terms: tuple[Term, ...]
    """One per consumed evaluation, in the same order."""
    num_subspaces: int = 1
    partition_seed: int = 0
    """Seed of the partition for this update; stale members may have that of another one (see Term)."""
    step: OptimiserStep | None = None
    """The optimiser's step, which then includes alpha; None without an optimiser: coefficients include alpha."""
    rank: int = 0
    """Rank of the noise of every term (see Member)."""


class Weights(Struct, frozen=True, gc=False, tag="weights"):
    """Body of a commit: a trainer made theta_version, which is in the checkpoint of that version."""

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
    """Ids of contexts."""


class Commit(Struct, frozen=True, gc=False):
    """Update `version` turns theta_{version-1} into theta_version.

    The header lists the consumed evaluations, sorted by (dispatch version, slot); the body says how theta changes. A
    null commit leaves theta and the optimiser's state unchanged.
    """

    version: int
    consumed: tuple[Consumed, ...]
    body: Seeds | Weights
    null: bool = False
    pool: PoolChange | None = None

    @property
    def lags(self) -> tuple[int, ...]:
        """Lag of every consumed evaluation: number of versions between its dispatch and theta_{version-1}."""
        return tuple([self.version - 1 - each.eval_id.version for each in self.consumed])

    @property
    def seeds(self) -> Seeds:
        """The body of an update by seeds. Errors: VerifyError when the body is weights."""
        if isinstance(self.body, Seeds):
            return self.body
        raise VerifyError(f"update {self.version} was made by a trainer: it cannot be computed from seeds")
