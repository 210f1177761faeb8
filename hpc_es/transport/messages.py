"""The messages between head and workers on the control plane.

Messages are tagged msgspec structs in msgpack, never pickle. An envelope carries the head's generation: workers obey
only the highest one that they have seen, and a head ignores messages for another generation. The types of a worker's
messages state the allowed values; the head's core checks every message with `hpc_es.bounds` before it acts on it.
"""

import struct
import zlib
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from hpc_es.bounds import Facts, Name, Text
from hpc_es.errors import TransportError
from hpc_es.records import (
    Assignment,
    Commit,
    Consumed,
    Count,
    Digest,
    EvalId,
    Result,
    Seconds,
    Seeds,
    Term,
    Version,
)

PROTOCOL = 3


class Message(Struct, frozen=True, tag=True, gc=False):
    """Base of all messages."""


# --- worker (or an observer) -> head ---------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a worker to a head: after its own start, and after every restart of the head."""

    worker: Annotated[str, Name()]
    seat: Annotated[str, Name()]
    host: Annotated[str, Name(0)]
    pid: Count
    base_digest: Digest
    facts: Annotated[dict[str, str], Facts()]
    holding: EvalId | None = None
    """The evaluation that the worker runs, or whose report is not acknowledged yet; a new head leases it again."""
    protocol: Count = PROTOCOL
    collective: Literal["none", "gloo", "nccl"] = "none"
    """Backend of the collective plane that this worker can join."""
    draining: bool = False
    """The worker takes no more work, as after Draining."""
    gpu: Annotated[str, Name(0)] = ""
    """UUID of the GPU that its NCCL groups use."""
    version: Version = 0
    """Version of theta in its arena."""


class Heartbeat(Message, frozen=True):
    """The worker is alive. The head sends it back, to show that its loop is alive."""

    worker: Annotated[str, Name()]


class Report(Message, frozen=True):
    """A result; resent until acknowledged. Ages count back from the time of sending, so clocks need not agree."""

    worker: Annotated[str, Name()]
    result: Result
    started_age: Seconds
    finished_age: Seconds


class HandBack(Message, frozen=True):
    """The worker returns its assignment without a result; this does not count as a failed evaluation."""

    worker: Annotated[str, Name()]
    eval_id: EvalId
    reason: Annotated[str, Text()]
    holding: EvalId | None = None
    """The evaluation that the worker runs instead."""


class Draining(Message, frozen=True):
    """The worker takes no more work: it finishes or returns its current evaluation, sends Goodbye and exits."""

    worker: Annotated[str, Name()]
    reason: Annotated[str, Text()]


class Fetch(Message, frozen=True):
    """Request the commits of versions first..last. The answer has a bounded size, so it may end before the last."""

    worker: Annotated[str, Name()]
    first: Version
    last: Version


class EpochReady(Message, frozen=True):
    """The worker has joined (or failed to join) the process group of an epoch."""

    worker: Annotated[str, Name()]
    epoch: Count
    ok: bool
    detail: Annotated[str, Text()] = ""


class Arrived(Message, frozen=True):
    """The worker has received theta by a transfer; or, without `ok`, it loads a checkpoint and applies the commits."""

    worker: Annotated[str, Name()]
    number: Count
    ok: bool
    detail: Annotated[str, Text()] = ""


class Goodbye(Message, frozen=True):
    """The worker leaves and holds no evaluation."""

    worker: Annotated[str, Name()]
    reason: Annotated[str, Text()]
    died: bool = False
    """Set by the parent process: the worker died unexpectedly, and may have held an evaluation until then."""


class StatusRequest(Message, frozen=True):
    """Request the head's status; allowed for anyone with the workers' key."""


class DrainRequest(Message, frozen=True):
    """Ask the head to drain these workers: no more evaluations, and exit after the current one."""

    who: Annotated[str, Name()]
    """A seat, or the name of one incarnation."""


