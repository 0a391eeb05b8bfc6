"""What a link is: it moves framed chunks between two peers, and knows nothing of collectives.

A *link* is one directed data connection: the side that opened it sends chunks, the other side answers with
small frames only (credit, "posted"). Nothing here waits: ``send`` queues, ``flush`` moves what the peer takes.

Invariants:

- Frames of one link arrive whole and in the order in which they leave (see ``Link.send``), or the link is lost.
- A payload view handed to ``send`` is read until ``owner.sent()`` was called, or until ``withdraw(owner)``
  returned; never after that. No link keeps a view of the caller's memory for longer.
- Incoming payload is written where ``Inbound.place`` says, or shown to ``Inbound.receive`` in place; a link
  never holds back bytes because nobody has asked for them yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kfcomm.core.frame import Header
from kfcomm.errors import TransportError

if TYPE_CHECKING:
    import asyncio

    from kfcomm.transports.reactor import Reactor
    from kfcomm.transports.shm.heap import Array
    from kfcomm.transports.shm.slots import SlotMemory
    from kfcomm.transports.sockets import Connection


class LinkRefused(TransportError):
    """The peer lives, but it or this process cannot use this transport: another one may serve."""


class Counts(NamedTuple):
    """What one link has moved since it was opened, in both directions; a message is a frame of any kind.

    On sockets bytes are those on the wire, heads included (some 20 a message); where memory is shared, those that are
    copied, which of a chunk are its payload.
    """

    sent_nbytes: int
    received_nbytes: int
    sent_messages: int
    received_messages: int


class Owner(Protocol):
    """Whose memory a payload is: told when a link no longer reads it."""

    def sent(self) -> None:
        """One of this owner's payloads has left: its memory is free again."""


class Link(Protocol):
    """One directed connection to a peer, as its user sees it.

    Methods that return here are inherited by links that have nothing to do for them.
    """

    peer: int
    """World rank of the other end."""
    state: Any
    """A slot for the user of the link; the link never looks at it."""
    needs_flush: bool
    """Whether frames wait for ``flush``; else they are on their way when ``send`` returns."""
    kind: str
    """What it is made of, in a word: ``shm``, ``unix``, ``tcp`` or ``memory``."""
    slots: SlotMemory | None = None
    """Of the rank that opened the link; None where no memory is shared."""

    def counts(self) -> Counts:
        """What it has moved. May be called on any thread, also after the end; the numbers never fall."""

    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        """Send a frame, or queue it. Never blocks.

        Chunks leave by ``priority``, the larger first, and in the order of the calls within one (where memory is
        shared: results first); other frames before all chunks, but for those that must not overtake any: see
        ``transports.order``.

        Returns:
            True if the payload was read before the call returned. Else ``owner.sent()`` is called when it is no
            longer read.
        """

    def reserve(self, nbytes: int, priority: int) -> memoryview | None:
        """Memory that the link sends from, for a payload that is made there and given to the next ``send``.

        None where there is none, or not now. What is not given to ``send`` is forgotten by itself.
        """
        return None

    def wake_peer(self) -> None:
        """The peer may sleep over something that no frame tells of: wake it."""
        return

    def set_low_latency(self) -> None:
        """From now on hand over, and take, little at a time, so that what is urgent soon overtakes the rest.

        Never undone. It costs some throughput, and is asked for when the first priority is used.
        """
        return

    def flush(self) -> None:
        """Move queued frames as far as the peer takes them; the rest follows by itself."""

    def withdraw(self, owner: Owner) -> Sequence[Header]:
        """Stop reading this owner's memory at once: unsent frames are dropped, half-sent ones finish from a copy.

        ``owner.sent()`` is not called any more. Returns the headers of the frames that were dropped, so that
        whatever was spent on them (credit) can be taken back.
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

        None: that cannot be; copy it.
        """
        return None

    def give_back(self, loan: Any) -> None:
        """What was lent is read no more."""
        return

    def descriptors(self) -> Sequence[int]:
        """File descriptors that a forked child must let go of."""

    def abort(self) -> None:
        """Close at once, whatever is queued; afterwards no memory of any owner is read or written."""


class Inbound(Protocol):
    """Who hears what arrives on a link (the engine). All calls come from the engine's own loop.

    Methods that return here are inherited by whom they do not concern.
    """

    def opened(self, link: Link) -> None:
        """A peer opened a link to this process; frames follow."""
        return

    def place(self, link: Link, header: Header, nbytes: int) -> Any:
        """Where the ``nbytes`` payload of this CHUNK goes: an object with ``view`` (and ``owner``).

        The view is as long as the payload, and written front to back; ``arrived(link, placement)`` follows when it is
        complete.
        """

    def arrived(self, link: Link, placement: Any) -> None:
        """The payload of a placement is complete."""
        return

    def receive(self, link: Link, header: Header, payload: memoryview) -> None:
        """A whole frame; ``payload`` (often empty) may be read during this call only."""

    def burst_end(self, link: Link) -> None:
        """All that had arrived has been handed over: a good moment to flush answers."""
        return

    def lost(self, link: Link, error: BaseException | None) -> None:
        """The link is gone: ``None`` after the peer's goodbye, else why. Nothing follows."""


class Watched(Protocol):
    """News in shared memory that are no link's."""

    @property
    def pending(self) -> Sized:
        """What is to be looked at, if anything."""

    def look(self) -> bool:
        """Look once; whether there was anything."""

    def park(self) -> None:
        """Peers have to wake this process from now on."""

    def unpark(self) -> None:
        """It looks by itself."""


class Waiter(Inbound, Protocol):
    """An ``Inbound`` that knows when it waits, for transports that look for arrivals."""

    is_waiting: Callable[[], int]
    """Whether something is in flight on this rank: how much."""

    def tell_waits(self, begins: Callable[[], None]) -> None:
        """From now on ``begins`` is called when this rank begins to wait for something."""

    @property
    def slots(self) -> Watched:
        """What else is to be looked at where memory is shared."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One rank in one epoch, as its transports see it.

    Attributes:
        loop: where links are agreed on.
        reactor: drives them from then on.
        inbound: hears what arrives.
        rank: world rank of this process.
        local: world ranks on this host, this one included.
        num_ranks: of the world.
        checksum: whether frames that leave the host are sealed.
        former: endpoint of the same transport in the epoch before; None in the first one.
    """

    loop: asyncio.AbstractEventLoop
    reactor: Reactor
    inbound: Waiter
    rank: int
    local: tuple[int, ...]
    num_ranks: int
    checksum: bool = False
    former: Endpoint | None = None


class Endpoint(Protocol):
    """One rank's end of all links of a transport, for one epoch.

    Methods that return here are inherited by transports that have nothing to do for them.
    """

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

    def empty(self, nbytes: int) -> Array | None:
        """Memory that peers of this host can read in place; None where there is none."""
        return None

    @property
    def used_nbytes(self) -> int:
        """Bytes of such memory that are in use."""
        return 0

    async def close(self) -> None:
        """End the links that are left, and release everything."""
        return
