"""This host: its name, its addresses, and where its processes listen.

Only the chosen address is bound. By default it is the kernel's source address towards the rendezvous: connecting a UDP
socket queries the routing table and sends nothing.
"""

from __future__ import annotations

import array
import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kfcomm.errors import ConfigError, RendezvousError

LOOPBACK = "127.0.0.1"

if sys.platform == "linux":
    import fcntl

_SIOCGIFCONF = 0x8912  # netdevice(7)
_MAX_INTERFACES = 512
_IFREQ_NBYTES = 40  # struct ifreq on 64-bit Linux: name[16], then a union of 24 bytes


class Interface(NamedTuple):
    """One address of one network interface of this host."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


def interfaces() -> tuple[Interface, ...]:
    """All IPv4 and IPv6 addresses of this host, except link-local ones."""
    found = (*_ipv4(), *_ipv6())
    # A link-local address needs a scope, which peers of another interface do not have.
    return tuple(each for each in found if not ipaddress.ip_address(each.address).is_link_local)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address or ``localhost``."""
    return address == "localhost" or (is_address(address) and ipaddress.ip_address(address).is_loopback)


def is_address(text: str) -> bool:
    """Whether it is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_local(address: str) -> bool:
    """Whether a socket of this host can be bound to the IP address ``address``."""
    with contextlib.closing(socket.socket(_family(address), socket.SOCK_DGRAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
                return False
            raise
    return True


def choose_address(spec: str | None, towards: tuple[str, int] | None) -> str:
    """Address of this host to listen at.

    Args:
        spec: name of an interface, an address or a network in CIDR notation; None to follow the route.
        towards: host and port of the rendezvous; None for a single process, which uses loopback.

    Raises:
        ConfigError: ``spec`` matches no address of this host, or the rendezvous is unreachable; lists the addresses.
        NameNotFound: the name in ``towards`` does not resolve.
    """
    if spec is None:
        return LOOPBACK if towards is None else _by_route(towards)
    try:
        network = ipaddress.ip_network(spec, strict=False)
    except ValueError:
        matching = [each.address for each in interfaces() if each.name == spec]
    else:
        matching = _within(network)
    if not matching:
        raise ConfigError(f"interface={spec!r} matches no address of this host; there are: {_listed()}")
    return _same_family(matching, towards)


def _within(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> list[str]:
    address = str(network.network_address)
    # all of 127.0.0.0/8 can be bound, though only 127.0.0.1 is listed
    if network.num_addresses == 1 and is_local(address):
        return [address]
    return [each.address for each in interfaces() if ipaddress.ip_address(each.address) in network]


def _same_family(addresses: list[str], towards: tuple[str, int] | None) -> str:
    six = towards is not None and ":" in towards[0]
    return min(addresses, key=lambda each: (":" in each) != six)


def _by_route(towards: tuple[str, int]) -> str:
    cause: OSError | None = None
    for address in look_up(*towards):
        with contextlib.closing(socket.socket(_family(address[0]), socket.SOCK_DGRAM)) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                cause = error
            else:
                return str(probe.getsockname()[0])
    raise ConfigError(f"no route to the rendezvous {towards[0]} ({cause}); set interface to one of: {_listed()}")


class NameNotFound(RendezvousError):
    """The name of a host does not resolve, or not yet."""


def look_up(host: str, port: int | None = None) -> list[tuple[Any, ...]]:
    """Socket addresses of a host, by the system's preference; at least one.

    Raises:
        ConfigError: it is not a name of a host.
        NameNotFound: the name does not resolve.
    """
    try:
        return [row[4] for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except UnicodeError as error:
        raise ConfigError(f"{host!r} is not the name of a host") from error
    except OSError as error:
        raise NameNotFound(f"the host {host!r} does not resolve: {error.strerror}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listed() -> str:
    return ", ".join(map(str, interfaces())) or "none"


def host_and_port(url: str, name: str = "store") -> tuple[str, int]:
    """Host and port of a store's URL. Raises `ConfigError`: the URL is not ``http://host:port``."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or url.rstrip("/") != store_url(host, port):
        raise ConfigError(f"{name}={url!r} must look like http://10.0.0.1:29600")
    return host, port


def store_url(host: str, port: int) -> str:
    """``http://host:port``, with the brackets that an IPv6 address needs."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ipv4() -> list[Interface]:
    """By ``SIOCGIFCONF``, which lists every address, aliases included (netdevice(7))."""
    if sys.platform != "linux":
        return [Interface("lo", LOOPBACK)]
    entries = array.array("B", bytes(_MAX_INTERFACES * _IFREQ_NBYTES))
    place, nbytes = entries.buffer_info()
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", nbytes, place))
    used: int = struct.unpack("iP", answer)[0]
    raw = entries.tobytes()
    rows = (raw[at : at + _IFREQ_NBYTES] for at in range(0, used, _IFREQ_NBYTES))
    return [Interface(row[:16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(row[20:24])) for row in rows]


def _ipv6() -> list[Interface]:
    """From ``/proc/net/if_inet6``: address, index, prefix, scope, flags, name."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [Interface(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in rows]


def hostname() -> str:
    """Name of this host: 1 to 255 printable characters; others appear as ``?``."""
    name = socket.gethostname()[:255]  # invalid UTF-8 appears as surrogates, which are not printable
    return "".join(one if one.isprintable() else "?" for one in name) or "(no name)"


BACKLOG = 4096
"""Length of the queue: all ranks of a host connect at once. The kernel may allow fewer."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at ``host`` (an IP address) and ``port`` (0: any that is free).

    Raises:
        RendezvousError: the port is in use, or the address is not this host's.
    """
    family = _family(host)
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RendezvousError(
            f"the store cannot listen at {store_url(host, port)}: {os.strerror(error.errno or 0)}; "
            "another port can be set with KFCOMM_PORT, or --port of kfcomm run"
        ) from error


def url_of(listener: socket.socket) -> str:
    """``http://address:port`` of a listening store."""
    host, port = listener.getsockname()[:2]
    return store_url(host, port)