class StopRequest(Message, frozen=True):
    """Ask the head to stop cleanly: save a checkpoint, tell the workers to exit, and exit."""

    reason: Annotated[str, Text()]


# --- head -> worker (or observer) -----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to Hello. The head is at `version`, to which the worker has to bring its arena."""

    version: int
    config_digest: str


class Unknown(Message, frozen=True):
    """The head does not know this worker, or no longer: the worker must send Hello again."""


class Refused(Message, frozen=True):
    """Answer to a worker that could change the bits of the run, or breaks a rule. The worker exits with this text."""

    reason: str


class Work(Message, frozen=True):
    """An evaluation for the worker to run."""

    assignment: Assignment
    context: str = ""
    """Text of the candidate's context; empty if it has none."""


class Ack(Message, frozen=True):
    """The report needs no resending: its result is on disk, or it was a duplicate or unknown."""

    eval_id: EvalId


class Announce(Message, frozen=True):
    """Version `version` exists. `record` is None if its commit record is broadcast in `epoch`."""

    version: int
    epoch: int
    length: int
    sha256: bytes
    record: bytes | None


class Records(Message, frozen=True):
    """Answer to Fetch: the requested commits from the first on, as many as fit into one message."""

    commits: tuple[Commit, ...]


class OpenEpoch(Message, frozen=True):
    """Join the process group of this epoch."""

    epoch: int
    rank: int
    size: int
    backend: str
    store_host: str
    store_port: int


class OpenTransfer(Message, frozen=True):
    """Join transfer `number`, which sends theta_version from the head's arena in buckets."""

    number: int
    place: int
    """Index of the worker among the invited ones."""
    backend: str
    store_host: str
    store_port: int
    version: int
    digest: int
    num_bytes: int
    bucket_bytes: int


class Rebuild(Message, frozen=True):
    """The worker's digest is wrong: it must rebuild its arena from a checkpoint and the commits."""

    version: int


class Leave(Message, frozen=True):
    """The worker must exit."""

    reason: str
    finished: bool
    """Whether the run is finished; otherwise this worker is removed, or the run was stopped."""
    drained: bool = False
    """The worker was drained on request, so it should not be restarted."""


class WorkerStatus(Struct, frozen=True):
    worker: str
    seat: str
    host: str
    state: str
    """idle, busy, joining, draining or rebuilding."""
    version: int
    busy_share: float
    useful_share: float
    num_results: int
    eval_id: str | None


class SeatStatus(Struct, frozen=True):
    """A worker that is not connected to the head, as recorded in RUN/seats."""

    seat: str
    state: str
    """starting, failed, died, or lost (it was working, and the head no longer receives messages from it)."""
    seconds: float
    """Seconds in this state."""
    detail: str
    """Reason for the state; for "starting", how the previous process in this seat ended."""


class Status(Message, frozen=True):
    """Answer to StatusRequest."""

    run_id: str
    generation: int
    state: str
    version: int
    num_updates: int
    fitness: float | None
    """Mean fitness of the last cohort."""
    eval_fitness: float | None
    eval_version: int | None
    cohort_done: int
    cohort_size: int
    seconds_elapsed: float
    seconds_left: float | None
    tokens_per_second: float | None
    workers: tuple[WorkerStatus, ...]
    events: tuple[str, ...]
    """Latest events, newest last."""
    why_idle: str = ""
    """Why workers are idle, if any are."""
    absent: tuple[SeatStatus, ...] = ()
    """Workers that are not connected. The head does not know them: `hpc-es status` adds them."""


AnyMessage = (
    Hello
    | Heartbeat
    | Report
    | HandBack
    | Draining
    | Fetch
    | EpochReady
    | Arrived
    | Goodbye
    | StatusRequest
    | StopRequest
    | DrainRequest
    | Welcome
    | Unknown
    | Refused
    | Work
    | Ack
    | Announce
    | Records
    | OpenEpoch
    | OpenTransfer
    | Rebuild
    | Leave
    | Status
)


