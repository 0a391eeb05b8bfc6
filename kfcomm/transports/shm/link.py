"""Common part of both ends of a shared-memory link: waking the peer, and the end.

A link has no socket. A parked peer is woken by its bell, which serves all its links. Each side has a word in the
segment which says that it has ended; the other side still reads the rest of the ring. So a goodbye is a record (BYE),
as on other links. A process that dies stores nothing; the control plane reports it (see `ShmLink.peer_lost`).

Invariants:

- Owners and ``Inbound`` are never called from inside ``send``, ``withdraw``, ``disown``, ``close`` or ``abort``. The
  end of a link is always reported from the reactor, once.
- A side stores what its peer waits for; if it then sees the peer parked, it wakes the peer before it rests itself. A
  link that owes its peer a wake-up is polled until that is settled.
- A peer that breaks the protocol ends only this link, wherever that is noticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kfcomm.core.frame import PREFIX_NBYTES, Header, Kind, decode_header, make_encoder
from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.base import Counts, Inbound, Link
from kfcomm.transports.reactor import Readiness
from kfcomm.transports.shm.ring import Parked, RingReader, RingWriter, Shared, Word, fence
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.transports.shm.hub import Hub
    from kfcomm.transports.shm.slots import SlotMemory

BYE = int(Kind.BYE)
BURST_NBYTES = 1 << 14
"""Bytes of records read before others get their turn: a peer may write as fast as this side reads."""
_FOR_ROOM = int(Parked.FOR_ROOM)
_BELL_AFTER_LOOKS = 16


class LinkParts(NamedTuple):
    """Parts of a link to a ``peer``, once both sides have mapped everything; ``keeper`` polls it.

    ``bell`` is the address of the peer's.
    """

    bell: bytes
    reactor: Readiness
    inbound: Inbound
    peer: int
    shared: Shared
    keeper: Hub
    slots: SlotMemory | None = None


class ShmLink(Link, ABC):
    """One end; see `ShmSender` and `ShmReceiver`. Payloads are never placed, so there is nothing to disown."""

    kind = "shm"
    needs_flush = False
    queue: list[Any] | deque[Any]
    """Frames that wait for space."""
    _near: Word
    _far: Word
    _tail: Word
    _near_end: Word
    _far_end: Word

    def __init__(self, wire: LinkParts, rings: tuple[RingWriter, RingReader]) -> None:
        self.peer = wire.peer
        self.state: Any = None
        self.is_open = True
        self._bell = wire.bell
        self._reactor = wire.reactor
        self._inbound = wire.inbound
        self._words = wire.shared.words
        self._returned = wire.shared.returned
        self._out, self._into = rings
        self._shown_nbytes = 0
        # counter of the peer's writes (words, index), and the reader that counts how much of it was read
        self.news = (self._words, int(self._tail), self._into)
        self.slots = wire.slots
        self._keeper = wire.keeper
        self._restless = wire.keeper.restless
        self._encode = make_encoder()
        self._fence = fence()
        self.owes_bell = False  # the peer may sleep through a stored record
        self._bell_looks = 0
        # this side has said goodbye, or is about to, or the link has ended
        self.is_closing = self._said_bye = self._heard_bye = False

    def __repr__(self) -> str:
        now = "closed" if not self.is_open else "closing" if self.is_closing else "open"
        return f"<{type(self).__name__} to rank {self.peer}, {now}>"

    @override
    def counts(self) -> Counts:
        out, into = self._out, self._into
        received_nbytes = into.payload_nbytes + self._shown_nbytes
        return Counts(out.payload_nbytes, received_nbytes, out.num_records, into.num_records)

    # Differences between the two sides.

    @abstractmethod
    def poll(self) -> bool:
        """Read what the peer has written, and move what waits; whether there was anything."""

    @abstractmethod
    def _advance(self) -> None:
        """Move what waits, as far as it fits."""

    @abstractmethod
    def _let_go(self) -> None:
        """Release everything after the end: no memory of the peer is read, and none written for it, any more."""

    # Common to both.

    @override
    def flush(self) -> None:
        # Records are in the ring already: only a parked peer has to be woken.
        if self.is_open:
            try:
                self._advance()
            except RemoteProtocolError as error:
                self._end_with(error)
            if self.owes_bell:
                self._settle_bell()

    def ring_bell(self) -> None:
        """Wake the peer now if it has parked and waits for a record stored before this call."""
        with self._fence:
            pass
        parked = self._words[self._far]
        if parked and (self.owes_bell or parked == _FOR_ROOM):
            self.wake_peer()
        self.owes_bell = False

    def _settle_bell(self) -> None:
        """Wake the peer if it stays parked for some polls."""
        with self._fence:
            pass
        # Often it wakes by itself, and a wake-up is expensive.
        if not self._words[self._far]:
            self.owes_bell = False
        elif self._bell_looks < _BELL_AFTER_LOOKS and self._keeper.is_awake and self._keeper.is_waiting:
            self._bell_looks += 1
            self._restless.add(self)
            return
        else:
            self.ring_bell()
        self._bell_looks = 0

    def _tell_of_room(self) -> None:
        """Wake the peer if it has parked because the ring was full: something of it was read."""
        with self._fence:
            pass
        if self._words[self._far] == _FOR_ROOM and self.is_open:
            self.wake_peer()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send, a goodbye included."""
        return not self.queue and (self._said_bye or not self.is_closing)

    def park(self, what: Parked) -> None:
        """Have the peer wake this side from now on; a fence and a poll must follow."""
        if not self._out.is_empty:  # the peer may be one that does not poll: it is woken, parked or not
            self.wake_peer()
        self.ring_bell()
        self._words[self._near] = what

    def unpark(self) -> None:
        """Poll from now on, without wake-ups."""
        self._words[self._near] = Parked.AWAKE

    @override
    def close(self) -> None:
        if not self.is_closing:
            self.is_closing = True
            self._restless.add(self)
            self._reactor.call_soon(self._say_bye_soon)

    @override
    def descriptors(self) -> tuple[int, ...]:
        return ()

    @override
    def abort(self) -> None:
        self._end_with(None)

    def sever(self) -> None:
        """In a forked child: leave the link to the parent, and touch neither its memory nor the loop any more."""
        self.is_open = False
        self.is_closing = True
        self._into.close()
        self._words = memoryview(bytearray(self._words.nbytes)).cast("Q")

    def _say_bye_soon(self) -> None:
        try:
            self._say_bye()
        except RemoteProtocolError as error:
            self._end_with(error)
        if not self._said_bye:
            self._keeper.wake()

    def _say_bye(self) -> None:
        """Say goodbye after the queue; retried at every poll."""
        if not self.is_open or self._said_bye:
            return
        self._advance()
        if self.queue or not self._out.put_encoded(self._packed((BYE,))):
            return
        self._said_bye = True
        self._say_end()

    @override
    def wake_peer(self) -> None:
        self._keeper.ring(self._bell)

    def _say_end(self) -> None:
        self._words[self._near_end] = 1
        self.wake_peer()

    def look_for_end(self) -> None:
        """End if the peer has."""
        if self.is_open and self._words[self._far_end]:
            self._last_words(TransportError(f"rank {self.peer} closed its connection without a goodbye"))

    def peer_lost(self) -> None:
        """Read what a peer that is lost has left, and end."""
        self._last_words(TransportError(f"rank {self.peer} is lost"))

    def _last_words(self, error: TransportError | None) -> None:
        """Read what a peer that is gone has left, and end."""
        while self.is_open and self.poll():
            pass
        self._end_with(None if self._heard_bye or self.is_closing else error)

    def _packed(self, header: Header) -> bytes:
        return self._encode(header)[PREFIX_NBYTES:]

    def _unpacked(self, data: memoryview) -> Header:
        header = decode_header(bytes(data))  # the peer could change it while it is read
        if self._heard_bye or header[0] == Kind.CHUNK:
            name = Kind(header[0]).name
            raise RemoteProtocolError(f"rank {self.peer} sent a {name} {'after its BYE' if self._heard_bye else ''}")
        return header

    def _end_with(self, error: BaseException | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.is_closing = True
        self._into.close()
        self._let_go()
        self._say_end()
        self._keeper.remove(self)
        self._reactor.call_soon(self._report, error)

    def _report(self, error: BaseException | None) -> None:
        self._inbound.lost(self, error)
