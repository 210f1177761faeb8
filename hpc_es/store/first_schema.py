"""Records of schema 1, as the first release wrote them, and what they are called today.

Invariant: nothing of an old record is lost or made up: purposes come from the kinds that stood beside the slots, the
header and body of a commit from its members.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hpc_es.records import (
    Assignment,
    Candidate,
    Commit,
    Consumed,
    EvalId,
    Member,
    OptimiserStep,
    Seeds,
    Term,
    from_first_release,
)
from hpc_es.store import records as journal


class _Assignment(Struct, frozen=True, gc=False):
    eval_id: EvalId
    update: int
    kind: str
    member: Member | None
    tasks: tuple[int, ...]
    sampling_seed: int


class _UpdateMember(Struct, frozen=True, gc=False, array_like=True):
    eval_id: EvalId
    seed: int
    sign: int
    sigma: float
    subspace: int
    fitness: float
    utility: float
    coefficient: float
    partition_seed: int = 0


class _Commit(Struct, frozen=True, gc=False):
    version: int
    alpha: float
    members: tuple[_UpdateMember, ...]
    null: bool = False
    num_subspaces: int = 1
    partition_seed: int = 0
    step: OptimiserStep | None = None


class _Planned(journal.Record, frozen=True, tag="Planned"):
    version: int
    assignments: tuple[_Assignment, ...]


class _Committed(journal.Record, frozen=True, tag="Committed"):
    commit: _Commit


_decoder = msgspec.msgpack.Decoder(
    list[
        journal.Started
        | _Planned
        | journal.Joined
        | journal.Left
        | journal.Dismissed
        | journal.Leased
        | journal.Unleased
        | journal.Reported
        | journal.Voided
        | journal.Discarded
        | _Committed
        | journal.Digested
        | journal.Checkpointed
        | journal.Noted
        | journal.Stopped
    ]
)


def decode(payload: memoryview) -> list[journal.AnyRecord]:
    """The records of one frame, in today's words. Errors: msgspec.DecodeError."""
    return [_today(record) for record in _decoder.decode(payload)]


def _today(record: Any) -> journal.AnyRecord:
    change = _CHANGES.get(type(record))
    return change(record) if change is not None else record


def _planned(record: _Planned) -> journal.Planned:
    return journal.Planned(record.time, record.version, tuple(map(_assignment, record.assignments)))


def _assignment(old: _Assignment) -> Assignment:
    eval_id = from_first_release(old.eval_id)
    return Assignment(eval_id, old.update, Candidate(eval_id.version, old.member), old.tasks, old.sampling_seed)


def _committed(record: _Committed) -> journal.Committed:
    old = record.commit
    header = [Consumed(from_first_release(member.eval_id), member.fitness) for member in old.members]
    terms = [Term(m.seed, m.sign, m.sigma, m.subspace, m.utility, m.coefficient, m.partition_seed) for m in old.members]
    body = Seeds(old.alpha, tuple(terms), old.num_subspaces, old.partition_seed, old.step)
    return journal.Committed(record.time, Commit(old.version, tuple(header), body, old.null))


def _renamed(record: Any) -> Any:
    return replace(record, eval_id=from_first_release(record.eval_id))


def _reported(record: journal.Reported) -> journal.Reported:
    return replace(record, result=_renamed(record.result))


_CHANGES: dict[type, Callable[[Any], journal.AnyRecord]] = {
    journal.Started: lambda record: replace(record, schema_version=journal.SCHEMA_VERSION),
    _Planned: _planned,
    _Committed: _committed,
    journal.Reported: _reported,
    journal.Leased: _renamed,
    journal.Unleased: _renamed,
    journal.Voided: _renamed,
    journal.Discarded: _renamed,
}
