"""Read the tables of a run from run.h5 and from its journal, and compare them."""

import os
import shutil
from pathlib import Path

import h5py
import pandas as pd
import pytest

import hpc_es.store
from hpc_es.store.read import Run
from hpc_es.store.schema import TABLES


def tables(run: Run) -> dict[str, pd.DataFrame]:
    return {table: getattr(run, table) for table in TABLES}


def from_journal(root: Path) -> dict[str, pd.DataFrame]:
    """The tables that the journal alone gives, in memory."""
    copy = root.with_name(root.name + "-journal-only")
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.h5"), dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="built from the journal"):
        return tables(hpc_es.store.read(copy))


def assert_same(left: dict[str, pd.DataFrame], right: dict[str, pd.DataFrame]) -> None:
    for table in TABLES:
        pd.testing.assert_frame_equal(left[table], right[table], obj=table)


def as_first_release(path: Path) -> Path:
    """Without checksums of its pages: HDF5 cuts off what it does not know when it writes to a file."""
    with h5py.File(path, "r+", locking=False) as file:
        del file.attrs["page_checksums"]
    os.utime(path, (0, 0))
    return path
