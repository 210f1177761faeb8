"""Instructions of the core to the loop.

The loop carries out the instructions of a batch in this order: every Append, one fsync, then all others. So the head
sends nothing that a crash could undo.
"""

from msgspec import Struct

from hpc_es.records import Assignment, Commit, Result
from hpc_es.store.records import AnyRecord
from hpc_es.transport.backends import Backend
from hpc_es.transport.messages import AnyMessage


class Append(Struct, frozen=True, gc=False):
    """Append a record to the journal."""

    record: AnyRecord


class Send(Struct, frozen=True, gc=False):
    """Send a message to a worker on the control plane."""

    worker: str
    message: AnyMessage


class Update(Struct, frozen=True, gc=False):
    """Apply a commit to the arena; the event Updated follows."""

    commit: Commit


class Train(Struct, frozen=True, gc=False):
    """Start a trainer that makes theta_version from the closed cohort; Trained or TrainingFailed follows."""

    version: int
    cohort: tuple[tuple[Assignment, Result], ...]
    """In the order of the journal record that closed the cohort."""


class SaveCheckpoint(Struct, frozen=True, gc=False):
    """Save a checkpoint of the arena, which is at `version`; CheckpointSaved follows."""

    version: int


class OpenGroup(Struct, frozen=True, gc=False):
    """Open the process group of a new epoch and invite its members; GroupUp or GroupFailed follows."""

    epoch: int
    workers: tuple[str, ...]
    backend: Backend


class Broadcast(Struct, frozen=True, gc=False):
    """Send a commit record through the collective plane; GroupFailed follows if this fails."""

    epoch: int
    data: bytes


class Transfer(Struct, frozen=True, gc=False):
    """Send the arena, which is at `version`, to these workers; TransferReady and TransferEnded follow, or TransferEnded
    alone."""

    number: int
    workers: tuple[str, ...]
    backend: Backend
    version: int
    digest: int


class Exit(Struct, frozen=True, gc=False):
    """End the head."""

    reason: str
    finished: bool
    """All updates and evaluations are done."""
    failed: bool
    """The run cannot continue without a person's help."""


Instruction = Append | Send | Update | Train | SaveCheckpoint | OpenGroup | Broadcast | Transfer | Exit
