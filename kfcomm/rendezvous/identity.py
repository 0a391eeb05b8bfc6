"""Identity of a process: its host, its stable uid, and its description for peers.

Two processes share a host exactly if both the boot id and the network namespace are the same: only then can Unix
sockets and shared memory connect them, and only then is loopback shared. A `PeerInfo` from the wire has been checked
field by field; its texts are printable, for use in messages.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from kfcomm.arrays.devices import DeviceReport
from kfcomm.common.version import HOW_TO_AGREE, PROTOCOL_VERSION, __version__, versions
from kfcomm.errors import RemoteProtocolError
from kfcomm.rendezvous.host import hostname
from kfcomm.rendezvous.saved_costs import host_name, is_plausible, is_row, row_of, saved
from kfcomm.transports.registry import TRANSPORT_NAMES
from kfcomm.types import Costs

MAX_RANKS = 1 << 16
MAX_WIRE_NBYTES = 16384
_REPORT_LENGTHS = {"kind": 16, "uuid": 64, "model": 128, "backend": 16, "lack": 400}
"""Most characters of each text in a `DeviceReport`."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Description of a process for its peers."""

    rank: int
    uid: str  # stable id of the process; different for any two processes
    address: str  # IP address at which it listens
    port: int  # TCP port at which it listens
    unix: str | None  # path of its Unix socket, or abstract name with a leading NUL; None without one
    host: str  # see `host_id`
    hostname: str  # for messages only
    pid: int  # for messages only
    num_cpus: int  # number of processors of its host; 0 if unknown
    costs: Costs  # measured costs of messages on its host, without rates
    links: bytes  # measured links from its host, see `saved_costs.row_of`
    versions: tuple[str, int]  # version of kfcomm, number of the protocol
    transport: str  # its setting, on which ranks must agree for device memory
    checksum: bool  # whether it verifies checksums over TCP
    device: DeviceReport  # its device, or the reason for the lack of one

    @classmethod
    def here(
        cls, *, rank: int, address: str, port: int, unix: str | None = None, device: DeviceReport | None = None
    ) -> PeerInfo:
        """This process as ``rank``, listening at ``address`` and ``port`` (and ``unix``), with default settings.

        Texts of the device are made printable, and cut to a bounded length.
        """
        kept = saved()
        return cls(
            rank=rank,
            uid=process_uid(rank),
            address=address,
            port=port,
            unix=unix,
            host=host_id(),
            hostname=hostname(),
            pid=os.getpid(),
            num_cpus=os.cpu_count() or 0,
            costs=kept.costs,
            links=row_of(kept.links, host_name(hostname(), address), kept.racks),
            versions=versions(),
            transport="auto",
            checksum=False,
            device=_presentable(device or DeviceReport()),
        )

    def describe(self) -> str:
        """The process in a message: ``rank 3 (node7, pid 4242)``."""
        return f"rank {self.rank} ({self.hostname}, pid {self.pid})"

    @property
    def host_name(self) -> str:
        """Its host, as measured links know it."""
        return host_name(self.hostname, self.address)

    def to_wire(self) -> bytes:
        """At most `MAX_WIRE_NBYTES` bytes of msgpack."""
        # `astuple` copies deeply and takes five times as long, once per rank on every rank
        encoded: bytes = msgpack.packb((*_values(self)[:-1], _values(self.device)))
        return encoded

    @classmethod
    def from_wire(cls, data: bytes) -> PeerInfo:
        """The inverse of `to_wire`.

        Raises:
            RemoteProtocolError: the data is too long, not msgpack, or a field has an invalid type or value.
        """
        if len(data) > MAX_WIRE_NBYTES:
            raise RemoteProtocolError(f"a peer's description has {len(data)} bytes, more than {MAX_WIRE_NBYTES}")
        try:
            values = msgpack.unpackb(data, use_list=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"a peer's description is not msgpack: {error}") from error
        if not isinstance(values, tuple) or len(values) != len(cls.__slots__):
            # the number of fields has changed with the protocol
            raise RemoteProtocolError(
                f"a peer's description needs {len(cls.__slots__)} fields, as of kfcomm {__version__} (protocol "
                f"{PROTOCOL_VERSION}){_told_version(values)}. {HOW_TO_AGREE}"
            )
        found = dict(zip(cls.__slots__, values, strict=True))
        for name, value in found.items():
            _CHECKS[name](value)
        return cls(**found | {"costs": Costs(*found["costs"]), "device": DeviceReport(*found["device"])})


def _told_version(values: object) -> str:
    """Version of a peer whose description has other fields, if one of them looks like a version."""
    for value in values if isinstance(values, tuple) else ():
        match value:
            case (str(version), int(protocol)) if version.isprintable():
                return f"; it runs kfcomm {version[:64]} (protocol {protocol})"
    return ""


