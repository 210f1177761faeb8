"""Scores of what a model still knows: one JSON file per version and task, written whole or not at all.

Invariant: two records with equal `Measured` are the same measurement, so that none has to be made twice.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpc_es.errors import StoreError
from hpc_es.files import read_json
from hpc_es.paths import retention_record, retention_records


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is asked."""

    backend: str
    dtype: str
    """What the engine computes in."""
    max_tokens: int
    """Most tokens of a generated answer; 0 if nothing is generated."""
    max_length: int
    """Tokens of prompt and answer together."""
    chat: bool
    """Prompts go through the model's chat template."""
    chat_options: dict[str, Any]
    """Variables of the chat template."""
    seed: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and how."""

    digest: str
    """Digest of theta_v in float32, hexadecimal."""
    task: str
    task_version: int
    data_sha256: str
    num_examples: int
    """The first of the file."""
    settings: Settings
    lm_eval: str
    """Its version."""


class Record(msgspec.Struct, kw_only=True):
    measured: Measured
    title: str
    source: str
    """The run or the model, as it was named."""
    version: int | None
    """Policy version; None for a model that is no run's."""
    scores: dict[str, float]
    """Scores by lm-eval, from 0 to 1."""
    correct: dict[str, list[int]]
    """For each metric, 1 or 0 of each example in the file's order."""
    answers: list[str] | None
    """Letters of generated answers, "" where there was none; None where nothing was generated."""
    num_shortened: int
    """Prompts that lost their beginning for want of room; those of a likelihood count once per context."""
    began: float
    """Seconds since 1970."""
    seconds: float
    software: dict[str, str]


def write_record(folder: Path, record: Record) -> Path:
    """Errors: StoreError for whatever the file system refuses."""
    who = Path(record.source).resolve().name if record.version is None else f"v{record.version:08d}"
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(record.began))
    path = retention_record(folder, f"{who}-{record.measured.task}-{when}-{os.getpid()}")
    temporary = path.with_name(f".{path.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror}); make room or change its rights") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_records(folder: Path) -> Iterator[tuple[Path, Record]]:
    """All records in a folder, by file name. Errors: StoreError for a damaged record."""
    for path in retention_records(folder):
        try:
            yield path, read_json(path, Record)
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(f"{path} is not a retention record ({error}); remove it to measure again") from error


def find_record(folder: Path, measured: Measured) -> tuple[Path, Record] | None:
    """The last record of this very measurement. Errors: StoreError for a damaged record."""
    found = None
    for path, record in read_records(folder):
        if record.measured == measured:
            found = path, record
    return found


def asked_alike(a: Record, b: Record) -> bool:
    """Whether two models answered the same examples under the same settings, so that their scores compare."""
    return msgspec.structs.replace(a.measured, digest=b.measured.digest) == b.measured
