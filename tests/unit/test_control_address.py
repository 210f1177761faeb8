"""Which address a head publishes, and that loopback is never chosen behind a cluster user's back."""

import socket
from pathlib import Path
from typing import Any

import pytest

from hpc_es.config.load import load
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


@pytest.mark.parametrize(
    ("host", "published"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("2001:DB8:0::7", "2001:db8::7"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fe80::7%lo", "fe80::7%lo"),
    ],
)
def test_an_address_that_someone_wrote_down_is_taken(host: str, published: str) -> None:
    assert resolve_host(TransportConfig(host=host), local=False) == published


def test_an_address_in_brackets_may_stand_on_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{run: {name: r, num_updates: 1}, model: {path: m}, task: {env: lab}}")
    assert load(file, ["transport.host=[fd00::2]"]).config.transport.host == "[fd00::2]"
    assert load(file, ["transport.host=[::1]"]).config.transport.host == "[::1]"
    assert load(file, ["task.options.x=[1:20:30]"]).config.task.options["x"] == ["1:20:30"]


def test_an_address_of_one_network_must_say_of_which() -> None:
    with pytest.raises(TransportError, match=r"'fe80::7' is a link-local address .*fe80::7%eth0; .*: .*lo"):
        resolve_host(TransportConfig(host="fe80::7"), local=False)


def test_a_host_name_that_leads_to_loopback_is_refused_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, node17=["127.0.1.1"])
    with pytest.raises(TransportError, match=r"'node17' is 127\.0\.1\.1 here, which no other node can reach"):
        resolve_host(TransportConfig(host="node17"), local=False)
    assert resolve_host(TransportConfig(host="node17"), local=True) == "127.0.1.1"


@pytest.mark.parametrize(
    ("addresses", "published"),
    [
        (["fd00::5"], "fd00::5"),
        (["fd00::5", "10.1.2.3"], "10.1.2.3"),
        (["127.0.1.1", "fd00::5"], "fd00::5"),
    ],
)
def test_a_host_name_may_lead_to_either_family_or_both(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], published: str
) -> None:
    names(monkeypatch, node17=addresses)
    assert resolve_host(TransportConfig(host="node17"), local=False) == published


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_means_any_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match="not the address of one machine"):
        resolve_host(TransportConfig(host=host), local=False)


@pytest.mark.parametrize(
    "host", ["no-such-node.invalid", "[10.1.2.3", "::1::", "fe80::1%no-such-interface", "a" * 300, "a..b"]
)
def test_a_name_without_address_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match=r"has no address .*give an address of this machine"):
        resolve_host(TransportConfig(host=host), local=False)


def test_an_interface_without_ipv4_gives_the_address_that_reaches_furthest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     ib0\n"
        "fd000000000000000000000000000002 04 40 00 82     ib0\n"
        "fe8000000000000000fc00fffe000009 05 40 20 80     ib1\n"
        "00000000000000000000000000000001 01 80 10 80      lo\n"
    )
    monkeypatch.setattr(address, "_IPV6_ADDRESSES", listed)
    assert resolve_host(TransportConfig(interface="ib0"), local=False) == "fd00::2"
    assert resolve_host(TransportConfig(interface="ib1"), local=False) == "fe80::fc:ff:fe00:9%ib1"
    assert resolve_host(TransportConfig(interface="lo"), local=False) == "127.0.0.1"
    assert address.address_for_peers("::1", "lo") == "::1", "of the head's family"


def test_a_machine_without_an_ipv4_route_uses_its_ipv6_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_ipv6(host: str) -> str:
        if ":" in host:
            return "fd00::2"
        raise OSError("Network is unreachable")

    monkeypatch.setattr(address, "address_towards", only_ipv6)
    assert resolve_host(TransportConfig(), local=False) == "fd00::2"


def names(monkeypatch: pytest.MonkeyPatch, **known: list[str]) -> None:
    """Make the resolver know the given names."""
    real = socket.getaddrinfo

    def look_up(name: str, *arguments: Any, **options: Any) -> list[Any]:
        return [entry for address in known.get(name, [name]) for entry in real(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
