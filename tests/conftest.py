"""Fixtures that every test may use."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Machines that run tests are often busy, so a slow test is not a failure; pytest-timeout ends tests that hang.
hypothesis.settings.register_profile("hpc_es", deadline=None)
hypothesis.settings.load_profile("hpc_es")

ROOT = Path(__file__).resolve().parent.parent


CLUSTER = ("test_slurm_cluster.py", "test_faults_of_a_cluster")
"""Tests that use the Slurm cluster have one of these in their ids."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start files with slow tests first, so that all cores are used until the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file stay in one process, since they share what its fixtures start, and so do all of the cluster.

    xdist's own loadgroup does not group under pytest 9.2: it renames tests, and the names do not reach the scheduler.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_on_cluster = any(name in nodeid for name in CLUSTER)
            return "cluster" if is_on_cluster else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data outside of the repository: HPC_ES_DATA, HPC_ES_SHARED/data, or shared/data beside it."""
    shared = Path(os.environ.get("HPC_ES_SHARED") or ROOT.parent / "shared")
    data = Path(os.environ.get("HPC_ES_DATA") or shared / "data")
    if not data.is_dir():
        message = f"no data folder {data}; set HPC_ES_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return data


@pytest.fixture(scope="session")
def ipv6_loopback() -> str:
    """The address ::1; the test is skipped on machines without it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        message = f"this machine has no IPv6 loopback address: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return "::1"


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
