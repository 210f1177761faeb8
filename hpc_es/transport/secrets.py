"""The CURVE key pairs of a run: one for the head, one that all its workers and observers share.

Anyone who can read RUN/secrets can join the run. So the folder has mode 0700 and its files 0600 as soon as they exist,
and keys that other users can read are refused. The modes of other files in the run folder are not checked.
"""

import os
import secrets as random
import shutil
from pathlib import Path

import msgspec
import zmq
from msgspec import Struct

from hpc_es import modes
from hpc_es.errors import TransportError
from hpc_es.files import read_json
from hpc_es.paths import RunPaths

_HEAD, _WORKERS = "head.json", "workers.json"
_Z85_LENGTH = 40


class KeyPair(Struct, frozen=True):
    """One CURVE key pair, encoded as Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class Secrets(Struct, frozen=True):
    """The key pairs of the head and of the workers."""

    head: KeyPair
    workers: KeyPair


def create_secrets(paths: RunPaths) -> Secrets:
    """Make RUN/secrets unless it exists. If several processes try it at once, all use the keys of the first.

    Errors: TransportError if the folder cannot be written; those of `load_secrets`.
    """
    if paths.secrets.exists():
        return load_secrets(paths)
    new = paths.root / f"{paths.secrets.name}.new-{random.token_hex(8)}"
    try:
        modes.make_run_folder(paths.root)
        new.mkdir(mode=0o700)
        for name in (_HEAD, _WORKERS):
            public, secret = zmq.curve_keypair()
            _write_private(new / name, KeyPair(public.decode(), secret.decode()))
        new.rename(paths.secrets)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if not paths.secrets.exists():
            raise TransportError(f"{paths.secrets}: the run's keys cannot be written: {error}") from error
    return load_secrets(paths)


def load_secrets(paths: RunPaths) -> Secrets:
    """Read both key pairs.

    Errors: TransportError if the folder or a file is missing, damaged, or accessible to group or others.
    """
    _refuse_open(paths.secrets, 0o700)
    return Secrets(head=_read(paths.secrets / _HEAD), workers=_read(paths.secrets / _WORKERS))


def _write_private(path: Path, keys: KeyPair) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(keys))
        file.flush()
        os.fsync(file.fileno())


def _refuse_open(path: Path, wanted: int) -> None:
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        raise TransportError(f"{path} is missing: `hpc-es run` and `hpc-es submit` make the keys of a run") from None
    except OSError as error:
        raise TransportError(f"{path} cannot be read: {error}") from error
    if mode & 0o077:
        raise TransportError(
            f"{path} has mode {mode:04o}, so other users may join the run or impersonate its head; only its owner may "
            f"have access: chmod {wanted:o} {path}"
        )


def _read(path: Path) -> KeyPair:
    _refuse_open(path, 0o600)
    try:
        keys = read_json(path, KeyPair)
        paired = len(keys.secret) == _Z85_LENGTH and zmq.curve_public(keys.secret.encode()) == keys.public.encode()
    except OSError as error:
        raise TransportError(f"{path} cannot be read: {error}") from error
    except (msgspec.DecodeError, ValueError, zmq.ZMQError):  # not JSON, not Z85
        paired = False
    if not paired:
        raise TransportError(
            f"{path} contains no CURVE key pair; stop the run, remove {path.parent} and start it again to get new keys"
        )
    return keys
