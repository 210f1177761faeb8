"""File modes of a run: only the owner writes; the owner and, with run.group_readable, the owner's group read.

Invariant: the mode of the run folder, 0700 or 0750, decides. Files that this process, its children and their libraries
create while `within` the run are as open as the folder and no more, whatever the umask. Only the owner can read
RUN/secrets; secrets.py takes care of that.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_SECRETS = "secrets"
_OTHERS_WRITE, _GROUP_AND_OTHERS_WRITE = 0o002, 0o022


def make_run_folder(root: Path, *, exist_ok: bool = True) -> None:
    """Create a run folder that only its owner can use until `settle`. Its parents follow the umask. Errors: OSError."""
    with _umask(umask() | _OTHERS_WRITE):
        root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=exist_ok)


def settle(root: Path, *, group_readable: bool) -> None:
    """Set the modes of a run folder and its files; an earlier start may have had another umask or setting."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not (name.startswith(_SECRETS) and Path(folder) == root)]
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's file, or just removed
                _settle_one(path, group_readable)


def _settle_one(path: str, group_readable: bool) -> None:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return  # it may point to a file outside the run
    mode = stat.S_IMODE(mode)
    # setgid stays: on a shared file system it gives new files the project's group
    wanted = mode & 0o7700 | ((mode & 0o500) >> 3 if group_readable else 0)
    if wanted != mode:
        os.chmod(path, wanted)


def follow(root: Path) -> None:
    """Create files as open as the run folder `root` from now on; for processes that serve one run only."""
    os.umask(_mask_of(root))


@contextlib.contextmanager
def within(root: Path | None) -> Iterator[None]:
    """The same as `follow`, until the block ends. None keeps the umask. The umask applies to all threads."""
    with _umask(umask() if root is None else _mask_of(root)):
        yield


def keep_others_from_writing() -> None:
    """Make files outside of run folders follow the umask, but never writable by everyone."""
    os.umask(umask() | _OTHERS_WRITE)


def umask() -> int:
    """The umask of this process."""
    mask = os.umask(0o077)  # the umask can only be read by setting it
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
