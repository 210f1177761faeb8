"""Events for the core: messages of workers, finished background work, signals and the clock."""

from msgspec import Struct

from hpc_es.transport.messages import AnyMessage, OpenTransfer


class Received(Struct, frozen=True, gc=False):
    """A message from a worker has arrived."""

    message: AnyMessage


class Updated(Struct, frozen=True, gc=False):
    """The head's arena has reached `version`."""

    version: int
    digest: int
    update_norm: float
    seconds: float


class Trained(Struct, frozen=True, gc=False):
    """The trainer has made theta_version from the closed cohort; its checkpoint is on disk."""

    version: int
    digest: int
    update_norm: float
    """Euclidean norm of theta_version - theta_{version-1}."""
    seconds: float
    metrics: dict[str, float] = {}


class TrainingFailed(Struct, frozen=True):
    """The trainer exited without theta_version."""

    version: int
    reason: str


class CheckpointSaved(Struct, frozen=True, gc=False):
    """A checkpoint of theta_version is on disk."""

    version: int


class GroupUp(Struct, frozen=True, gc=False):
    """All workers have joined the process group of an epoch."""

    epoch: int


class GroupFailed(Struct, frozen=True, gc=False):
    """The process group of an epoch was not formed, or has ended."""

    epoch: int
    detail: str


class TransferReady(Struct, frozen=True, gc=False):
    """The arena's thread starts the transfer and waits for the invited workers; `calls` are the messages to them."""

    calls: dict[str, OpenTransfer]


class TransferEnded(Struct, frozen=True, gc=False):
    """`workers` have received theta; or no worker has, and `error` says why."""

    workers: tuple[str, ...]
    num_bytes: int
    seconds: float
    error: str = ""


class Tick(Struct, frozen=True, gc=False):
    """Time has passed."""


class StopAsked(Struct, frozen=True, gc=False):
    """A signal asked the head to stop."""

    reason: str
    comes_back: bool = False
    """Whether a new head will continue the run, so that the workers should wait for it and not exit."""


class NoWorkersLeft(Struct, frozen=True):
    """No worker is connected, and none will join."""

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
