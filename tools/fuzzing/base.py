"""The run folder that is damaged: the recorded one of the first release (tests/fixtures), written in today's formats.

Always the same bytes but for run.h5's token, so that a seed repeats. Three segments, of which the second has no end
mark because its head was killed; two checkpoints; run.h5; one later evaluation.
"""

import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.recorded.verify import verify
from hpc_es.store.frames import FILE_HEADER, Chain, Frames, frame
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import write_frames
from hpc_es.store.records import AnyRecord, Started

ARCHIVE = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "first_release.tar.gz"
KILLED = 2
"""The segment without an end mark."""


@dataclass(frozen=True)
class Base:
    folder: Path
    """The working directory of all readers; the model lies here."""
    run: Path
    digests: tuple[int, ...]
    """Of every version of the undamaged run."""
    other: Mapping[int, bytes]
    """Segments of another run, by generation."""
    twin: Mapping[int, bytes]
    """Segments of a run of the same name and configuration, made at another time."""

    def copy(self) -> Path:
        """A fresh copy of the run folder, in place of the last one."""
        fresh = self.folder / "runs" / "first-release"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(self.run, fresh, symlinks=True)
        return fresh


def prepare(folder: Path) -> Base:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    write_lab_model(folder / "models" / "lab-10k", LAB_MODELS["lab-10k"])
    os.chdir(folder)
    run = folder / "whole"
    (folder / "runs" / "first-release").rename(run)
    paths = RunPaths(run)
    groups = {generation: _groups(path) for generation, path in paths.segments()}
    for generation, data in segments(groups).items():
        paths.segment(generation).write_bytes(data)
    for path in paths.later_evals():
        write_frames(path, _groups(path))
    rebuild(run)
    report = verify(run)
    assert report.ok, report.problems
    return Base(
        folder,
        run,
        tuple(line.digest for line in report.versions),
        segments(groups, lambda record: _altered(record, run_id="other")),
        segments(groups, lambda record: _altered(record)),
    )


def segments(
    groups: Mapping[int, list[list[AnyRecord]]], change: Callable[[AnyRecord], AnyRecord] = lambda record: record
) -> dict[int, bytes]:
    """The bytes of a run's segments in today's format, from the records of every frame."""
    written, before, seal = dict[int, bytes](), b"", b""
    for generation, frames in groups.items():
        data, chain = FILE_HEADER, Chain()
        for records in [*frames, *([[]] if generation != KILLED else [])]:
            changed = [_sealed(change(record), len(before), seal) for record in records]
            more, chain = frame(changed, chain)
            data += more
        written[generation], before, seal = data, data, chain.digest
    return written


def _groups(path: Path) -> list[list[AnyRecord]]:
    return [records for _, records in Frames(path, path.read_bytes())]


def _altered(record: AnyRecord, **values: str) -> AnyRecord:
    later = replace(record, time=record.time + 1.0)
    return replace(later, **values) if isinstance(record, Started) else later


def _sealed(record: AnyRecord, num_bytes: int, seal: bytes) -> AnyRecord:
    if not isinstance(record, Started):
        return record
    return replace(record, predecessor_bytes=num_bytes, predecessor_seal=seal)
