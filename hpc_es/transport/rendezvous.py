"""Where workers find their head: RUN/rendezvous.json, which the head writes and everyone else reads.

Invariant: a reader sees the complete file of one head, and never the file of an older head after that of a newer one.
"""

import os
from pathlib import Path

import msgspec

from hpc_es.errors import Superseded
from hpc_es.files import read_json


class Rendezvous(msgspec.Struct, frozen=True):
    """Contents of rendezvous.json: where the head listens, and which head it is."""

    run_id: str
    generation: int
    host: str
    port: int
    pid: int
    head_host: str


def publish(path: Path, here: Rendezvous) -> None:
    """Write rendezvous.json atomically and durably. Errors: Superseded if a newer head has published."""
    there = read_rendezvous(path)
    if there is not None and there.generation > here.generation:
        raise Superseded(
            f"{path} was written by the head of generation {there.generation}, which is newer than this head's "
            f"{here.generation}"
        )
    new = path.with_name(f"{path.name}.{here.generation}.{here.pid}")
    with new.open("wb") as file:
        file.write(msgspec.json.encode(here))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # without this a crash could undo the renaming
    finally:
        os.close(folder)


def read_rendezvous(path: Path) -> Rendezvous | None:
    """Read rendezvous.json; None if no head has published one."""
    try:
        return read_json(path, Rendezvous)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
