"""Interfaces of transports: links and the endpoints that make them, and backends that run whole collectives on devices.

A *link* is one directed data connection: the side that opened it sends framed chunks, the other side answers with small
frames only (credit, "posted"). It knows nothing of collectives. Nothing here waits: ``send`` queues, ``flush`` moves
what the peer takes. Invariants:

- Frames of one link arrive whole and in the order in which they leave (see ``Link.send``), or the link is lost.
- A payload view handed to ``send`` is read until ``owner.sent()`` was called, or until ``withdraw(owner)``
  returned; never after that. No link keeps a view of the caller's memory for longer.
- Incoming payload is written where ``Inbound.place`` says, or shown to ``Inbound.receive`` in place; a link never
  holds back bytes until they are asked for.

A *backend* is this rank's end of one group of devices. The n-th launch of a rank meets the n-th of every other; the
layers above agree on the order (`core.launch_order`), so that a backend never has to match names. Invariants: a launch
only puts work on a stream, and returns. Every rank launches the same verbs on parts of the same sizes, in the same
order. After ``abort`` every launch ends by itself, and its results are void.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kfcomm.arrays.devices import Device, DeviceReport, Flat, Stream
from kfcomm.arrays.devices.routes import Choice, choose
from kfcomm.core.frame import Header
from kfcomm.errors import TransportError
from kfcomm.types import Layout, Op, Verb

if TYPE_CHECKING:
    import asyncio

    from kfcomm.transports.reactor import Reactor
    from kfcomm.transports.shm.heap import Heaps
    from kfcomm.transports.shm.slots import SlotMemory
    from kfcomm.transports.sockets import Connection
    from kfcomm.transports.tcp_path import TcpPath


class LinkRefused(TransportError):
    """The peer lives, but it or this process cannot use this transport: another one may serve."""


class Counts(NamedTuple):
    """Traffic of one link since it was opened, in both directions; a message is a frame of any kind.

    On sockets bytes are those on the wire, with heads (some 20 a message); in shared memory, payloads of chunks.
    """

    sent_nbytes: int
    received_nbytes: int
    sent_messages: int
    received_messages: int


class Owner(Protocol):
    """Owner of the memory of a payload: notified when a link no longer reads it."""

    def sent(self) -> None:
        """Note that one payload was sent: its memory is free again."""


class Link(Protocol):
    """One directed connection to a peer, as its user sees it.

    Methods with a body here are inherited by links that need no other.
    """

    peer: int
    """World rank of the other end."""
    state: Any
    """Reserved for the user of the link; the link never reads it."""
    needs_flush: bool
    """Whether frames wait for ``flush``; else they have left when ``send`` returns."""
    kind: str
    """Name of its transport: ``shm``, ``unix``, ``tcp`` or ``memory``."""
    slots: SlotMemory | None = None
    """Slots of the rank that opened the link; None without shared memory."""

    def counts(self) -> Counts:
        """Return its traffic. Callable on any thread, also after the end; the numbers never fall."""

    def tcp_path(self) -> TcpPath | None:
        """Return what the kernel measures on its way; None unless it is an open TCP connection. For any thread."""
        return None

    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        """Send a frame, or queue it. Never blocks.

        Chunks leave by ``priority``, the larger first, and in the order of the calls within one (where memory is
        shared: results first); other frames before all chunks, but for those that must not overtake any: see
        ``transports.outbox``.

        Returns:
            True if the payload was read before the call returned. Else ``owner.sent()`` is called when it is no
            longer read.
        """

    def reserve(self, nbytes: int, priority: int) -> memoryview | None:
        """Reserve memory that the link sends from, for a payload that is written there and passed to the next ``send``.

        None if it has no such memory now. A reservation that is not passed to the next ``send`` lapses.
        """
        return None

    def wake_peer(self) -> None:
        """Wake the peer, which may sleep through news in shared memory that come without a frame."""
        return

    def set_low_latency(self) -> None:
        """Move little at a time from now on, so that urgent chunks soon overtake the rest.

        Never undone. It costs some throughput, so it is called only when a priority is first used.
        """
        return

    def flush(self) -> None:
        """Move queued frames as far as the peer takes them now; the rest follows by itself."""

    def withdraw(self, owner: Owner) -> Sequence[Header]:
        """Stop reading this owner's memory at once: unsent frames are dropped, half-sent ones finish from a copy.

        ``owner.sent()`` is not called any more. Returns the headers of the dropped frames, so that the
        credit spent on them can be taken back.
        """

    def disown(self, owner: object) -> None:
        """Stop writing to placements that ``Inbound.place`` gave out for this owner: the rest goes to a sink."""
        return

    def redirect(self, owner: object) -> None:
        """Follow a move of this owner's memory: call ``redirect`` of its placements, and fill them there."""
        return

    def close(self) -> None:
        """Say goodbye after what is queued, then close. Calling it again does nothing."""

    def lend(self) -> Any:
        """Inside ``Inbound.receive``: keep the payload readable after the call, until ``give_back`` of this loan.

        None if the payload must be copied instead.
        """
        return None

    def give_back(self, loan: Any) -> None:
        """Return a loan, which is not read any more."""
        return

    def descriptors(self) -> Sequence[int]:
        """Return file descriptors that a forked child must close."""
        return ()

    def abort(self) -> None:
        """Close at once, whatever is queued; afterwards no memory of any owner is read or written."""


