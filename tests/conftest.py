"""Fixtures that every test may use."""

import os
from pathlib import Path

import hypothesis
import pytest

# Machines that run tests are often busy, so time is no sign of a fault; pytest-timeout catches what hangs.
hypothesis.settings.register_profile("hpc_es", deadline=None)
hypothesis.settings.load_profile("hpc_es")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data that is not part of the repository: HPC_ES_SHARED, or shared/ beside the repository."""
    shared = Path(os.environ.get("HPC_ES_SHARED") or ROOT.parent / "shared")
    if not (shared / "data").is_dir():
        message = f"no data folder in {shared}; set HPC_ES_SHARED"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return shared / "data"
