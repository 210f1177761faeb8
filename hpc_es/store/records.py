"""What a journal consists of: every fact of a run, in the order in which it became true.

The state of the head is a fold over these records and nothing else; so are run.h5 and every answer of
`verify`. Times are seconds since the epoch on the head's clock, durations come from monotonic clocks.
"""

from msgspec import Struct

from hpc_es.records import Assignment, Commit, Context, EvalId, Result

SCHEMA_VERSION = 2
"""Version of the records below; store/first_schema.py reads those of version 1."""


class Record(Struct, frozen=True, tag=True, gc=False):
    """Base of all journal records; `time` is when the head wrote it."""

    time: float


class Started(Record, frozen=True):
    """First record of every segment: one head began, and sealed its predecessor."""

    schema_version: int
    run_id: str
    generation: int
    predecessor_bytes: int
    """How many bytes of the previous segment count; later ones were written by a head that had been replaced."""
    config_json: str
    base_digest: int
    versions: dict[str, str]
    """Versions of software that could change bits or speed; `arena`: whether the head's is pinned, and if not, why."""
    host: str
    predecessor: int = 0
    """Generation of the segment that `predecessor_bytes` is about, filled in by the journal; 0: there is none.
    Segments between the two never began."""
    predecessor_seal: bytes = b""
    """Covers the content of these bytes, filled in by the journal; empty in records of the first release."""


class Planned(Record, frozen=True):
    """What is dispatched at `version`: its plan, or the replacement of a void evaluation."""

    version: int
    assignments: tuple[Assignment, ...]


class Joined(Record, frozen=True):
    worker: str
    """Incarnation: seat, restart count and random id."""
    seat: str
    host: str
    pid: int
    facts: dict[str, str]
    """Versions, device, Slurm job and array task where there are any."""


class Left(Record, frozen=True):
    worker: str
    reason: str


class Dismissed(Record, frozen=True):
    """Someone asked to drain this worker: it gets no more evaluations and exits after its current one."""

    worker: str


class Leased(Record, frozen=True):
    eval_id: EvalId
    worker: str
    attempt: int
    """1 for the first lease of this evaluation."""


class Unleased(Record, frozen=True):
    """A lease ended without a result; no failure of the evaluation."""

    eval_id: EvalId
    worker: str
    reason: str


class Reported(Record, frozen=True):
    """A result is reported once this record is on disk; only then is it acknowledged."""

    worker: str
    result: Result
    started: float
    """Head's clock."""
    finished: float
    attempt: int


class Voided(Record, frozen=True):
    """An evaluation that will never count; its replacement, if any, has replacement + 1."""

    eval_id: EvalId
    reason: str


class Discarded(Record, frozen=True):
    """A good result that came too late: its lag at `update` is above the bound. It will never count."""

    eval_id: EvalId
    update: int


class Closed(Record, frozen=True):
    """A full cohort is handed to the trainer: these evaluations, in this order, make update `update` and no other.

    A head or trainer that ends before the update is committed trains the same cohort again.
    """

    update: int
    evaluations: tuple[EvalId, ...]


class Proposed(Record, frozen=True):
    """A context that an evaluation with purpose "propose" wrote; from here on the pool may take it."""

    context: Context


class Committed(Record, frozen=True):
    commit: Commit


class Digested(Record, frozen=True):
    version: int
    digest: int
    update_norm: float
    """Euclidean norm of theta_v - theta_{v-1}."""
    seconds: float
    """The head's pass over the arena."""


class Checkpointed(Record, frozen=True):
    version: int


class Noted(Record, frozen=True):
    """Something a person may want to know later."""

    level: str
    what: str
    detail: str = ""


class Stopped(Record, frozen=True):
    """The head ended in an orderly way; `finished` when all updates and evaluations are done."""

    reason: str
    finished: bool


AnyRecord = (
    Started
    | Planned
    | Joined
    | Left
    | Dismissed
    | Leased
    | Unleased
    | Reported
    | Voided
    | Discarded
    | Closed
    | Proposed
    | Committed
    | Digested
    | Checkpointed
    | Noted
    | Stopped
)
