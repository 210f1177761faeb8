"""Where workers find their head: RUN/rendezvous.json, which the head writes and everyone else reads.

Invariant: a reader sees the whole file of one head, and never an older head's after a newer one's.
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
    """Replace rendezvous.json so that it survives a crash. Errors: Superseded if a newer head has published."""
    there = read_rendezvous(path)
    if there is not None and there.generation > here.generation:
        raise Superseded(f"{path} is from the head of generation {there.generation}; this one is {here.generation}")
    new = path.with_name(f"{path.name}.{here.generation}.{here.pid}")
    with new.open("wb") as file:
        file.write(msgspec.json.encode(here))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a crash could lose the renaming
    finally:
        os.close(folder)


def read_rendezvous(path: Path) -> Rendezvous | None:
    """Read rendezvous.json; None if no head has published one."""
    try:
        return read_json(path, Rendezvous)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
