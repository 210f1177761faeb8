"""The tables of run.h5 as data: every column with its type, unit and meaning.

One HDF5 group per table, one dataset per column, one row per thing. `null` is how an integer that is not known is
stored; `read` turns it into pandas' <NA>. Unknown numbers are NaN, unknown strings empty.
"""

import math
from dataclasses import dataclass
from typing import Literal

SCHEMA_VERSION = 1
"""Schema version of run.h5; read.py refuses newer ones."""

EPOCH = "s since 1970-01-01 UTC"

Dtype = Literal["int32", "int64", "uint64", "float64", "bool", "str", "choice"]


@dataclass(frozen=True)
class Column:
    name: str
    dtype: Dtype
    unit: str
    """Empty: a plain number, name or text."""
    meaning: str
    null: int | None = None
    """Stored where an integer is unknown; None: it is always known."""
    choices: tuple[str, ...] = ()
    """The words of a "choice", stored as an HDF5 enumeration."""
    is_new: bool = False
    """Files of an older hpc_es lack it, and read as its fill."""

    @property
    def fill(self) -> float | str:
        """What stands in a new row until something is known."""
        if self.dtype in ("str", "choice"):
            return self.choices[0] if self.choices else ""
        if self.dtype == "float64":
            return math.nan
        return 0 if self.null is None else self.null


NULL = -1
NULL_64 = 2**64 - 1

KINDS = ("train", "eval", "centre", "propose")
STATUSES = ("planned", "leased", "reported", "accepted", "void", "discarded")


def _identity() -> tuple[Column, ...]:
    """Which evaluation a row belongs to."""
    return (
        Column("source", "str", "", '"run", or the name of the later evaluation (evals/NAME.hpcj)'),
        Column("dispatch_version", "int64", "versions", "policy version v around which it was measured"),
        Column(
            "slot",
            "int32",
            "",
            "from 0: members; -1, -2, ...: evaluation batches; -2^30, ...: proposals; -2^31: the centre on their batch",
        ),
        Column("replacement", "int32", "", "how many void evaluations it replaces"),
        Column(
            "kind",
            "choice",
            "",
            "train: a member for an update; eval: the centre on evaluation tasks; centre: the same on members' tasks",
            choices=KINDS,
        ),
    )


EVALUATIONS = (
    *_identity(),
    Column(
        "status",
        "choice",
        "",
        "planned, leased (a worker has it), reported (journalled), accepted (consumed by an update, or an evaluation "
        "of the centre that counts), void (a fault: never counts), discarded (a good result beyond the bound on lag)",
        choices=STATUSES,
    ),
    Column("consumed_version", "int64", "versions", "u-1 for the update u that consumed it; null: none did", NULL),
    Column("lag", "int64", "versions", "of the update that consumed or refused it; null: neither happened", NULL),
    Column(
        "planned_update", "int64", "versions", "the update u it was planned for; null: evaluation of the centre", NULL
    ),
    Column("context", "str", "", "id of the context that the policy saw (table contexts); empty: none", is_new=True),
    Column("seed", "uint64", "", "64-bit member seed; null: the centre", NULL_64),
    Column("sign", "int32", "", "+1, or -1 for the second half of a mirrored pair; 0: the centre"),
    Column("sigma", "float64", "parameter units", "standard deviation of the noise; NaN: the centre"),
    Column("subspace", "int32", "", "subspace of the perturbation; null: the centre", NULL),
    Column("sampling_seed", "uint64", "", "seeds of the episodes derive from it"),
    Column("num_tasks", "int32", "episodes", "size of the task batch"),
    Column("fitness", "float64", "reward", "mean episode reward; higher is better"),
    Column("utility", "float64", "", "shaped fitness u_i that the update used"),
    Column("coefficient", "float64", "parameter units", "fp32 c_i that multiplied the table value T"),
    Column("turns", "int64", "turns", "over all episodes", NULL),
    Column("tokens_in", "int64", "tokens", "prompt tokens over all episodes", NULL),
    Column("tokens_out", "int64", "tokens", "generated tokens over all episodes", NULL),
    Column("time_planned", "float64", EPOCH, "when the head planned it"),
    Column("time_leased", "float64", EPOCH, "when it was last given to a worker"),
    Column("time_started", "float64", EPOCH, "when the worker began, on the head's clock"),
    Column("time_finished", "float64", EPOCH, "when the worker was done, on the head's clock"),
    Column("time_received", "float64", EPOCH, "when the head journalled the result"),
    Column("seconds_update", "float64", "s", "bringing the worker's arena to the version (monotonic clock)"),
    Column("seconds_perturb", "float64", "s", "writing the perturbed parameters (monotonic clock)"),
    Column("seconds_rollout", "float64", "s", "playing the episodes (monotonic clock)"),
    Column("worker", "str", "", "incarnation that last held it, or reported it"),
    Column("host", "str", "", "of the worker"),
    Column("slurm_job", "str", "", "Slurm job id of the worker"),
    Column("array_task", "str", "", "Slurm array task of the worker"),
    Column("attempt", "int32", "", "1: the first lease; 0: never leased"),
    Column("digest", "uint64", "", "digest of the theta that was perturbed; null: no result", NULL_64),
    Column("error", "str", "", "what went wrong, or why it is void"),
    Column("trace", "str", "", "hash that names its file in RUN/traces; empty: none was written", is_new=True),
)