def _values(record: PeerInfo | DeviceReport) -> tuple[Any, ...]:
    """The fields of a record, in their order."""
    return tuple(getattr(record, name) for name in record.__slots__)


def _check_costs(value: object) -> None:
    if not is_plausible(value):
        raise RemoteProtocolError("costs of a peer must be as many numbers of seconds as there are, or unknown")


def _check_links(value: object) -> None:
    if not is_row(value):
        raise RemoteProtocolError("links of a peer must be rates above 0 and latencies, packed")


def _check_versions(value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise RemoteProtocolError("versions of a peer must be a version and a protocol number")
    _check_text("version", value[0], 64)
    _check_integer("protocol", value[1], 0, 2**31 - 1)


def _check_transport(value: object) -> None:
    if value not in TRANSPORT_NAMES:
        raise RemoteProtocolError(f"transport of a peer must be one of {', '.join(TRANSPORT_NAMES)}")


def _check_checksum(value: object) -> None:
    if not isinstance(value, bool):
        raise RemoteProtocolError("checksum of a peer must be true or false")


def _check_device(values: object) -> None:
    """Check the fields of a `DeviceReport`, in their order, and that those without a device are empty."""
    if not isinstance(values, tuple) or len(values) != len(DeviceReport.__slots__):
        raise RemoteProtocolError(f"device of a peer needs {len(DeviceReport.__slots__)} fields")
    given = dict(zip(DeviceReport.__slots__, values, strict=True))
    for name, value in given.items():
        if name in _REPORT_LENGTHS:
            _check_text(f"device's {name}", value, _REPORT_LENGTHS[name], least=0)
        else:
            _check_integer(f"device's {name}", value, 0, 2**31 - 1)
    if bool(given["kind"]) != bool(given["uuid"]) or (given["backend"] and not given["kind"]):
        raise RemoteProtocolError("device of a peer needs a kind and a uuid, and without them has no backend")


def _presentable(report: DeviceReport) -> DeviceReport:
    """The same report with texts that peers accept."""

    def printable(text: str, limit: int) -> str:
        plain = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
        return plain if len(plain) <= limit else plain[: limit - 1] + "…"

    texts: dict[str, Any] = {name: printable(getattr(report, name), limit) for name, limit in _REPORT_LENGTHS.items()}
    return replace(report, **texts)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RemoteProtocolError(f"{name} of a peer must be an integer from {low} to {high}")


def _check_text(name: str, value: object, limit: int, least: int = 1) -> str:
    if not isinstance(value, str) or not least <= len(value) <= limit or not value.isprintable():
        raise RemoteProtocolError(f"{name} of a peer must be {least} to {limit} printable characters")
    return value


def _check_address(value: str) -> None:
    try:
        ipaddress.ip_address(value)
    except ValueError as error:
        raise RemoteProtocolError("address of a peer must be an IP address") from error


def _check_unix(value: object) -> None:
    if value is not None:
        _check_text("unix", value.removeprefix("\0") if isinstance(value, str) else value, 107)


_CHECKS: dict[str, Callable[[object], object]] = {
    "rank": lambda value: _check_integer("rank", value, 0, MAX_RANKS - 1),
    "uid": lambda value: _check_text("uid", value, 64),
    "address": lambda value: _check_address(_check_text("address", value, 45)),
    "port": lambda value: _check_integer("port", value, 1, 65535),
    "unix": _check_unix,
    "host": lambda value: _check_text("host", value, 128),
    "hostname": lambda value: _check_text("hostname", value, 255),
    "pid": lambda value: _check_integer("pid", value, 1, 2**31 - 1),
    "num_cpus": lambda value: _check_integer("number of processors", value, 0, 2**31 - 1),
    "costs": _check_costs,
    "links": _check_links,
    "versions": _check_versions,
    "transport": _check_transport,
    "checksum": _check_checksum,
    "device": _check_device,
}
"""By field of a `PeerInfo`; each raises `RemoteProtocolError` for a value that no peer of this version sends."""


def host_id() -> str:
    """Id of this host: equal for two processes exactly if they share boot id and network namespace.

    Without either (not on Linux), the host's name is used.
    """
    boot_id = _boot_id()
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{boot_id}/{namespace}"


def process_uid(rank: int) -> str:
    """32 hexadecimal digits, constant in this process and unique to it.

    Made from boot id, process namespace, process id and start time, so that a process that joins again is recognised,
    and a forked child is another one. ``rank`` distinguishes ranks that share a process.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        # field 22, counted after the command's name, which may itself contain spaces and parentheses
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        namespace, started = 0, ""
    text = f"{_boot_id()}/{namespace}/{os.getpid()}/{started}/{rank}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return hostname()
