"""A file system that is nearly full: a tmpfs of one MiB that holds `ballast`; remove that to make room."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount it. If mounting is not allowed, the test is skipped; tests with RLIMIT_FSIZE run anywhere."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs here: {getattr(error, 'stderr', error)}; a test with RLIMIT_FSIZE stands in")
    try:
        (disk / "ballast").write_bytes(bytes(640 * 1024))
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
