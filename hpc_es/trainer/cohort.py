"""The files between head and trainer: the closed cohort in, the report out."""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from hpc_es.records import Assignment, Result


class ClosedCohort(Struct, frozen=True):
    """What the trainer digests, in the order of the record that closed it."""

    version: int
    """The trainer makes theta_version."""
    evaluations: tuple[tuple[Assignment, Result], ...]


class TrainingReport(Struct, frozen=True):
    """The last line that a trainer prints."""

    digest: int
    """Digest of theta_version."""
    update_norm: float
    """Euclidean norm of theta_version - theta_{version-1}."""
    seconds: float
    metrics: dict[str, float]


def write_cohort(path: Path, cohort: ClosedCohort) -> None:
    """Write atomically. Errors: OSError."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(msgspec.msgpack.encode(cohort))
    unfinished.replace(path)


def read_cohort(path: Path) -> ClosedCohort:
    """Errors: OSError, msgspec.DecodeError."""
    return msgspec.msgpack.decode(path.read_bytes(), type=ClosedCohort)
