"""Members of a world as the control plane knows them: how each is reached, and what it has to prove."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kfcomm.core.handshake import Hello, Identity, Purpose
from kfcomm.transports.handshake import HANDSHAKE_TIMEOUT_S, HandshakeOptions, dial
from kfcomm.transports.sockets import Address, Connection

if TYPE_CHECKING:
    from kfcomm.rendezvous.identity import PeerInfo
    from kfcomm.transports.tls import Tls


def addresses_of(peer: PeerInfo, *, seen_from: PeerInfo) -> tuple[Address, ...]:
    """Addresses of a peer, as another process reaches it: by its Unix socket too if both are on one host."""
    tcp: Address = (peer.address, peer.port)
    if peer.unix is None or peer.host != seen_from.host:
        return (tcp,)
    return ("@" + peer.unix.lstrip("\0@"), tcp)


class World(NamedTuple):
    """Members of a world, and what they share."""

    rank: int
    peers: Sequence[PeerInfo]  # by rank, this one included
    token: bytes  # secret of the job
    epoch: int
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S  # on either side
    lost_after_s: float = math.inf  # a peer silent for so long is lost; infinite for never
    launcher_word_s: float = 0.0  # bound for the launcher's report of how a process ended
    tls: Tls | None = None  # of TCP connections
    # called now and then, to prove to others (the launcher) that this process runs
    show_life: Callable[[], None] | None = None

    def identity(self, rank: int) -> Identity:
        """Identity that ``rank`` has to prove."""
        return Identity(rank, self.peers[rank].uid)

    async def dial(self, rank: int, addresses: Sequence[Address], purpose: int, timeout_s: float) -> Connection:
        """A connection to ``rank`` on which both sides have proven who they are.

        Raises:
            DialRefused: see `kfcomm.transports.handshake.dial`.
        """
        return await dial(addresses, self.identity(rank), purpose, self.handshake(timeout_s))

    def handshake(self, timeout_s: float) -> HandshakeOptions:
        """Handshakes of this rank."""
        return HandshakeOptions(self.identity(self.rank), self.epoch, self.token, timeout_s, self.tls)

    async def reach(self, rank: int, purpose: Purpose = Purpose.CONTROL) -> Connection:
        """A connection to ``rank`` for its control thread, as `dial` makes it."""
        addresses = addresses_of(self.peers[rank], seen_from=self.peers[self.rank])
        return await self.dial(rank, addresses, purpose, self.handshake_timeout_s)

    def objection(self, hello: Hello) -> str | None:
        """Reason to refuse this dialler, or None."""
        if not 0 <= hello.rank < len(self.peers) or hello.rank == self.rank:
            return f"rank {hello.rank} is no peer of rank {self.rank} in a world of {len(self.peers)}"
        if hello.uid != self.peers[hello.rank].uid:
            return f"rank {hello.rank} is another process"
        return None
