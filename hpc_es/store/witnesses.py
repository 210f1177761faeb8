"""Other files in a run folder that know how far the run got, to notice a journal that lost its end.

Invariant: a head makes its journal durable before any other file shows the progress. So no file in the run folder knows
of a newer generation, more bytes or a newer version than a complete journal, whatever was killed and when. For the same
reason readers of a live run must gather the witnesses before they read the journal.

The witnesses: rendezvous.json (generation), run.h5 (generation, bytes of its segment, run), checkpoints (versions and
their digests) and journals of later evaluations (versions).
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpc_es.errors import JournalDamaged, StoreError
from hpc_es.files import read_bytes, read_json
from hpc_es.paths import RunPaths
from hpc_es.records import Weights
from hpc_es.store.frames import Frames
from hpc_es.store.hdf5_tables import hdf5_end
from hpc_es.store.records import AnyRecord, Committed, Digested, Planned, Started

_HEARD = frozenset((Started, Committed, Digested))


@dataclass(frozen=True)
class _Head:
    """What a file says about the head that wrote it."""

    path: Path
    generation: int
    run_id: str
    num_bytes: int = 0
    """Number of durable bytes of that head's segment."""


@dataclass(frozen=True)
class _Version:
    """A file that exists because the run reached a version."""

    path: Path
    version: int
    digest: int | None = None
    base_digest: int | None = None


@dataclass
class Witnesses:
    """All witnesses of one run folder, and the checks of the journal against them."""

    paths: RunPaths
    heads: list[_Head]
    versions: list[_Version]
    _base_digest: int = 0
    _digests: dict[int, int] = field(default_factory=dict)
    """Digests by version, as far as the journal has been read."""
    _last: int = 0

    @classmethod
    def gather(cls, paths: RunPaths) -> "Witnesses":
        """Collect the witnesses; skip files that cannot be read. Errors: StoreError for a run.h5 of a newer schema."""
        heads = [head for head in (_rendezvous(paths), _hdf5(paths)) if head is not None]
        return cls(paths, heads, [*_checkpoints(paths), *_later_evals(paths)])

    def check_start(self, newest: Started | None) -> None:
        """Check that no segment newer than `newest` (its first record) is missing. Errors: JournalDamaged."""
        if newest is None:
            self._refuse_leftovers()
            return
        newer = [head for head in self.heads if head.generation > newest.generation]
        if newer:
            missing, written = self.paths.segment(max(head.generation for head in newer)), [head.path for head in newer]
            raise JournalDamaged(
                f"{missing} is missing or empty (offset 0), but its head wrote {_names(written)}: "
                + self._remedy(f"segment {newest.generation}", written)
            )

    def _refuse_leftovers(self) -> None:
        paths = self.paths
        left = [path for path in (paths.rendezvous, paths.hdf5) if path.exists()]
        left += [*(folder for _, folder in paths.written_checkpoints()), *paths.later_evals()]
        if left:
            raise JournalDamaged(
                f"{paths.root} has no journal, although it has {_names(left)}: restore the journal from a copy, or "
                "remove them to start over"
            )

    def listen(self, records: Iterable[AnyRecord]) -> None:
        """Take in records of the journal, in order."""
        for record in records:
            if type(record) not in _HEARD:  # nearly all of them
                continue
            if isinstance(record, Committed) and isinstance(record.commit.body, Weights):
                self._digests[record.commit.version] = record.commit.body.digest
            if isinstance(record, Digested):
                self._digests[record.version] = record.digest
            elif isinstance(record, Committed):
                self._last = record.commit.version
                if isinstance(record.commit.body, Weights):
                    self._digests[record.commit.version] = record.commit.body.digest
            elif isinstance(record, Started):
                self._base_digest = self._digests[0] = record.base_digest

    def check_segment(self, started: Started, frames: Frames, *, is_newest: bool) -> None:
        """Check a segment after `listen`. Errors: JournalDamaged when it is from another run, or its end is lost."""
        heads = [head for head in self.heads if head.generation == started.generation]
        for head in heads:
            if head.run_id != started.run_id:
                raise JournalDamaged(
                    f"{frames.path} (offset 0) is of the run {started.run_id!r}, but {head.path} of the same "
                    f"generation is of {head.run_id!r}: one of them is from another run. Restore the journal from a "
                    f"copy, or remove {head.path}"
                )
        further = [head for head in heads if head.num_bytes > frames.end]
        newer = [version for version in self.versions if self._is_newer(version)] if is_newest else []
        if further or newer:
            known = [f"{head.path.name}, written when it had {head.num_bytes} bytes" for head in further]
            known += [str(version.path.relative_to(self.paths.root)) for version in newer]
            raise JournalDamaged(
                f"{frames.path} is damaged at offset {frames.end}: it ends here, at version {self._last}, but there is "
                f"{', '.join(known)}: "
                + self._remedy(f"version {self._last}", [*(head.path for head in further), *(v.path for v in newer)])
            )

    def _is_newer(self, witness: _Version) -> bool:
        if witness.base_digest not in (None, self._base_digest):
            return False  # of another run: skipped or refused when it is loaded
        if witness.digest is None:
            return witness.version > self._last
        # A checkpoint is written only after the digest of its version is durable. One with the digest of another
        # version was renamed, and says nothing about the end.
        return witness.version not in self._digests and witness.digest not in self._digests.values()

    @staticmethod
    def _remedy(where: str, remove: list[Path]) -> str:
        return (
            f"its end is lost. Restore the journal from a copy, or remove {_names(remove)} "
            f"to resume from {where} and compute the rest again"
        )


def _names(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _rendezvous(paths: RunPaths) -> _Head | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        said = read_json(paths.rendezvous, _Rendezvous)
        return _Head(paths.rendezvous, said.generation, said.run_id)
    return None


class _Rendezvous(msgspec.Struct, frozen=True):
    """Fields of transport.rendezvous.Rendezvous, which this package must not import."""

    generation: int
    run_id: str


def _hdf5(paths: RunPaths) -> _Head | None:
    if not paths.hdf5.is_file():
        return None
    end = hdf5_end(paths.hdf5)
    return _Head(paths.hdf5, end.generation, end.run_id, end.num_bytes) if end else None


def _checkpoints(paths: RunPaths) -> Iterable[_Version]:
    written = paths.written_checkpoints()
    if not written:
        return
    from hpc_es.params import checkpoint

    for version, folder in written:
        with contextlib.suppress(StoreError):
            manifest = checkpoint.read_numbered(folder)
            yield _Version(folder, version, manifest.digest, manifest.base_digest)


def _later_evals(paths: RunPaths) -> Iterable[_Version]:
    for path in paths.later_evals():
        with contextlib.suppress(OSError, StoreError):
            frames = Frames(path, read_bytes(path))
            planned, base_digest = 0, None
            for offset, payload in frames.payloads():
                if base_digest is None or _PLANNED.search(payload):  # the others are many
                    for record in frames.decode(offset, payload):
                        if isinstance(record, Planned):
                            planned = max(planned, record.version)
                        elif isinstance(record, Started):
                            base_digest = record.base_digest
            yield _Version(path, planned, None, base_digest)


_PLANNED = re.compile(Planned.__name__.encode())
