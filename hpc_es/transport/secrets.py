"""The CURVE key pairs of a run: one for the head, one that all its workers (and observers) share.

RUN/secrets is 0700 and its files are 0600, from the moment they can be seen. Whoever can read the folder can join
the run, so keys that others can read are refused, not used. Nothing else in the run folder is checked.
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
    """One CURVE key pair, Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


class Secrets(Struct, frozen=True):
    """What head and workers need to know of each other."""

    head: KeyPair
    workers: KeyPair


def create_secrets(paths: RunPaths) -> Secrets:
    """Make RUN/secrets unless it is there; the keys of whoever came first are everybody's.

    Errors: TransportError when the folder cannot be written, or as `load_secrets`.
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

    Errors: TransportError when the folder or a file is missing, garbled, or open to group or others.
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
        raise TransportError(
            f"{path} is missing: whoever starts the run makes its keys (`hpc-es run`, `hpc-es submit`)"
        ) from None
    except OSError as error:
        raise TransportError(f"{path} cannot be looked at: {error}") from error
    if mode & 0o077:
        raise TransportError(
            f"{path} has mode {mode:04o}, so others may join the run or pose as its head; it must be open to its owner "
            f"only: chmod {wanted:o} {path}"
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
            f"{path} holds no CURVE key pair; stop the run, remove {path.parent} and start it again to get new keys"
        )
    return keys
