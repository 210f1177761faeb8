"""Choose the address that a head publishes, and format IPv4 and IPv6 addresses.

An address is numeric text: 10.1.2.3, fd00::2, or fe80::2%ib0 for an address that is valid on one network only.
Invariant: on a cluster the head publishes an address that other nodes can reach. It publishes a loopback address only
if the configuration says so.
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
"""Addresses reserved for documentation. The route to them is the default route."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def resolve_host(config: TransportConfig, local: bool) -> str:
    """Return the address to bind and to publish. IPv4 is preferred to IPv6.

    In this order: `host`, the address of `interface`, loopback for a local run, the address of the default route.
    Errors: TransportError if there is none, or if a host name resolves to loopback although workers run on other nodes.
    """
    if config.host is not None:
        return _address_of_host(config.host, local)
    if config.interface is not None:
        return _address_of_interface(config.interface)
    return LOOPBACK if local else _address_of_default_route()


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`. Errors: OSError if there is no route."""
    with socket.socket(family(host), socket.SOCK_DGRAM) as probe:
        probe.connect(_socket_address(host, 9))  # a datagram socket: this sends nothing, it only picks the route
        return _text(probe.getsockname())


def address_for_peers(host: str, interface: str | None) -> str:
    """Return the address at which other members of a group reach this machine; the group's head is at `host`.

    This is the address of `interface` in the same family. Without an interface, or if this machine does not have it,
    it is this machine's address on the route to the head. Errors: OSError if there is no route.
    """
    if interface is not None:
        try:
            return _address_of_interface(interface, family(host))
        except TransportError as error:
            log.warning("%s; using the address on the route to %s", error, host)
    return address_towards(host)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def with_port(address: str, port: int | str) -> str:
    """Format address and port as in URLs and ZeroMQ endpoints: 10.1.2.3:80, [::1]:80."""
    return f"[{address}]:{port}" if family(address) == socket.AF_INET6 else f"{address}:{port}"


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address only. Errors: OSError."""
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
    except (OSError, ValueError) as error:  # ValueError: not a valid host name
        raise TransportError(
            f"transport.host={host!r} has no address ({error}); give an address of this machine"
        ) from error
    is_name = name != "localhost" and not _is_address(name)
    # /etc/hosts often maps a machine's own name to 127.0.1.1, with which other nodes would connect to themselves
    is_misleading = is_name and not local
    address = min(candidates, key=lambda address: (address.is_loopback and is_misleading, address.version))
    if address.is_unspecified:
        raise TransportError(
            f"transport.host={host!r} is not the address of one machine; give an address of this machine"
        )
    if address.is_loopback and is_misleading:
        raise TransportError(
            f"transport.host={host!r} is {address} here, which no other node can reach; give the address that other "
            f"nodes use, or set transport.interface ({_interfaces()})"
        )
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local and not address.scope_id:
            raise TransportError(
                f"transport.host={host!r} is a link-local address and must name its interface, as in {address}%eth0; "
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
    """Return the address of an interface in the wanted family; by default IPv4 if it has one, else IPv6."""
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
    """Return the IPv6 address with the widest scope.

    Columns of /proc/net/if_inet6: address, index, prefix length, scope (0: global), flags, interface.
    """
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
