"""What the core hears: messages of workers, finished work beside the loop, signals and the clock."""

from dataclasses import dataclass

from hpc_es.transport.messages import AnyMessage


@dataclass(frozen=True)
class Received:
    """A message of a worker."""

    message: AnyMessage


@dataclass(frozen=True)
class Updated:
    """The head's arena is at `version`."""

    version: int
    digest: int
    update_norm: float
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved:
    version: int


@dataclass(frozen=True)
class GroupUp:
    epoch: int


@dataclass(frozen=True)
class GroupFailed:
    epoch: int
    detail: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class StopAsked:
    reason: str
    comes_back: bool = False
    """A head of this run will start again elsewhere: the workers are not sent home."""


Event = Received | Updated | CheckpointSaved | GroupUp | GroupFailed | Tick | StopAsked
