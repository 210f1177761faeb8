"""Checkpoints of a run: theta_v and the optimiser's state as fp32 safetensors, with a manifest that names their digest.

Invariant: a folder with a checkpoint's name is complete and on disk. It is written under a temporary name, synced
and renamed, so that an interrupted write never looks like a checkpoint. The base model is checkpoint 0 and is not
stored here.
"""

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from hpc_es.errors import ModelError, StoreError
from hpc_es.files import read_json
from hpc_es.params.weights import Spec, scan_file
from hpc_es.params.weights import write as write_safetensors
from hpc_es.paths import RunPaths

if TYPE_CHECKING:
    from hpc_es.params.arena import Arena

THETA, MANIFEST = "theta.safetensors", "manifest.json"

_TEMPORARY = ".writing-"

log = logging.getLogger(__name__)


class Manifest(Struct, frozen=True):
    """Contents of manifest.json, which describes a checkpoint or an exported folder."""

    version: int
    digest: int
    """Digest of theta_version in fp32 and of the optimiser's state, whatever `dtype` the weights are stored in."""
    base_digest: int
    num_parameters: int
    dtype: str = "float32"
    """dtype of the weights in this folder."""
    theta_digest: int | None = None
    """Digest of theta alone, for exported folders; equal to `digest` without an optimiser."""


def write(run: RunPaths, arena: "Arena", digest: int | None = None) -> Path:
    """Write theta_version as a checkpoint of the run and return its folder; see `write_folder`."""
    return write_folder(run.checkpoint(arena.version), arena, digest)


def adopt(run: RunPaths, version: int) -> Path:
    """Move a trainer's folder to the checkpoint of a committed version, and return it. Errors: StoreError."""
    trained, folder = run.trained(version), run.checkpoint(version)
    if trained.exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.parent.mkdir(exist_ok=True)
            trained.rename(folder)
            _sync(folder.parent)
        except OSError as error:
            raise StoreError(f"{trained} cannot be moved to {folder}: {error.strerror}") from error
    return folder


def write_folder(folder: Path, arena: "Arena", digest: int | None = None) -> Path:
    """Write theta_version to `folder` and return it. Passing a known `digest` saves a pass over theta.

    theta must not change during the call. An existing checkpoint of the same version is replaced unless it has the same
    digest and its file is complete.
    Errors: StoreError, for instance when the disk is full; nothing is left behind.
    """
    digest = arena.digest() if digest is None else digest
    manifest = Manifest(arena.version, digest, arena.base_digest, arena.num_parameters)
    contents = arena.contents()
    if folder.exists():
        with contextlib.suppress(StoreError, ModelError):
            stored = {tensor.name: tensor.shape for tensor in scan_file(folder / THETA)}
            if read_manifest(folder) == manifest and stored == {name: v.shape for name, v in contents.items()}:
                return folder
        shutil.rmtree(folder, ignore_errors=True)
    with written_whole(folder) as temporary:
        specs = [Spec(name, "F32", values.shape) for name, values in contents.items()]
        write_safetensors(temporary / THETA, specs, contents.__getitem__)
        write_manifest(temporary, manifest)
    return folder


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json of a folder. Errors: StoreError."""
    path = folder / MANIFEST
    try:
        return read_json(path, Manifest)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} is damaged ({error}); remove its folder") from error


def read_numbered(folder: Path) -> Manifest:
    """The manifest of a checkpoint of a run, whose folder is named by its version. Errors: StoreError."""
    manifest = read_manifest(folder)
    if folder.name != RunPaths(folder).checkpoint(manifest.version).name:
        raise StoreError(
            f"the checkpoint {folder} holds version {manifest.version}, so it was renamed or is from another run; "
            "remove it, and an older one is used"
        )
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def restore(run: RunPaths, arena: "Arena", version: int, digests: Mapping[int, int]) -> int:
    """Load the newest intact checkpoint at or before `version`, else theta_0, and return its version.

    `digests` maps every version to its digest in the journal. Checkpoints that are damaged or have another digest are
    skipped with a warning. Errors: ModelError when the base model has changed.
    """
    for written, folder in starts(run, version):
        try:
            refuse_another(folder, digests)
            arena.reload(folder)
        except StoreError as error:
            pass_over(error)
        else:
            return written
    arena.reload(None)
    return 0


def starts(run: RunPaths, version: int) -> list[tuple[int, Path]]:
    """(version, folder) of the checkpoints at or before `version`, newest first."""
    return [(written, folder) for written, folder in reversed(run.written_checkpoints()) if written <= version]


def refuse_another(folder: Path, digests: Mapping[int, int]) -> None:
    """Refuse a checkpoint that this run did not write, or that has no readable manifest. Errors: StoreError."""
    manifest = read_numbered(folder)
    if (recorded := digests.get(manifest.version)) != manifest.digest:
        said = "no digest for that version" if recorded is None else f"digest {recorded:016x}"
        raise StoreError(
            f"the checkpoint {folder} has digest {manifest.digest:016x}, but the journal has {said}: it is from "
            "another run; remove it, and an older one is used"
        )


def set_aside(run: RunPaths, digests: Mapping[int, int]) -> None:
    """Rename checkpoints that are not from this run, so that no worker starts from them.

    Only the head calls this, when it starts. Damaged checkpoints keep their names, because loading detects the damage.
    """
    for _, folder in run.written_checkpoints():
        try:
            read_manifest(folder)
        except StoreError:
            continue
        try:
            refuse_another(folder, digests)
        except StoreError as error:
            aside = next(
                p for n in itertools.count(1) if not (p := folder.with_name(f"{folder.name}.refused{n}")).exists()
            )
            folder.rename(aside)
            log.warning("%s; set aside as %s", error, aside.name)


def pass_over(error: StoreError) -> None:
    """Log why a checkpoint is skipped; the caller then uses an older one or the base model."""
    log.warning("%s; skipping it", error)


def prune(run: RunPaths, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and the remains of interrupted writes."""
    for _, folder in run.written_checkpoints()[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in run.checkpoints.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on success, sync its contents and rename it to `folder`.

    Errors: StoreError when the file system refuses an operation; the temporary folder is then removed.
    """
    temporary = folder.with_name(f"{_TEMPORARY}{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        temporary.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written ({error.strerror}); free disk space or change its permissions"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
