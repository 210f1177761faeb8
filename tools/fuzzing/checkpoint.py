"""Damaged checkpoints, and whole ones under names that lie."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzzing import readers
from fuzzing.base import Base
from fuzzing.bytes import any_damage
from fuzzing.child import Case, learn
from hpc_es.params import Arena, checkpoint
from hpc_es.paths import RunPaths

WRITTEN = (4, 6)
FILES = (checkpoint.THETA, checkpoint.MANIFEST)


def case(base: Base, seed: int) -> Case:
    rng = random.Random(f"checkpoint {seed}")
    chosen = (readers.verify, readers.status, readers.replay, readers.resume, *(readers.run_on,) * (seed % 250 == 7))
    learn(base, *chosen)
    paths = RunPaths(base.copy())
    kind = rng.choice(list(MUTATIONS))
    return Case(kind, MUTATIONS[kind](rng, paths), chosen)


def _renamed(rng: random.Random, paths: RunPaths) -> str:
    old, new = rng.choice(WRITTEN), rng.choice((0, 1, 2, 3, 5, 7, 8, 99, 99_999_999))
    paths.checkpoint(old).rename(paths.checkpoint(new))
    return f"{old} -> {new}"


def _folders_swapped(rng: random.Random, paths: RunPaths) -> str:
    a, b = map(paths.checkpoint, WRITTEN)
    aside = a.with_name("aside")
    a.rename(aside), b.rename(a), aside.rename(b)
    return "4 <-> 6"


def _copied(rng: random.Random, paths: RunPaths) -> str:
    old, new = rng.choice(WRITTEN), rng.choice((1, 2, 3, 5, 7, 8, 50))
    shutil.copytree(paths.checkpoint(old), paths.checkpoint(new))
    return f"{old} as {new} too"


def _files_swapped(rng: random.Random, paths: RunPaths) -> str:
    name = rng.choice(FILES)
    a, b = (paths.checkpoint(version) / name for version in WRITTEN)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second), b.write_bytes(first)
    return name


def _of_another_run(rng: random.Random, paths: RunPaths) -> str:
    """Whole, of the same base model and under an honest name; its theta is another."""
    arena = Arena.from_pretrained("models/lab-10k")
    version = rng.choice((*WRITTEN, 5, 3))
    for step in range(version):
        arena.update([(rng.randrange(2**32) + step, 1e-3)])
    shutil.rmtree(paths.checkpoint(version), ignore_errors=True)
    checkpoint.write(paths, arena)
    return f"version {version}"


def _tensors_swapped(rng: random.Random, paths: RunPaths) -> str:
    """Their names in the header."""
    path = paths.checkpoint(rng.choice(WRITTEN)) / checkpoint.THETA
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    a, b = rng.sample(names, 2)
    what = rng.choice(("data_offsets", "shape", "dtype"))
    header[a][what], header[b][what] = header[b][what], header[a][what]
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
    return f"{what} of {a} and {b}"


def _manifest_edited(rng: random.Random, paths: RunPaths) -> str:
    path = paths.checkpoint(rng.choice(WRITTEN)) / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    key = rng.choice([*manifest, "extra"])
    odd = (0, 1, -1, 5, 6, 2**63, 2**64, 10**300, 1.5, None, "6", [], {}, True, manifest["digest"] ^ 1)
    manifest[key] = rng.choice(odd)
    path.write_text(json.dumps(manifest))
    return f"{key}={manifest[key]!r:.30}"


def _manifest_replaced(rng: random.Random, paths: RunPaths) -> str:
    path = paths.checkpoint(rng.choice(WRITTEN)) / checkpoint.MANIFEST
    path.write_bytes(rng.choice((b"", b"[]", b"[" * 100_000, b"null", b"\xff\xfe", b'{"version": 6}', b"9" * 5000)))
    return "manifest.json"


def _file_damaged(rng: random.Random, paths: RunPaths) -> str:
    path = paths.checkpoint(rng.choice(WRITTEN)) / rng.choice(FILES)
    path.write_bytes(any_damage(rng, path.read_bytes()))
    return path.name


def _file_removed(rng: random.Random, paths: RunPaths) -> str:
    path: Path = paths.checkpoint(rng.choice(WRITTEN)) / rng.choice(FILES)
    path.unlink()
    if rng.random() < 0.3:
        path.mkdir()
    return path.name


def _odd_name(rng: random.Random, paths: RunPaths) -> str:
    names = ("v6", "v-0000006", "v000000006", "v" + "9" * 30, "v٠٠٠٠٠٠٠٦", "V00000006", "v00000009", "v00000003")
    path = paths.checkpoints / rng.choice(names)
    if rng.random() < 0.5:
        shutil.copytree(paths.checkpoint(6), path)
    else:
        path.write_bytes(b"no folder")
    return path.name


MUTATIONS: dict[str, Callable[[random.Random, RunPaths], str]] = {
    "folder renamed": _renamed,
    "folders swapped": _folders_swapped,
    "folder copied": _copied,
    "files swapped": _files_swapped,
    "checkpoint of another run": _of_another_run,
    "tensors swapped": _tensors_swapped,
    "manifest edited": _manifest_edited,
    "manifest replaced": _manifest_replaced,
    "file damaged": _file_damaged,
    "file removed": _file_removed,
    "odd name": _odd_name,
}
