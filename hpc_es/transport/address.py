"""Which address a head publishes, and how addresses of both families are written.

An address is numeric text: 10.1.2.3, fd00::2, or fe80::2%ib0 where one is only valid on one network. Invariant: on a
cluster the head's is one that other nodes can reach; loopback only where someone wrote it down.
"""

import fcntl
import ipaddress
import logging
import socket
import struct
from pathlib import Path
from typing import Any

from hpc_es.config.schema import TransportConfig
from hpc_es.errors import TransportError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation, stand-ins for any address beyond the networks of this machine."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def resolve_host(config: TransportConfig, local: bool) -> str:
    """The address to bind and to publish: `host`, else that of `interface`, else loopback for a local run, else that of
    the default route. IPv4 where there are both.

    Errors: TransportError when there is none, or when a name leads to loopback although workers run elsewhere.
    """
    if config.host is not None:
        return _address_of_host(config.host, local)
    if config.interface is not None:
        return _address_of_interface(config.interface)
    return LOOPBACK if local else _address_of_default_route()


def address_towards(host: str) -> str:
    """The address by which this machine would reach the address `host`. Errors: OSError when there is no way."""
    with socket.socket(family(host), socket.SOCK_DGRAM) as probe:
        probe.connect(_socket_address(host, 9))  # a datagram socket: this sends nothing, it only picks the route
        return _text(probe.getsockname())


def address_for_peers(host: str, interface: str | None) -> str:
    """Where this machine is reached by others of a group whose head is at `host`: the address of `interface` of the
    same family, else (or where this machine has no such interface) the one on the way to the head.

    Errors: OSError when there is no way.
    """
    if interface is not None:
        try:
            return _address_of_interface(interface, family(host))
        except TransportError as error:
            log.warning("%s; taking the address on the way to %s", error, host)
    return address_towards(host)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def with_port(address: str, port: int | str) -> str:
    """As URLs and endpoints of ZeroMQ have it: 10.1.2.3:80, [::1]:80."""
    return f"[{address}]:{port}" if family(address) == socket.AF_INET6 else f"{address}:{port}"


def listen(address: str) -> socket.socket:
    """A socket that listens at a free port of this address, and of no other. Errors: OSError."""
    return socket.create_server(_socket_address(address, 0), family=family(address))


def _socket_address(address: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]


def _text(socket_address: tuple[Any, ...]) -> str:
    return socket.getnameinfo(socket_address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def _address_of_host(host: str, local: bool) -> str:
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        candidates = [ipaddress.ip_address(_text(entry[4])) for entry in found]
    except (OSError, ValueError) as error:  # the latter for what cannot be a name at all
        raise TransportError(
            f"transport.host={host!r} has no address ({error}); give an address of this machine"
        ) from error
    is_name = name != "localhost" and not _is_address(name)
    # /etc/hosts often maps a machine's own name to 127.0.1.1, which every other node would take for itself
    is_misleading = is_name and not local
    address = min(candidates, key=lambda address: (address.is_loopback and is_misleading, address.version))
    if address.is_unspecified:
        raise TransportError(f"transport.host={host!r} cannot be published; give one address of this machine")
    if address.is_loopback and is_misleading:
        raise TransportError(
            f"transport.host={host!r} is {address} here, which no other node can reach; give the address that they "
            f"use, or set transport.interface ({_interfaces()})"
        )
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local and not address.scope_id:
            raise TransportError(
                f"transport.host={host!r} is valid on one network only and must say on which, as in {address}%eth0; "
                f"interfaces here: {_interfaces()}"
            )
        address = address.ipv4_mapped or address
    return str(address)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _address_of_interface(interface: str, wanted: socket.AddressFamily | None = None) -> str:
    """IPv4 unless IPv6 is wanted, or there is no other."""
    address = _ipv6_of(interface) if wanted == socket.AF_INET6 else _ipv4_of(interface)
    if address is None and wanted is None:
        address = _ipv6_of(interface)
    if address is None:
        kind = {None: "", socket.AF_INET: " IPv4", socket.AF_INET6: " IPv6"}[wanted]
        raise TransportError(
            f"transport.interface={interface!r} has no{kind} address here; interfaces here: {_interfaces()}"
        )
    return address


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str | None:
    """The one that reaches furthest. The kernel lists: address, index, prefix, scope (0: global), flags, interface."""
    try:
        lines = [line.split() for line in _IPV6_ADDRESSES.read_text(encoding="utf-8").splitlines()]
    except OSError:  # a kernel without IPv6
        return None
    found = [(int(scope, 16), digits) for digits, _, _, scope, _, name in lines if name == interface]
    if not found:
        return None
    address = ipaddress.IPv6Address(bytes.fromhex(min(found)[1]))
    return f"{address}%{interface}" if address.is_link_local else str(address)


def _address_of_default_route() -> str:
    for anywhere in _ANYWHERE:
        try:
            return address_towards(anywhere)
        except OSError as error:
            reason = error
    raise TransportError(
        f"this machine has no default route ({reason}); set transport.host, or transport.interface ({_interfaces()})"
    ) from reason


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
