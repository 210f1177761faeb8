"""Fixtures that every test may use."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Machines that run tests are often busy, so time is no sign of a fault; pytest-timeout catches what hangs.
hypothesis.settings.register_profile("hpc_es", deadline=None)
hypothesis.settings.load_profile("hpc_es")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `pytest -n 2 --dist loadgroup`: a file's tests stay in one process, since they share what its fixtures start,
    and all tests of the Slurm cluster in one. Files with slow tests begin first, so that no core idles at the end."""

    def group(item: pytest.Item) -> str:
        return "slurm" if item.get_closest_marker("slurm") else item.path.name

    slow = {group(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group(item) not in slow)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data that is not part of the repository: HPC_ES_DATA, HPC_ES_SHARED/data, or shared/data beside it."""
    shared = Path(os.environ.get("HPC_ES_SHARED") or ROOT.parent / "shared")
    data = Path(os.environ.get("HPC_ES_DATA") or shared / "data")
    if not data.is_dir():
        message = f"no data folder {data}; set HPC_ES_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return data


@pytest.fixture
def quick_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """openai's client tries again at once, and there is no key."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001, raising=False)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01, raising=False)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[None]:
    """A real Slurm cluster with accounting, for tests marked slurm. It stays up where it was up before."""
    if os.geteuid() != 0:
        message = "a Slurm cluster can only be started by root (tools/slurm_cluster.sh)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    tool = str(ROOT / "tools" / "slurm_cluster.sh")
    was_up = subprocess.run([tool, "status"], capture_output=True).returncode == 0
    subprocess.run([tool, "start", "--with-accounting"], check=True)
    line = subprocess.run([tool, "env"], capture_output=True, text=True, check=True).stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", line.strip().removeprefix("export SLURM_CONF="))
        yield
        if not was_up:
            subprocess.run([tool, "stop"], check=True)
