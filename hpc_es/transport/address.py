"""Which address a head publishes.

Invariant: on a cluster it is one that other nodes can reach; 127.0.0.1 only where someone wrote it down.
"""

import fcntl
import logging
import socket
import struct

from hpc_es.config.schema import TransportConfig
from hpc_es.errors import TransportError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # TEST-NET-1, a stand-in for any address beyond the networks of this machine


def resolve_host(config: TransportConfig, local: bool) -> str:
    """The IPv4 address to bind and to publish: `host`, else that of `interface`, else loopback for a local run,
    else that of the default route.

    Errors: TransportError when there is none, or when a name leads to loopback although workers run elsewhere.
    """
    if config.host is not None:
        return _address_of_host(config.host, local)
    if config.interface is not None:
        return _address_of_interface(config.interface)
    return LOOPBACK if local else _address_of_default_route()


def address_towards(host: str) -> str:
    """The address by which this machine would reach `host`. Errors: OSError when there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: this sends nothing, it only picks the route
        return str(probe.getsockname()[0])


def address_for_peers(host: str, interface: str | None) -> str:
    """Where this machine is reached by others of a group whose head is at `host`: the address of `interface`, else (or
    where this machine has no such interface) the one on the way to the head. Errors: OSError when there is no way.
    """
    if interface is not None:
        try:
            return _address_of_interface(interface)
        except TransportError as error:
            log.warning("%s; taking the address on the way to %s", error, host)
    return address_towards(host)


def _address_of_host(host: str, local: bool) -> str:
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise TransportError(
            f"transport.host={host!r} has no IPv4 address ({error}); give an address of this machine"
        ) from error
    if address == "0.0.0.0":
        raise TransportError(f"transport.host={host!r} cannot be published; give one address of this machine")
    # /etc/hosts often maps a machine's own name to 127.0.1.1, which every other node would take for itself
    if address.startswith("127.") and not local and host not in ("localhost", address):
        raise TransportError(
            f"transport.host={host!r} is {address} here, which no other node can reach; give the address that they "
            f"use, or set transport.interface ({_interfaces()})"
        )
    return address


def _address_of_interface(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise TransportError(
                f"transport.interface={interface!r} has no IPv4 address ({error}); interfaces here: {_interfaces()}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _address_of_default_route() -> str:
    try:
        return address_towards(_ANYWHERE)
    except OSError as error:
        raise TransportError(
            f"this machine has no default route ({error}); set transport.host, or transport.interface ({_interfaces()})"
        ) from error


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
