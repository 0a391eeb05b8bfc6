"""Receiving end of all links of one rank: each frame goes to the router, whose decisions are carried out at once.

A small payload is read during the call that shows it. A large one first gets a place, in the result if it is a part of
the result. So a payload is *borrowed* (readable during one call only), *placed* (it arrives in the result), or *held*
in a block of the pool. The pool has few blocks and reuses them; further memory comes from the allocator, so that there
is memory for every accepted payload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kfcomm.core.frame import Header, Kind
from kfcomm.core.links import Early, Incoming
from kfcomm.core.machine import DOWN, RESULT, Effects
from kfcomm.errors import RemoteProtocolError

if TYPE_CHECKING:
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.observer import Observer
    from kfcomm.engine.operation import Operation
    from kfcomm.transports.base import Link

logger = logging.getLogger("kfcomm")

CHUNK, ASK, KEY, SIGNATURE, POSTED, CREDIT, OPEN, SLOT, NO_SLOT, LEFT, VACANT = (
    int(kind)
    for kind in (
        Kind.CHUNK, Kind.ASK, Kind.KEY, Kind.SIGNATURE, Kind.POSTED, Kind.CREDIT, Kind.OPEN, Kind.SLOT, Kind.NO_SLOT,
        Kind.LEFT, Kind.VACANT,
    )
)  # fmt: skip


class Receiver:
    """Hears the links of one engine. Implements ``transports.base.Waiter``."""

    def __init__(self, engine: Engine) -> None:
        self.slots = engine.slots
        self.is_waiting = engine.router.live.__len__
        self.lender: Link | None = None  # the link whose chunk is being taken in
        self.observers: tuple[Observer, ...] | None = None
        self._engine = engine
        self._router = engine.router
        self._links = engine.links
        self._meter = engine.meter
        self._pool = engine.pool

    def tell_waits(self, begins: Callable[[], None]) -> None:
        """Have a function called when a call begins to wait."""
        self._engine.on_wait = begins

    def opened(self, link: Link) -> None:
        """A peer opened a link to this process."""
        self._links.opened(link)

    def receive(self, link: Link, header: Header, payload: memoryview) -> None:
        """Handle a whole frame; ``payload`` may be read during this call only."""
        effects: Effects = []
        if header[0] == CHUNK:
            meter = self._meter
            if meter is not None and not meter.now_s:
                meter.now_s = monotonic()  # once a burst: it is cleared at its end
            if self.observers is not None:
                self._tell_last_byte(link, header, len(payload))
            self.lender = link
            try:
                whose = self._router.receive(link.state, header, len(payload), payload, effects)
                if whose is None:
                    whose = self._receive_unlike(link, header, payload, effects)
            except RemoteProtocolError:
                raise  # it ends this link alone
            except Exception as error:  # noqa: BLE001  it ends this collective alone
                key = link.state.keys.get(header[1])
                self._engine.failures.broke(None if key is None else key.live.get(header[2]), error)
                return
            if meter is not None and whose is not None:
                meter.arrived(link.peer, whose)
        elif type(link.state) is Incoming:
            self._hear(link, link.state, header, effects)
        elif header[0] == POSTED:
            self._router.on_posted(link.state, header[1], header[2], effects)
        elif header[0] == CREDIT:
            link.state.window.give(header[1], header[2])
        else:
            raise RemoteProtocolError(f"rank {link.peer} sent a {Kind(header[0]).name} to a sender of chunks")
        if effects:
            self._engine.perform(effects)

    def place(self, link: Link, header: Header, nbytes: int) -> Payload:
        """Give a large payload its memory: in the result if it is part of that, else in a block."""
        effects: Effects = []
        ticket = self._router.match(_incoming(link), header, nbytes, effects)
        self._engine.perform(effects)
        payload = self._room(ticket, nbytes)
        payload.ticket = ticket
        if self.observers is not None:
            for observer in self.observers:
                observer.first_byte(link.peer)
        return payload

    def arrived(self, link: Link, placement: Payload) -> None:
        """Handle the complete payload of a placement."""
        if placement.ticket is None:
            placement.release(self._pool)
            return
        whose = placement.ticket[0]
        if self.observers is not None:
            if type(whose) is Early:
                self._tell_last_byte(link, *placement.ticket[3:])
            else:
                for observer in self.observers:
                    observer.last_byte(link.peer, whose.key, whose.seq, len(placement.view))
        effects: Effects = []
        try:
            self._router.arrived(placement.ticket, placement, effects)
        except Exception as error:  # noqa: BLE001  it ends this collective alone
            self._engine.failures.broke(None if type(whose) is Early else whose, error)
            return
        if type(whose) is not Early and self._meter is not None:
            self._meter.arrived(link.peer, whose)
        if effects:
            self._engine.perform(effects)

    def burst_end(self, link: Link) -> None:
        """End a burst of frames: give credit back, and move queued frames."""
        if self._meter is not None:
            self._meter.now_s = 0.0
        state = link.state
        if type(state) is Incoming and state.window.owed_headers:
            owed = state.window.settle()
            if owed is not None:
                link.send((CREDIT, owed.nbytes, owed.headers))
                self._links.back(state)
        if self._links.dirty:
            self._links.flush()

    def lost(self, link: Link, error: BaseException | None) -> None:
        """Handle the end of a link; without a goodbye, fail what it may have carried, and check the peer."""
        peer, state, recovery = link.peer, link.state, self._engine.recovery
        self.lender = None
        self._links.lost(link)
        recovery.look_if_in_vain(peer)
        if error is None or self._links.closing or peer in self._router.lost:
            return
        if isinstance(error, RemoteProtocolError):
            logger.warning("rank %d closed a link from rank %d: %s", self._engine.rank, peer, error)
        if type(state) is Incoming:
            recovery.incoming_broke(state, str(error))
        else:
            recovery.outgoing_broke(state, str(error))

    def _receive_unlike(self, link: Link, header: Header, payload: memoryview, effects: Effects) -> Any:
        """Handle a chunk unlike those before it; return its collective, if that is posted."""
        ticket = self._router.match(_incoming(link), header, len(payload), effects)
        if ticket is None:
            return None
        chunk = Payload(payload, None, link)
        self._router.arrived(ticket, chunk, effects)
        if type(ticket[0]) is Early:
            chunk.copy(self._pool)  # nobody knows for how long: what is lent may hold up its sender
            return None
        return ticket[0]

    def _hear(self, link: Link, state: Incoming, header: Header, effects: Effects) -> None:
        """Handle a frame without payload from a sender of chunks."""
        kind = header[0]
        if kind == KEY:
            self._router.define_key(state, header, effects)
        elif kind == SIGNATURE:
            self._router.define_signature(state, header[1], header[2], effects)
        elif kind == ASK:
            self._router.on_ask(state, header, effects)
        elif kind == OPEN:
            self._links.numbered(state, header[1])
        elif kind == SLOT:
            self.slots.handed_out(state, header, link.slots)
        elif kind == NO_SLOT:
            self.slots.taken_back(state, header)
        elif kind == LEFT:
            self.slots.look()  # what the peer stored before it left may complete uses
            self.slots.peer_left(state.peer, header[1], self._router.names.of_group(header[1]))
            self._router.on_left(state, header[1], effects)
        elif kind == VACANT:
            self.slots.vacated(state, header, link.slots)
        else:
            raise RemoteProtocolError(f"rank {link.peer} sent a {Kind(kind).name} to a receiver of chunks")

    def _room(self, ticket: Any, nbytes: int) -> Payload:
        if ticket is not None and type(ticket[0]) is not Early:
            collective, route, index = ticket
            if route.phase == DOWN and route.lane.keeps:
                operation = cast("Operation", collective.driver)
                return Payload(operation.bytes_of(route.lane, index, RESULT), operation)
        return Payload.held(self._pool, nbytes)

    def _tell_last_byte(self, link: Link, header: Header, nbytes: int) -> None:
        """Tell the observers of a chunk, whose collective may not be posted yet."""
        key = link.state.keys.get(header[1])
        if key is not None:
            for observer in self.observers or ():
                observer.last_byte(link.peer, key, header[2], nbytes)


def _incoming(link: Link) -> Incoming:
    """The state of a link on which chunks may come."""
    if type(link.state) is not Incoming:
        raise RemoteProtocolError(f"rank {link.peer} sent a chunk to a sender of chunks")
    return link.state


BLOCK_NBYTES = 1 << 20
MAX_BLOCKS = 16


class BlockPool:
    """Up to ``MAX_BLOCKS`` blocks of ``BLOCK_NBYTES`` each, kept for use again: warm pages, no page faults."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """A block of at least ``nbytes``: a warm one if there is one and it is large enough."""
        if nbytes <= BLOCK_NBYTES // 16:
            return memoryview(bytearray(nbytes))
        if nbytes > BLOCK_NBYTES:
            return np.empty(nbytes, np.uint8).data
        return self._free.pop() if self._free else np.empty(BLOCK_NBYTES, np.uint8).data

    def give(self, block: memoryview) -> None:
        """Take back a block."""
        if block.nbytes == BLOCK_NBYTES and len(self._free) < MAX_BLOCKS:
            self._free.append(block)


class Payload:
    """The bytes of one chunk that arrived.

    Attributes:
        owner: the operation whose memory ``view`` is part of, if it was placed in a result.
        lender: the link on which it came, if ``view`` may be read during the current call only; else None.
        ticket: of the router, while the chunk is still arriving.
        home: to which ``release`` returns something: a pool (a block), or ``(link, loan)``; else None.
    """

    __slots__ = ("home", "lender", "owner", "ticket", "view")

    ticket: Any

    def __init__(self, view: memoryview, owner: Any = None, lender: Link | None = None) -> None:
        self.view = view
        self.owner = owner
        self.lender = lender
        self.home: memoryview | tuple[Link, Any] | None = None

    @classmethod
    def held(cls, pool: BlockPool, nbytes: int) -> Payload:
        """A payload in a block of the pool, for ``nbytes`` that are still to arrive."""
        block = pool.take(nbytes)
        payload = cls(block[:nbytes])
        payload.home = block
        return payload

    def redirect(self) -> None:
        """Follow the result to the other memory that its owner has now."""
        _, route, index = self.ticket
        self.view = self.owner.bytes_of(route.lane, index, RESULT)

    def keep(self, pool: BlockPool) -> None:
        """Keep a borrowed payload for a while: extend the loan if the link can."""
        if self.lender is not None:
            loan = self.lender.lend()
            if loan is None:
                self.copy(pool)
            else:
                self.home, self.lender = (self.lender, loan), None

    def copy(self, pool: BlockPool) -> None:
        """Copy a borrowed payload, which may then be kept for any time."""
        if self.lender is None and type(self.home) is not tuple:
            return
        nbytes = len(self.view)
        block: memoryview | None = None
        if nbytes <= BLOCK_NBYTES // 16:
            view = memoryview(bytes(self.view))
        else:
            block = pool.take(nbytes)
            view = block[:nbytes]
            view[:] = self.view
        self.release(pool)
        self.lender = None
        self.view, self.home = view, block

    def forwarded(self, pool: BlockPool) -> None:
        """Mark it as read by a link: a loan cannot be returned, nor its block used again."""
        self.copy(pool)
        self.home = None

    def release(self, pool: BlockPool) -> None:
        """Release it: it has no reader any more."""
        home, self.home = self.home, None
        if isinstance(home, tuple):
            home[0].give_back(home[1])
        elif home is not None:
            pool.give(home)