UPDATES = (
    Column("version", "int64", "versions", "update u turned theta_{u-1} into theta_u"),
    Column("alpha", "float64", "parameter units", "step size"),
    Column("sigma", "float64", "parameter units", "mean sigma of the members"),
    Column("num_members", "int32", "evaluations", "size of the cohort"),
    Column("fitness_mean", "float64", "reward", "over the cohort"),
    Column("fitness_std", "float64", "reward", "population standard deviation over the cohort"),
    Column("fitness_min", "float64", "reward", "over the cohort"),
    Column("fitness_max", "float64", "reward", "over the cohort"),
    Column("null", "bool", "", "no spread in fitness: the version advanced, theta did not"),
    Column("lag_mean", "float64", "versions", "mean lag over the cohort"),
    Column("lag_max", "int64", "versions", "largest lag in the cohort"),
    Column("discarded", "int64", "evaluations", "members voided or discarded since the update before"),
    Column("num_subspaces", "int32", "", "1: none"),
    Column("partition_seed", "uint64", "", "seed of the partition into subspaces"),
    Column("update_norm", "float64", "parameter units", "Euclidean norm of theta_u - theta_{u-1}"),
    Column("digest", "uint64", "", "digest of theta_u; null: not yet known", NULL_64),
    Column("time_committed", "float64", EPOCH, "when the commit was journalled"),
    Column("seconds_update", "float64", "s", "the head's pass over the arena (monotonic clock)"),
    Column("rank", "int32", "", "rank of the members' noise; 0: full", is_new=True),
)

EPISODES = (
    *_identity(),
    Column("position", "int32", "", "place in the task batch, from 0"),
    Column("task", "int64", "", "task index within the environment"),
    Column("reward", "float64", "reward", "of the episode"),
    Column("success", "bool", "", "as the task defines it"),
    Column("turns", "int32", "turns", "answers of the policy"),
    Column("invalid_actions", "int32", "turns", "answers that the environment refused"),
    Column("tokens_in", "int64", "tokens", "prompt tokens"),
    Column("tokens_out", "int64", "tokens", "generated tokens"),
    Column("seconds_generating", "float64", "s", "waiting for the engine (monotonic clock)"),
    Column("seconds_in_env", "float64", "s", "in reset and step (monotonic clock)"),
    Column(
        "ended", "str", "", 'why: "terminated", "truncated" (both by the task), "context" or "time" (limits of the run)'
    ),
    Column("retries", "int32", "", "faults of the machinery before it went through"),
)

