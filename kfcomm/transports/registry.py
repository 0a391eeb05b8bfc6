"""Transports by name: where each one works, when ``auto`` takes it, and the module that makes its links.

To add a transport, write a module like ``stream`` or ``shm.endpoint`` and add its line to `TRANSPORTS`. The module is
imported when the transport is first asked for; it has these two functions::

    def why_unsupported() -> str | None: ...                              why it cannot work in this process
    def open_endpoint(surroundings: Surroundings) -> Endpoint | None: ... None: no peer can be reached by it
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from kfcomm.core.handshake import Purpose

if TYPE_CHECKING:
    from kfcomm.transports.base import Endpoint, Surroundings

AUTO = "auto"
"""The setting that leaves the choice to kfcomm: for each peer the preferred transport that reaches it."""


class TransportModule(Protocol):
    """Functions of a module that implements a transport."""

    def why_unsupported(self) -> str | None:
        """Return why this process cannot use it, or None."""

    def open_endpoint(self, surroundings: Surroundings) -> Endpoint | None:
        """Open this rank's end of all its links; None if no peer can be reached by it."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One kind of links.

    Attributes:
        name: value of the setting ``transport``.
        title: its name in sentences.
        about: where it works, for ``kfcomm env``.
        module: implements it, see `TransportModule`; empty for one that carries no links.
        is_local: it joins processes of one host, whose connections are Unix sockets; else they are TCP.
        preference: ``auto`` takes the transport with the highest that reaches a peer.
        purpose: number in the handshake of its connections; transports with the same purpose share an endpoint. See
            `kfcomm.core.handshake.Purpose` for those in use.
    """

    name: str
    title: str
    about: str
    module: str = ""
    is_local: bool = False
    preference: int = 0
    purpose: int = Purpose.DATA

    @property
    def has_links(self) -> bool:
        """Whether it carries links between ranks, rather than device memory alone."""
        return bool(self.module)

    def why_unsupported(self) -> str | None:
        """Return why this process cannot use it, or None."""
        return self._loaded().why_unsupported() if self.has_links else None

    def open_endpoint(self, surroundings: Surroundings) -> Endpoint | None:
        """Open this rank's end of all its links; None if no peer can be reached by it."""
        return self._loaded().open_endpoint(surroundings)

    def load(self) -> None:
        """Import its implementation, which the first use does otherwise."""
        if self.has_links:
            self._loaded()

    def _loaded(self) -> TransportModule:
        return cast("TransportModule", importlib.import_module(self.module))


TCP = Transport("tcp", "TCP", "between any hosts", "kfcomm.transports.stream")
"""Answered on every rank, whatever its setting: the setting of a peer may ask for it."""

TRANSPORTS = (
    TCP,
    Transport(
        "unix", "Unix sockets", "between processes of one host", "kfcomm.transports.stream", is_local=True, preference=1
    ),
    Transport(
        "shm", "shared memory", "between processes of one host, through memory of both",
        "kfcomm.transports.shm.endpoint", is_local=True, preference=2, purpose=Purpose.SHARED_MEMORY,
    ),
    Transport("nccl", "NCCL", "between GPUs"),
    Transport("ipc", "CUDA IPC", "between GPUs of one host, or processes that share one"),
)  # fmt: skip

LINKS = (AUTO, *(transport.name for transport in TRANSPORTS if transport.has_links))
"""Settings that choose the links between ranks."""
TRANSPORT_NAMES = (*LINKS, *(transport.name for transport in TRANSPORTS if not transport.has_links))
"""All values of the setting ``transport``."""


def named(name: str) -> Transport:
    """Return the transport of this name. Raises `KeyError`: unknown name."""
    return {transport.name: transport for transport in TRANSPORTS}[name]


def selected(links: str) -> tuple[Transport, ...]:
    """Return the transports that a setting of `LINKS` allows, the preferred one first."""
    if links != AUTO:
        return (named(links),)
    candidates = (transport for transport in TRANSPORTS if transport.has_links)
    return tuple(sorted(candidates, key=lambda transport: -transport.preference))
