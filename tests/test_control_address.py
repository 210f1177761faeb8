"""Which address a head publishes, and that loopback is never chosen behind a cluster user's back."""

import socket

import pytest

from hpc_es.config.schema import TransportConfig
from hpc_es.errors import TransportError
from hpc_es.transport import address
from hpc_es.transport.address import resolve_host


def test_a_local_run_uses_loopback() -> None:
    assert resolve_host(TransportConfig(), local=True) == "127.0.0.1"


def test_a_cluster_run_uses_the_address_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "address_towards", lambda host: "10.1.2.3")
    assert resolve_host(TransportConfig(), local=False) == "10.1.2.3"


def test_without_a_default_route_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_way(host: str) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(address, "address_towards", no_way)
    with pytest.raises(TransportError, match=r"no default route.*transport\.host.*lo"):
        resolve_host(TransportConfig(), local=False)


@pytest.mark.parametrize("local", [True, False])
def test_an_interface_gives_its_address(local: bool) -> None:
    assert resolve_host(TransportConfig(interface="lo"), local) == "127.0.0.1"


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(TransportError, match=r"transport\.interface='ib9'.*interfaces here: .*lo"):
        resolve_host(TransportConfig(interface="ib9"), local=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3"])
def test_an_address_that_someone_wrote_down_is_taken(host: str) -> None:
    assert resolve_host(TransportConfig(host=host), local=False) == {"localhost": "127.0.0.1"}.get(host, host)


def test_a_host_name_that_leads_to_loopback_is_refused_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(TransportError, match=r"'node17' is 127\.0\.1\.1 here, which no other node can reach"):
        resolve_host(TransportConfig(host="node17"), local=False)
    assert resolve_host(TransportConfig(host="node17"), local=True) == "127.0.1.1"


def test_an_address_that_means_any_is_refused() -> None:
    with pytest.raises(TransportError, match="cannot be published"):
        resolve_host(TransportConfig(host="0.0.0.0"), local=False)


def test_a_name_without_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(TransportError, match="has no IPv4 address"):
        resolve_host(TransportConfig(host="no-such-node"), local=False)
