"""What the core hears: messages of workers, finished work beside the loop, signals and the clock."""

from msgspec import Struct

from hpc_es.transport.messages import AnyMessage, OpenTransfer


class Received(Struct, frozen=True, gc=False):
    """A message of a worker."""

    message: AnyMessage


class Updated(Struct, frozen=True, gc=False):
    """The head's arena is at `version`."""

    version: int
    digest: int
    update_norm: float
    seconds: float


class Trained(Struct, frozen=True, gc=False):
    """The trainer made theta_version of the closed cohort; its checkpoint is on disk."""

    version: int
    digest: int
    update_norm: float
    """Euclidean norm of theta_version - theta_{version-1}."""
    seconds: float
    metrics: dict[str, float] = {}


class TrainingFailed(Struct, frozen=True):
    """The trainer ended without theta_version."""

    version: int
    reason: str


class CheckpointSaved(Struct, frozen=True, gc=False):
    version: int


class GroupUp(Struct, frozen=True, gc=False):
    epoch: int


class GroupFailed(Struct, frozen=True, gc=False):
    epoch: int
    detail: str


class TransferReady(Struct, frozen=True, gc=False):
    """The arena's thread has come to the transfer, and waits for those who are called."""

    calls: dict[str, OpenTransfer]


class TransferEnded(Struct, frozen=True, gc=False):
    """`workers` were sent theta; or nobody was, and `error` says why."""

    workers: tuple[str, ...]
    num_bytes: int
    seconds: float
    error: str = ""


class Tick(Struct, frozen=True, gc=False):
    """Time has passed."""


class StopAsked(Struct, frozen=True, gc=False):
    reason: str
    comes_back: bool = False
    """A head of this run will start again elsewhere: the workers are not sent home."""


class NoWorkersLeft(Struct, frozen=True):
    """No worker is left, and none will come."""

    reason: str


Event = (
    Received
    | Updated
    | Trained
    | TrainingFailed
    | CheckpointSaved
    | GroupUp
    | GroupFailed
    | TransferReady
    | TransferEnded
    | Tick
    | StopAsked
    | NoWorkersLeft
)
