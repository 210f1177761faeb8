"""Damaged run.h5, in its run folder and alone."""

import os
import random
from collections.abc import Callable

from fuzzing import readers
from fuzzing.base import Base
from fuzzing.bytes import appended, cut, flipped, overwritten, zeroed
from fuzzing.child import Case, learn
from hpc_es.paths import RunPaths

PAGE = 4096


def case(base: Base, seed: int) -> Case:
    rng = random.Random(f"hdf5 {seed}")
    chosen = (readers.read_alone, readers.read, readers.verify, readers.status, readers.resume)
    learn(base, *chosen)
    path = RunPaths(base.copy()).hdf5
    kind = rng.choice(list(MUTATIONS))
    data = path.read_bytes()
    path.write_bytes(MUTATIONS[kind](rng, data))
    os.utime(path, (0, 0))  # a fresh file may be in the middle of a flush, and is waited for
    return Case(kind, f"{len(data)} bytes", chosen)


def _pages(data: bytes) -> list[bytes]:
    return [data[start : start + PAGE] for start in range(0, len(data), PAGE)]


def _page_zeroed(rng: random.Random, data: bytes) -> bytes:
    """One that holds something: most pages of a young file are empty."""
    pages = _pages(data)
    which = rng.choice([number for number, page in enumerate(pages) if any(page)])
    return b"".join([*pages[:which], bytes(len(pages[which])), *pages[which + 1 :]])


def _pages_swapped(rng: random.Random, data: bytes) -> bytes:
    pages = _pages(data)
    a, b = rng.sample([number for number, page in enumerate(pages) if any(page)], 2)
    pages[a], pages[b] = pages[b], pages[a]
    return b"".join(pages)


def _page_repeated(rng: random.Random, data: bytes) -> bytes:
    """In place of another one."""
    pages = _pages(data)
    a, b = rng.sample([number for number, page in enumerate(pages) if any(page)], 2)
    pages[b] = pages[a]
    return b"".join(pages)


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "page zeroed": _page_zeroed,
    "pages swapped": _pages_swapped,
    "page repeated": _page_repeated,
    "cut": cut,
    "bits flipped": flipped,
    "range zeroed": zeroed,
    "bytes overwritten": overwritten,
    "bytes appended": appended,
}
