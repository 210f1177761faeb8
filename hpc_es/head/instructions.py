"""What the core tells the loop to do.

The loop performs the instructions of a batch in this order: every Append, one fsync, then all the rest. So
nothing leaves the head before it is durable.
"""

from dataclasses import dataclass

from hpc_es.es.records import Commit
from hpc_es.store.records import AnyRecord
from hpc_es.transport.collective import Backend
from hpc_es.transport.messages import AnyMessage


@dataclass(frozen=True)
class Append:
    """To the journal."""

    record: AnyRecord


@dataclass(frozen=True)
class Send:
    """On the control plane."""

    worker: str
    message: AnyMessage


@dataclass(frozen=True)
class Update:
    """Apply a commit to the arena; answered by Updated."""

    commit: Commit


@dataclass(frozen=True)
class SaveCheckpoint:
    """Of the arena, which stands at `version`; answered by CheckpointSaved."""

    version: int


@dataclass(frozen=True)
class OpenGroup:
    """Open the process group of a new epoch and call its members; answered by GroupUp or GroupFailed."""

    epoch: int
    workers: tuple[str, ...]
    backend: Backend


@dataclass(frozen=True)
class Broadcast:
    """Send a commit record through the collective plane; a failure is answered by GroupFailed."""

    epoch: int
    data: bytes


@dataclass(frozen=True)
class Exit:
    reason: str
    finished: bool
    failed: bool


Instruction = Append | Send | Update | SaveCheckpoint | OpenGroup | Broadcast | Exit
