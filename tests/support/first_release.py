"""The recorded run folder of the first release; see fixtures/README.md."""

import tarfile
from pathlib import Path

from repository import FIXTURES

from hpc_es.params.lab_model import LAB_MODELS, write_lab_model

ARCHIVE = FIXTURES / "first_release.tar.gz"
NUM_VERSIONS = 6
DIGESTS = (
    0xA5CCAE22AAD43910,
    0x731F029DD33A5FAA,
    0x5CEEBE6B84CD47AB,
    0x3662BB6C9CABDB80,
    0xA5D97B46F5525A21,
    0x7E9777C051C5DEC0,
    0x381CD643190389E8,
    0x45AB65D6009A9F54,
    0x72D00C3A4444B857,
)
"""Digests of theta_0 to theta_8, the run's end; theta_7 and theta_8 are still to be computed."""


def unpack(folder: Path) -> Path:
    """The run folder below `folder`, which has to be the working directory when it is used."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    write_lab_model(folder / "models" / "lab-10k", LAB_MODELS["lab-10k"])
    return folder / "runs" / "first-release"