class Inbound(Protocol):
    """Receiver of what arrives on links: the engine. All calls come from the engine's own loop.

    Methods with a body here are inherited by receivers that need no other.
    """

    def opened(self, link: Link) -> None:
        """Use a link that a peer opened to this process; frames follow."""
        return

    def place(self, link: Link, header: Header, nbytes: int) -> Any:
        """Return the placement of the ``nbytes`` payload of this CHUNK: an object with ``view`` (and ``owner``).

        The view is as long as the payload, and written front to back; ``arrived(link, placement)`` follows when it is
        complete.
        """

    def arrived(self, link: Link, placement: Any) -> None:
        """Take the complete payload of a placement."""
        return

    def receive(self, link: Link, header: Header, payload: memoryview) -> None:
        """Take a whole frame; ``payload`` (often empty) may be read during this call only."""

    def burst_end(self, link: Link) -> None:
        """Flush answers: everything that had arrived has been handed over."""
        return

    def lost(self, link: Link, error: BaseException | None) -> None:
        """Forget a link that has ended: ``None`` after the peer's goodbye, else the reason. No call follows."""


class Watched(Protocol):
    """News in shared memory beside those of links: slots."""

    @property
    def pending(self) -> Sized:
        """Items to be polled."""

    def look(self) -> bool:
        """Poll once; whether there was anything."""

    def park(self) -> bool:
        """Have peers wake this process from now on; False if some cannot yet."""

    def unpark(self) -> None:
        """Poll from now on, without wake-ups."""


class Waiter(Inbound, Protocol):
    """An ``Inbound`` that knows when it waits, for transports that poll."""

    is_waiting: Callable[[], int]
    """Number of collectives in flight on this rank."""

    def tell_waits(self, begins: Callable[[], None]) -> None:
        """Call ``begins`` from now on whenever this rank begins to wait."""

    @property
    def slots(self) -> Watched:
        """Slots, which are polled beside the links where memory is shared."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One rank in one epoch, as its transports see it."""

    loop: asyncio.AbstractEventLoop  # where links are agreed on
    reactor: Reactor  # drives them from then on
    inbound: Waiter  # receives what arrives
    rank: int  # world rank of this process
    local: tuple[int, ...]  # world ranks on this host, this one included
    num_ranks: int  # of the world
    checksum: bool = False  # seal frames that leave the host
    former: Endpoint | None = None  # endpoint of the same transport in the epoch before


class Endpoint(Protocol):
    """One rank's end of all links of a transport, for one epoch.

    Methods with a body here are inherited by transports that need no other.
    """

    heaps: Heaps | None = None
    """Memory that peers of this host can read in place; None if the transport shares none."""

    async def connect(self, connection: Connection, peer: int) -> Link:
        """Make a link of a connection that this rank opened; the connection is closed on failure.

        Raises:
            LinkRefused: this process or the peer cannot use this transport.
            TransportError: the peer went away.
        """

    def adopt(self, connection: Connection, peer: int) -> None:
        """Make a link of a connection that a peer opened; ``Inbound.opened`` follows if that works."""

    def forget(self, peer: int) -> None:
        """Release what is held for a peer that is gone for good."""
        return

    def sever(self) -> None:
        """In a forked child: touch nothing any more that the parent shares with its peers."""
        return

    def descriptors(self) -> list[int]:
        """Descriptors that a forked child must close, besides those of the links."""
        return []

    async def close(self) -> None:
        """End the links that are left, and release everything."""
        return


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


Launch: TypeAlias = "Callable[[Any, Any, Any], None]"
"""Puts a prepared collective on a stream: source, target and stream as ``arrays.kinds.Repeat`` gives them.

The thread's current device is the backend's. Raises as ``CollectiveBackend.launch``.
"""


class CollectiveBackend(Protocol):
    """This rank's end of one group. Used by one thread at a time, but for ``abort``."""

    note: str = ""
    """What it cannot do here, in words; empty if there is nothing to say."""

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

    def prepared(
        self, verb: Verb, sizes: tuple[int, int], dtype: np.dtype[Any], op: Op | None, root: int
    ) -> Launch | None:
        """Return a launch of one part, for calls that are repeated; None where only ``launch`` can do it.

        ``sizes``: elements of source and target, 0 for a target that this rank does not have.
        """
        return None

    def prepared_group(self, verb: Verb, sizes: Sequence[int], dtype: np.dtype[Any], op: Op | None) -> Launch | None:
        """Return a launch of several parts as one, for calls that are repeated; None where only ``launch`` can do it.

        It takes lists of sources and targets. Where both are those of the launch before, it may replay that.

        ``sizes``: elements of each source, and of each target.
        """
        return None

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
    """The devices of a world, as one rank knows them; the same reports and transport on all ranks."""

    device: Device | None  # of this rank
    reports: tuple[DeviceReport, ...]  # by rank in the world
    maker: BackendMaker | None  # of backends on the device; None if none runs collectives on it
    transport: str  # agreed by all ranks, see ``routes.agree``

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