EVALS = (
    Column("source", "str", "", '"run", or the name of the later evaluation (evals/NAME.hpcj)'),
    Column("version", "int64", "versions", "policy version that was evaluated, unperturbed"),
    Column("num_tasks", "int64", "tasks", "however often each was played; 0: a batch was voided and is being replaced"),
    Column("reward_mean", "float64", "reward", "over the tasks, of each the mean over its repeats"),
    Column("standard_error", "float64", "reward", "of reward_mean: sample standard deviation / sqrt(num_tasks)"),
    Column("success_rate", "float64", "share", "successful tasks / num_tasks; with repeats the mean share per task"),
    Column("time", "float64", EPOCH, "when the last batch came in"),
    Column("num_repeats", "int32", "", "how often each task was played; null: not known", NULL, is_new=True),
    Column("protocol", "str", "", "by what it was measured: environment, options and decoding", is_new=True),
    Column(
        "protocol_digest",
        "uint64",
        "",
        "of all that an episode may see of configuration and tasks; null: not known",
        NULL_64,
        is_new=True,
    ),
    Column(
        "other_protocol",
        "bool",
        "",
        "other tasks or decoding than the run's own: does not compare with what the run measured",
        is_new=True,
    ),
)

WORKERS = (
    Column("worker", "str", "", "incarnation: seat, restart count, random id"),
    Column("seat", "str", "", "place that one incarnation after the other takes"),
    Column("host", "str", "", "where it runs"),
    Column("pid", "int64", "", "process id there"),
    Column("slurm_job", "str", "", "Slurm job id"),
    Column("array_task", "str", "", "Slurm array task"),
    Column("facts", "str", "", "versions, device and whatever else it said of itself, JSON"),
    Column("time_joined", "float64", EPOCH, "first Hello"),
    Column("time_left", "float64", EPOCH, "when it was last known to leave; NaN: it is connected"),
    Column("left", "str", "", "why it left"),
    Column("seconds_connected", "float64", "s", "from its first Hello to the last word about it, heads or no heads"),
    Column("seconds_busy", "float64", "s", "updating, perturbing and rolling out, in all results it reported"),
    Column("seconds_useful", "float64", "s", "the same, in accepted evaluations only"),
    Column("num_results", "int64", "evaluations", "reported"),
    Column("num_accepted", "int64", "evaluations", "accepted"),
    Column("num_errors", "int64", "evaluations", "reported with an error"),
)

EVENTS = (
    Column("time", "float64", EPOCH, "when the head wrote it down"),
    Column("level", "str", "", "info, warning or error"),
    Column("what", "str", "", "in a few words"),
    Column("detail", "str", "", "more of it"),
)

CONTEXTS = (
    Column("context", "str", "", "id: the hash of the text", is_new=True),
    Column("text", "str", "", "what the policy sees", is_new=True),
    Column("parents", "str", "", "ids of the contexts that it was made from, JSON", is_new=True),
    Column("operator", "str", "", "how it was made from them", is_new=True),
    Column("dispatch_version", "int64", "versions", "of the evaluation that proposed it", NULL, is_new=True),
    Column("slot", "int32", "", "of the evaluation that proposed it", is_new=True),
    Column("replacement", "int32", "", "of the evaluation that proposed it", is_new=True),
    Column("score", "float64", "reward", "fitness of the evaluation that proposed it", is_new=True),
    Column("added", "int64", "versions", "update that took it into the pool; null: none did", NULL, is_new=True),
    Column("removed", "int64", "versions", "update that removed it from the pool; null: none did", NULL, is_new=True),
    Column("time", "float64", EPOCH, "when it was recorded", is_new=True),
)
"""Texts that were proposed, in order; files of the first release lack the whole table."""

TABLES: dict[str, tuple[Column, ...]] = {
    "evaluations": EVALUATIONS,
    "updates": UPDATES,
    "episodes": EPISODES,
    "evals": EVALS,
    "workers": WORKERS,
    "events": EVENTS,
    "contexts": CONTEXTS,
}
