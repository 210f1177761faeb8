"""The messages between head and workers on the control plane.

msgspec structs in msgpack, tagged, never pickle. An envelope carries the head's generation g: workers obey only
the highest they have seen, a head ignores messages meant for another one. What a worker may say is stated in the types
of its messages; the head's core asks `hpc_es.bounds` about every one before it acts on it.
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
    """A worker introduces itself, at its start and to every new head. `holding` survives a restart of the head."""

    worker: Annotated[str, Name()]
    seat: Annotated[str, Name()]
    host: Annotated[str, Name(0)]
    pid: Count
    base_digest: Digest
    facts: Annotated[dict[str, str], Facts()]
    holding: EvalId | None = None
    """The evaluation that it is working on, or whose report has not been acknowledged yet."""
    protocol: Count = PROTOCOL
    collective: Literal["none", "gloo", "nccl"] = "none"
    """Backend of the collective plane that this worker can join."""
    draining: bool = False
    """It takes no work, as after Draining."""
    gpu: Annotated[str, Name(0)] = ""
    """UUID of the GPU that its NCCL groups use."""
    version: Version = 0
    """Version of theta in its arena."""


class Heartbeat(Message, frozen=True):
    worker: Annotated[str, Name()]


class Report(Message, frozen=True):
    """A result; resent until acknowledged. Ages are seconds before this was sent, so clocks need not agree."""

    worker: Annotated[str, Name()]
    result: Result
    started_age: Seconds
    finished_age: Seconds


class HandBack(Message, frozen=True):
    """The worker gives up its assignment without a result; no failure of the evaluation."""

    worker: Annotated[str, Name()]
    eval_id: EvalId
    reason: Annotated[str, Text()]
    holding: EvalId | None = None
    """The evaluation that it works on instead."""


class Draining(Message, frozen=True):
    """The worker takes no more work: it finishes what it holds or hands it back, and says goodbye."""

    worker: Annotated[str, Name()]
    reason: Annotated[str, Text()]


class Fetch(Message, frozen=True):
    """Ask for the commits of versions first..last. The answer may end before the last: it has a bounded size."""

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
    """The worker has theta from a transfer (or has not, and goes by checkpoint and journal)."""

    worker: Annotated[str, Name()]
    number: Count
    ok: bool
    detail: Annotated[str, Text()] = ""


class Goodbye(Message, frozen=True):
    """The worker leaves and holds no evaluation."""

    worker: Annotated[str, Name()]
    reason: Annotated[str, Text()]
    died: bool = False
    """Set by its witness: the worker did not decide to end, and held its evaluation until then."""


class StatusRequest(Message, frozen=True):
    """Anyone who holds the workers' key may ask."""


class DrainRequest(Message, frozen=True):
    """Ask the head to drain these workers: no more evaluations, and exit after the current one."""

    who: Annotated[str, Name()]
    """A seat, or the name of one incarnation."""


class StopRequest(Message, frozen=True):
    """Ask the head to stop in good order: save a checkpoint, tell the workers to exit, exit."""

    reason: Annotated[str, Text()]


# --- head -> worker (or observer) -----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to Hello. The worker brings its arena to `version` before its first assignment, or later."""

    version: int
    config_digest: str


class Unknown(Message, frozen=True):
    """The head does not know this worker (any more): say Hello again."""


class Refused(Message, frozen=True):
    """Answer to Hello from a worker that would change bits. The worker ends with this text."""

    reason: str


class Work(Message, frozen=True):
    """An evaluation to make."""

    assignment: Assignment
    context: str = ""
    """Text of the candidate's context; empty: it has none."""


class Ack(Message, frozen=True):
    """The result is on disk; or it was a duplicate or unknown. Either way: stop resending."""

    eval_id: EvalId


class Announce(Message, frozen=True):
    """Version `version` exists. `record` is None when it comes by broadcast in `epoch`."""

    version: int
    epoch: int
    length: int
    sha256: bytes
    record: bytes | None


class Records(Message, frozen=True):
    """Answer to Fetch: the first of what was asked for, and all of it where that is not too large for one message."""

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
    """Come to transfer `number` and take theta_version from the head's arena, in buckets."""

    number: int
    place: int
    """Among those who are called."""
    backend: str
    store_host: str
    store_port: int
    version: int
    digest: int
    num_bytes: int
    bucket_bytes: int


class Rebuild(Message, frozen=True):
    """Your digest differs: drop your arena and build it again from a checkpoint and the journal."""

    version: int


class Leave(Message, frozen=True):
    """Stop and exit. `finished` tells an end of the run from a dismissal."""

    reason: str
    finished: bool
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
    """A worker that is not connected to the head, as RUN/seats knows it."""

    seat: str
    state: str
    """starting, failed, died, or lost: it was working, and the head no longer hears from it."""
    seconds: float
    """Seconds in this state."""
    detail: str
    """Reason; while it starts, how the previous process in this seat ended."""


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
    """Workers that are not connected; added by the command that shows the status, since the head does not know them."""


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
    """The sender's view of the head's generation; 0 from someone who has not seen one."""
    message: AnyMessage


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(generation: int, message: AnyMessage) -> bytes:
    return _encoder.encode(Envelope(generation, message))


def decode(data: bytes) -> Envelope:
    """Decode an envelope. Errors: TransportError when the bytes are not a message of this protocol."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:  # the latter from arrays nested without end
        raise TransportError(f"a control message of {len(data)} bytes cannot be read: {error}") from error


class _Packed(Struct, frozen=True, array_like=True, gc=False):
    """A commit by columns, one value per member: equal values next to each other take next to nothing when packed."""

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
    """64 bits each, little-endian."""
    coefficients: bytes
    """fp32, little-endian: exactly what they are."""


_packed_decoder = msgspec.msgpack.Decoder(_Packed)


def encode_commit(commit: Commit) -> bytes:
    """The bytes that are broadcast or sent to every worker, and whose hash is announced.

    So they are few: packed, and without the scores (0 in their place), which are most of a record and which no arena
    needs; who wants to know them asks with Fetch, or reads the journal.
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
    """A commit without its scores (see encode_commit). Errors: TransportError."""
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
