"""What the core tells the loop to do.

The loop performs the instructions of a batch in this order: every Append, one fsync, then all the rest. So
nothing leaves the head before it is durable.
"""

from msgspec import Struct

from hpc_es.records import Assignment, Commit, Result
from hpc_es.store.records import AnyRecord
from hpc_es.transport.backends import Backend
from hpc_es.transport.messages import AnyMessage


class Append(Struct, frozen=True, gc=False):
    """To the journal."""

    record: AnyRecord


class Send(Struct, frozen=True, gc=False):
    """On the control plane."""

    worker: str
    message: AnyMessage


class Update(Struct, frozen=True, gc=False):
    """Apply a commit to the arena; answered by Updated."""

    commit: Commit


class Train(Struct, frozen=True, gc=False):
    """Have the closed cohort trained into theta_version; answered by Trained or TrainingFailed."""

    version: int
    cohort: tuple[tuple[Assignment, Result], ...]
    """In the order of the record that closed it."""


class SaveCheckpoint(Struct, frozen=True, gc=False):
    """Save a checkpoint of the arena, which is at `version`; answered by CheckpointSaved."""

    version: int


class OpenGroup(Struct, frozen=True, gc=False):
    """Open the process group of a new epoch and call its members; answered by GroupUp or GroupFailed."""

    epoch: int
    workers: tuple[str, ...]
    backend: Backend


class Broadcast(Struct, frozen=True, gc=False):
    """Send a commit record through the collective plane; a failure is answered by GroupFailed."""

    epoch: int
    data: bytes


class Transfer(Struct, frozen=True, gc=False):
    """Send the arena, which then stands at `version`, to these; answered by TransferReady and TransferEnded, or by
    TransferEnded alone."""

    number: int
    workers: tuple[str, ...]
    backend: Backend
    version: int
    digest: int


class Exit(Struct, frozen=True, gc=False):
    reason: str
    finished: bool
    failed: bool


Instruction = Append | Send | Update | Train | SaveCheckpoint | OpenGroup | Broadcast | Transfer | Exit