class Envelope(Struct, frozen=True, array_like=True, gc=False):
    generation: int
    """The head's generation as the sender knows it; 0 if it knows none."""
    message: AnyMessage


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(generation: int, message: AnyMessage) -> bytes:
    return _encoder.encode(Envelope(generation, message))


def decode(data: bytes) -> Envelope:
    """Decode an envelope. Errors: TransportError when the bytes are not a message of this protocol."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:  # RecursionError: arrays nested too deeply
        raise TransportError(f"a control message of {len(data)} bytes cannot be read: {error}") from error


class _Packed(Struct, frozen=True, array_like=True, gc=False):
    """A commit in columns, one value per member: runs of equal values compress well."""

    commit: Commit
    """The commit without its members."""
    versions: tuple[int, ...]
    slots: tuple[int, ...]
    replacements: tuple[int, ...]
    signs: tuple[int, ...]
    sigmas: tuple[float, ...]
    subspaces: tuple[int, ...]
    partition_seeds: tuple[int, ...]
    seeds: bytes
    """64-bit unsigned integers, little-endian."""
    coefficients: bytes
    """fp32, little-endian, without loss: coefficients are rounded to fp32."""


_packed_decoder = msgspec.msgpack.Decoder(_Packed)


def encode_commit(commit: Commit) -> bytes:
    """Encode a commit for its broadcast to all workers; the hash of these bytes is announced.

    To be small, it is compressed and has 0 in place of the scores, which take most of a record and which no arena
    needs. Fetch and the journal return commits with their scores.
    """
    ids = [each.eval_id for each in commit.consumed]
    terms = commit.body.terms if isinstance(commit.body, Seeds) else ()
    bare = msgspec.structs.replace(commit.body, terms=()) if terms else commit.body
    packed = _Packed(
        msgspec.structs.replace(commit, consumed=(), body=bare),
        versions=tuple(eval_id.version for eval_id in ids),
        slots=tuple(eval_id.slot for eval_id in ids),
        replacements=tuple(eval_id.replacement for eval_id in ids),
        signs=tuple(term.sign for term in terms),
        sigmas=tuple(term.sigma for term in terms),
        subspaces=tuple(term.subspace for term in terms),
        partition_seeds=tuple(term.partition_seed for term in terms),
        seeds=struct.pack(f"<{len(terms)}Q", *(term.seed for term in terms)),
        coefficients=struct.pack(f"<{len(terms)}f", *(term.coefficient for term in terms)),
    )
    return zlib.compress(_encoder.encode(packed), zlib.Z_BEST_COMPRESSION)


def decode_commit(data: bytes) -> Commit:
    """Decode a commit; its scores are 0 (see encode_commit). Errors: TransportError."""
    try:
        packed = _packed_decoder.decode(zlib.decompress(data))
        num_terms = len(packed.signs)
        seeds = struct.unpack(f"<{num_terms}Q", packed.seeds)
        coefficients = struct.unpack(f"<{num_terms}f", packed.coefficients)
        columns = (seeds, packed.signs, packed.sigmas, packed.subspaces, coefficients, packed.partition_seeds)
        terms = tuple(
            Term(seed, sign, sigma, subspace, 0.0, coefficient, partition_seed)
            for seed, sign, sigma, subspace, coefficient, partition_seed in zip(*columns, strict=True)
        )
        ids = map(EvalId, packed.versions, packed.slots, packed.replacements)
        header = tuple(Consumed(eval_id, 0.0) for eval_id in ids)
    except (zlib.error, msgspec.DecodeError, struct.error, ValueError) as error:
        raise TransportError(f"a commit record of {len(data)} bytes cannot be read: {error}") from error
    body = msgspec.structs.replace(packed.commit.body, terms=terms) if terms else packed.commit.body
    return msgspec.structs.replace(packed.commit, consumed=header, body=body)
