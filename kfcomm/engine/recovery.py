"""Recovery from links that break, and the ends of calls that fail.

A link to a living peer may break; ``core.links`` has the rules. The side that opened the link waits until it is known
whether the peer is lost or only the link. Then it fails the calls in flight on the link, and opens the next link when
it has something to send. The other side fails nothing; it only makes sure that the first side notices, too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, cast

from kfcomm.core.cause import Cause, CauseKind, error_of
from kfcomm.core.collective import Collective, GroupView, Post
from kfcomm.core.links import LINKS, Incoming, Outgoing
from kfcomm.core.machine import Effects
from kfcomm.transports.reactor import Timer

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlPlane
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.operation import Operation

logger = logging.getLogger("kfcomm")

NEWS_WITHIN_S = 1.0
"""How long a rank waits to hear why another has left without sending all: such news takes milliseconds."""
ANSWER_WITHIN_S = 5.0
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
        self._reactor.call_later(ANSWER_WITHIN_S, answered, peer, (), "")  # without an answer all fail by the link

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


class CallFailures:
    """Ends the calls of an engine that have failed, and the links on which peers broke the protocol."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def broke(self, collective: Collective | None, error: Exception) -> None:
        """Fail a collective everywhere after an error in its own work; called while the error is handled."""
        if collective is None:
            raise error
        rank = self._engine.rank
        logger.error("rank %d could not carry out %s", rank, collective.title, exc_info=error)
        self._engine.abort(
            collective, Cause(CauseKind.INTERNAL, rank, f"{type(error).__name__} on rank {rank}: {error}")
        )

    def aborted_elsewhere(self, group_id: bytes, name: str, seq: int, cause: Cause) -> None:
        """Fail a collective that another rank has aborted."""
        effects: Effects = []
        self._engine.router.on_abort(group_id, name, seq, cause, effects)
        self._engine.perform(effects)

    def rejected(self, operation: Operation, post: Post, cause: Cause) -> None:
        """End a call that was refused when it was posted."""
        engine, group, name = self._engine, post.group, post.name
        for observer in engine.all_observers():
            observer.refused(group, name, cause.message, is_local=False)
        operation.reject(error_of(cause, name, group.titled(name)))
        self._tell_mismatch(group, name, engine.router.num_uses(group.id, name) - 1, cause)

    def failed(self, collective: Collective, cause: Cause) -> None:
        """End a call in flight: reject it, and take back what links hold of it."""
        engine, operation = self._engine, cast("Operation", collective.driver)
        engine.deadlines.inquiries.pop(operation, None)
        is_last = not (engine.router.live or engine.slots.pending)
        for observer in engine.all_observers():
            observer.failed(operation, cause.message, is_last=is_last)
        for sender in engine.links.by_peer.values():
            for header in sender.withdraw(operation):
                if header[7] & 1:  # it was charged to the credit, and never leaves
                    sender.state.window.give(collective.nbytes_sent(header[4], header[6], header[5]), 1)
        engine.links.disown(operation)
        story = engine.recorder.story(collective.name) if cause.kind is CauseKind.INTERNAL else ()
        operation.reject(error_of(cause, collective.name, collective.title, story))
        del collective.driver  # as at completion: one that has failed is in no cycle
        self._tell_mismatch(collective.group, collective.name, collective.seq, cause)

    def violated(self, incoming: Incoming, reason: str) -> None:
        """Close a link on which a peer sent what it must not."""
        engine = self._engine
        link = engine.links.back(incoming)
        if link is not None:
            logger.warning("rank %d closes a link from rank %d, which sent %s", engine.rank, link.peer, reason)
            link.abort()
            engine.recovery.incoming_broke(incoming, f"rank {link.peer} sent {reason}")

    def _tell_mismatch(self, group: GroupView, name: str, seq: int, cause: Cause) -> None:
        listener = self._engine.mismatch_listeners.get(group.id)
        if listener is not None and cause.kind is CauseKind.MISMATCH:
            listener(name, seq)
