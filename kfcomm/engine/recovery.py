"""Recovery from a link that breaks between this rank and a peer that may live: see ``core.links`` for the rules.

The side that opened the link fails what it has in flight on it, once it is known whether the peer is gone or only
the link, and opens the next one if that has something to send. The other side fails nothing; it makes sure that
the first one notices too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective
from kfcomm.core.links import LINKS, Incoming, Outgoing
from kfcomm.transports.reactor import Timer

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlPlane
    from kfcomm.engine.engine import Engine

NEWS_WITHIN_S = 1.0
"""How long a rank waits to hear why another has left without sending all: such news takes milliseconds."""
VERDICT_WITHIN_S = 5.0
"""How long a collective whose link broke waits for the word whether the peer is gone, or only the link."""
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
CALM_S = 10.0
"""After so long without a break, the next one is followed by a new link at once."""


class LinkRecovery:
    """Recovers the broken links of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._router = engine.router
        self._links = engine.links
        self._reactor = engine.reactor
        self._settled: set[int] = set()
        self._pauses: dict[int, tuple[float, float]] = {}
        self._redials: dict[int, Timer] = {}

    def outgoing_broke(self, outgoing: Outgoing, reason: str) -> None:
        """Handle a link of this rank that has broken, or could not be opened."""
        peer, control = outgoing.peer, self._engine.control
        if control is None or self._links.closing or peer in self._router.lost:
            return
        cause = self._cause(peer, reason)
        control.suspect(peer, cause.message)
        carried = self._router.broke(outgoing)
        if carried:
            self._fail_unless_lost(control, peer, carried, cause)
        if self._router.owes(peer) and peer not in self._redials:
            self._redials[peer] = self._reactor.call_later(self._pause_s(peer), self._redial, peer)

    def incoming_broke(self, incoming: Incoming, reason: str) -> None:
        """Handle the break of a link that a peer opened."""
        peer, control = incoming.peer, self._engine.control
        if control is None or self._links.closing or peer in self._router.lost:
            return
        cause = self._cause(peer, reason)
        control.suspect(peer, cause.message)
        if incoming.number:
            control.abort(LINKS, str(peer), incoming.number, cause.to_wire())

    def peer_says(self, peer: int, number: int, reason: str) -> None:
        """Handle a peer's report that it cannot hear this link any more."""
        outgoing = self._links.break_off(peer, number)
        if outgoing is not None:
            self.outgoing_broke(outgoing, reason)

    def peer_settled(self, peer: int) -> None:
        """Handle a peer that has left, after what it has not posted has failed: the rest needs what is under way."""
        self._settled.add(peer)
        self.look_if_in_vain(peer)

    def look_if_in_vain(self, peer: int) -> None:
        """Fail what waits for this peer if a link of it has ended, it has left, and it sends on no other link."""
        if self._sends_no_more(peer):
            # Later: why it has not sent all, perhaps that another has left, may be heard after its own leaving.
            self._reactor.call_later(NEWS_WITHIN_S, self._fail_in_vain, peer)

    def close(self) -> None:
        """Open no further link."""
        for timer in self._redials.values():
            timer.cancel()

    def _sends_no_more(self, peer: int) -> bool:
        links = self._links
        return peer in self._settled and not links.closing and all(one.peer != peer for one in links.incoming)

    def _fail_in_vain(self, peer: int) -> None:
        if self._sends_no_more(peer):
            for collective in self._router.awaiting(peer):
                self._engine.abort(collective, self._cause(peer, "it was closed before all had come"))

    def _cause(self, peer: int, reason: str) -> Cause:
        rank = self._router.rank
        return Cause(CauseKind.LINK, rank, f"the link between ranks {rank} and {peer} broke: {reason}")

    def _fail_unless_lost(self, control: ControlPlane, peer: int, carried: list[Collective], cause: Cause) -> None:
        """Let them fail by the peer's loss if it is lost, else as soon as it has answered."""

        def answered(_: int, posted: Sequence[bool], __: str) -> None:
            # What a leaving peer has not posted fails by its leaving, even if the end of its link is heard of first.
            left = self._router.lost.get(peer, cause)
            for collective, is_posted in zip(carried, chain(posted, repeat(True)), strict=False):
                self._engine.abort(collective, cause if is_posted else left)
            carried.clear()

        control.query([(one.key.group_id, one.key.name, one.seq) for one in carried], peer, answered)
        self._reactor.call_later(VERDICT_WITHIN_S, answered, peer, (), "")  # without an answer all fail by the link

    def _pause_s(self, peer: int) -> float:
        """Delay before the next link; it doubles with every break, to bound the load of a faulty peer."""
        now_s = self._reactor.time()
        last_s, pause_s = self._pauses.get(peer, (-CALM_S, 0.0))
        pause_s = 0.0 if now_s - last_s >= CALM_S else min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._pauses[peer] = (now_s, pause_s)
        return pause_s

    def _redial(self, peer: int) -> None:
        del self._redials[peer]
        if not self._links.closing and self._router.owes(peer):
            self._links.to(peer)
            self._links.flush_soon()
