"""Memory that belongs to the runtime: payloads as they arrive, and the blocks that hold them.

A payload is *borrowed* (readable during one call only), *placed* (it arrives where the result belongs), or
*held* in a block of the pool. Blocks are used again while there are few of them; beyond that, memory comes
from the allocator, so that what was accepted can always be absorbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.machine import RESULT

if TYPE_CHECKING:
    from kfcomm.transports.base import Link

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
        """This block is not used any more."""
        if block.nbytes == BLOCK_NBYTES and len(self._free) < MAX_BLOCKS:
            self._free.append(block)


class Payload:
    """The bytes of one chunk that arrived.

    Attributes:
        view: the bytes.
        owner: the operation whose memory ``view`` is part of, if it was placed in a result.
        lender: the link on which it came, if ``view`` may be read during the current call only; else None.
        ticket: what the router said of the chunk, while it is still arriving.
        home: where ``release`` has to bring something back: a block to the pool, or ``(link, loan)``; else None.
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
        """Its owner has other memory for the result now."""
        _, route, index = self.ticket
        self.view = self.owner.bytes_of(route.lane, index, RESULT)

    def keep(self, pool: BlockPool) -> None:
        """Make a borrowed payload last a little: by borrowing it for longer where that can be."""
        if self.lender is not None:
            loan = self.lender.lend()
            if loan is None:
                self.copy(pool)
            else:
                self.home, self.lender = (self.lender, loan), None

    def copy(self, pool: BlockPool) -> None:
        """Make a borrowed payload last for as long as may be."""
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
        """A link reads it from now on: what is lent cannot go back, and its block cannot be used again."""
        self.copy(pool)
        self.home = None

    def release(self, pool: BlockPool) -> None:
        """Nothing reads it any more."""
        home, self.home = self.home, None
        if isinstance(home, tuple):
            home[0].give_back(home[1])
        elif home is not None:
            pool.give(home)
