"""Who may read the files of a run: its owner and, with run.group_readable, the owner's group. Only the owner writes.

Invariant: the mode of the run folder, 0700 or 0750, is the decision. Everything that this process, its children and
the libraries that they use make while `within` the run is as open as the folder and no more, whatever the umask.
RUN/secrets is its owner's alone; secrets.py sees to that.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_SECRETS = "secrets"
_OTHERS_WRITE, _GROUP_AND_OTHERS_WRITE = 0o002, 0o022


def make_run_folder(root: Path, *, exist_ok: bool = True) -> None:
    """Make the folder of a run, its owner's alone until `settle`. Those above it follow the umask. Errors: OSError."""
    with _umask(umask() | _OTHERS_WRITE):
        root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=exist_ok)


def settle(root: Path, *, group_readable: bool) -> None:
    """Give a run folder and all in it their modes; an earlier start may have had another umask or setting."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not (name.startswith(_SECRETS) and Path(folder) == root)]
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(PermissionError, FileNotFoundError):  # another's file; one that has just gone
                _settle_one(path, group_readable)


def _settle_one(path: str, group_readable: bool) -> None:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return  # what it points to may be the user's own
    mode = stat.S_IMODE(mode)
    # setgid stays: on a shared file system it gives new files the project's group
    wanted = mode & 0o7700 | ((mode & 0o500) >> 3 if group_readable else 0)
    if wanted != mode:
        os.chmod(path, wanted)


def follow(root: Path) -> None:
    """From here on, this process makes files as open as the run folder `root`; for those that serve one run only."""
    os.umask(_mask_of(root))


@contextlib.contextmanager
def within(root: Path | None) -> Iterator[None]:
    """Meanwhile, the same; None: no run's folder, so that the umask holds. The umask is one for all threads."""
    with _umask(umask() if root is None else _mask_of(root)):
        yield


def keep_others_from_writing() -> None:
    """What a command makes outside of run folders follows the umask, but is never for everyone to write."""
    os.umask(umask() | _OTHERS_WRITE)


def umask() -> int:
    mask = os.umask(0o077)  # there is no way to look at it without setting it
    os.umask(mask)
    return mask


def _mask_of(root: Path) -> int:
    return ~stat.S_IMODE(root.stat().st_mode) & 0o077 | _GROUP_AND_OTHERS_WRITE


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
