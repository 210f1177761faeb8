"""Where workers find their head: RUN/rendezvous.json, which the head writes and everyone reads (read_rendezvous).

Invariant: a reader sees the file of one head, whole, and never an older head's after a newer one's.
"""

import os
from pathlib import Path

import msgspec

from hpc_es.errors import Superseded
from hpc_es.transport.messages import Rendezvous, read_rendezvous


def publish(path: Path, here: Rendezvous) -> None:
    """Replace rendezvous.json, also across a crash. Errors: Superseded when a newer head has published."""
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
        os.fsync(folder)
    finally:
        os.close(folder)
