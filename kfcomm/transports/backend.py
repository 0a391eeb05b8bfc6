"""Collective backends: they run whole collectives on devices, matched by order alone.

A *backend* is this rank's end of one group of devices. The n-th launch of a rank meets the n-th of every other; the
layers above agree on the order (`core.launch_order`), so that a backend never has to match names.

Invariants: a launch only puts work on a stream, and returns. Every rank launches the same verbs on parts of
the same sizes, in the same order. After ``abort`` every launch ends by itself, and its results are void.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kfcomm.arrays.devices.base import Device, DeviceReport, Flat, Stream
from kfcomm.arrays.devices.routes import Choice, choose
from kfcomm.types import Layout, Op, Verb


class Part(NamedTuple):
    """One buffer of a launch: flat memory that is read, and flat memory for the result.

    ======================  ==========  ==================================  =======================
    verb                    source      target                              may be the same memory
    ======================  ==========  ==================================  =======================
    all_reduce              n elements  n elements                          yes
    reduce                  n elements  n elements on the root, else None   yes
    broadcast               n elements  n elements (source: of the root)    yes
    all_gather              n elements  n · size elements                   no
    gather                  n elements  n · size on the root, else None     no
    reduce_scatter          n · size    n elements                          no
    all_to_all              n · size    n · size elements                   no
    ======================  ==========  ==================================  =======================
    """

    source: Flat
    target: Flat | None


class CollectiveBackend(Protocol):
    """This rank's end of one group. Used by one thread at a time, but for ``abort``."""

    def launch(self, verb: Verb, parts: Sequence[Part], op: Op | None, root: int, stream: Stream) -> None:
        """Put one collective on the stream; several parts are launched as one.

        Args:
            verb: one that ``BackendMaker.supports``.
            parts: at least one; all of one dtype.
            op: of all_reduce, reduce and reduce_scatter; else None.
            root: rank in the group, of reduce, broadcast and gather; else -1.
            stream: of this rank's device.

        Raises:
            TransportError: the backend refuses; the group cannot be used any more.
        """

    def failure(self) -> str | None:
        """Return an error that has occurred since, if any; polled now and then."""

    def abort(self) -> None:
        """End every launch now. Callable on any thread; may block for a while; never raises."""

    def close(self) -> None:
        """Release everything, after the last launch is done. Never raises."""


class BackendMaker(Protocol):
    """Makes backends of one kind."""

    name: str
    """Name in one word, as ``nccl``."""

    def supports(self, verb: Verb, dtype: np.dtype[Any], op: Op | None) -> bool:
        """Return whether it can carry this out; the same on every rank with the same versions."""

    def identity(self) -> bytes:
        """Make the identity of a new group, by which its ranks find each other; one rank makes it for all.

        Raises:
            TransportError: it cannot be made here.
        """

    def connect(self, identity: bytes, rank: int, size: int, device: Device) -> CollectiveBackend:
        """Meet the other ranks. Blocks until all are there; not called on an event loop.

        Raises:
            TransportError: they did not find each other.
        """


class DeviceSetup(NamedTuple):
    """The devices of a world, as one rank knows them; the same reports and transport on all ranks.

    Attributes:
        device: of this rank, or None.
        reports: of all ranks, by rank in the world.
        maker: of backends on the device; None if none runs collectives on it.
        transport: agreed by all ranks, see ``routes.agree``.
    """

    device: Device | None
    reports: tuple[DeviceReport, ...]
    maker: BackendMaker | None
    transport: str

    @classmethod
    def none(cls, size: int) -> DeviceSetup:
        """Return the setup of a world of ``size`` ranks without a device."""
        return cls(None, (DeviceReport(),) * size, None, "auto")

    def route(self, members: Sequence[int], layout: Layout) -> Choice | None:
        """Return the route of device memory in a group; None in a world without devices.

        Args:
            members: their ranks in the world, by rank in the group.
            layout: hosts of the members.

        Raises:
            ConfigError: see ``routes.choose``.
        """
        if not any(report.kind for report in self.reports):
            return None
        return choose([self.reports[rank] for rank in members], layout, self.transport, members)
