"""Router: all collectives of one rank, matched by (group, key, sequence number), never by order.

There are three layers, from below: `kfcomm.core.calls` is the table of calls and their states. `kfcomm.core.matching`
gives chunks to them. This module posts, and handles all other frames, broken links and lost ranks. Links bind to an
epoch when they open, so an epoch never appears here.

Invariant: no method raises for what comes from a peer; a broken rule becomes a ``VIOLATION`` effect.

It owns no memory: payloads are handles of its caller. A machine's driver carries out its decisions at once. The router
appends its own decisions as effects, tuples (see ``calls.Tell``), to the caller's list. A frozen dataclass of six
fields would cost nine times as much as a tuple.
"""

from __future__ import annotations

from typing import Any

from kfcomm.core.calls import BROKEN, EARLY, FAILED, VIOLATION
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective, Post, Series
from kfcomm.core.frame import MAX_ID, Header
from kfcomm.core.links import DEFAULT_CREDIT, LINKS, Credit, Incoming, Links, Outgoing
from kfcomm.core.machine import CollectiveDriver, Effects
from kfcomm.core.matching import Matching
from kfcomm.core.names import MAX_SIGNATURES
from kfcomm.core.signature import from_wire

MAX_ASKS = 1 << 17
"""More unanswered questions than this on one link count as an attack."""


class Router(Matching):
    """All collectives of one rank in one epoch. ``rank`` is the world rank, ``credit`` that of every link."""

    def __init__(self, rank: int, credit: Credit = DEFAULT_CREDIT) -> None:
        super().__init__(rank)
        self.credit = credit
        self._links = Links()

    # ---------------------------------------------------------------- what this rank does

    def post(self, post: Post, driver: CollectiveDriver, effects: Effects) -> Collective | Cause:
        """Begin a collective under the name's next sequence number, or return why it cannot begin."""
        group, name, signature, program, sizes, generation, overlapping, seq = post
        key = self.names.used(group.id, name)
        self._groups.setdefault(group.id, group)
        if key.begun is not None:
            key.begun.enter()
        if seq is not None:
            self._leave_out(key, seq, effects)
        # One test on the common path; which obstacle it is, if any, is found out only then.
        if self.dead or self.lost or (key.live and not overlapping):
            cause = self._obstacle(group, key, overlapping, effects)
            if cause is not None:
                # The number is used up: on other ranks the same use has it, and fails with the same cause.
                key.spoil(key.next_seq)
                key.next_seq += 1
                return cause
        series = self.names.series(group, key, signature, program, sizes)
        collective = Collective(series, key.next_seq, generation << 1, driver)
        self._begin(collective, effects)
        return collective

    def post_again(self, series: Series, stamp: int, driver: CollectiveDriver, effects: Effects) -> bool:
        """Begin the next use of a series as ``post`` does; False, with no effect, if anything is unusual."""
        key = series.key
        # Anything unusual takes the path of ``post``, which knows every reason and error.
        if key.live or key.begun or self.dead or self.lost or series.version != self.names.version:
            return False
        # As ``_begin``, without a frame of its own: every call under a known name comes here.
        seq = key.next_seq
        collective = key.live[seq] = Collective(series, seq, stamp, driver)
        key.next_seq = seq + 1
        self.live[collective] = driver
        driver.begin(collective)
        if key.early:
            self._replay(collective, effects)
        return True

    def open(self, peer: int) -> tuple[Outgoing, list[Header]]:
        """Return the sending end of a new link to a peer, and its first frames."""
        return self._links.open(peer, self.credit)

    def opened(self, peer: int) -> Incoming:
        """Return the receiving end of a link that a peer opened."""
        return Incoming(peer, self.credit)

    def broke(self, outgoing: Outgoing) -> list[Collective]:
        """Record that a link of this rank broke; returns the collectives that it may have carried, to be aborted."""
        # Those that have completed here may wait elsewhere: the first frames of the next link are for them.
        peer = outgoing.peer
        if peer in self.lost:
            return []
        self._links.broke(outgoing)
        return [one for one in self._exchanging(peer) if outgoing.keys.get(one.key.id) is one.key]

    def owes(self, peer: int) -> bool:
        """Return whether a link to this peer should be opened even if there is nothing to send."""
        return self._links.owes(peer)

    # ---------------------------------------------------------------- what peers do

    def define_key(self, incoming: Incoming, header: Header, effects: Effects) -> None:
        """Define the peer's number for a name (KEY)."""
        # Of the uses below ``below``, broken links may have lost some.
        _, number, group_id, name, below = header
        if number >= MAX_ID:
            effects.append((VIOLATION, incoming, f"key number {number}"))
            return
        # The number means another name now: facts about chunks under the old one would let wrong chunks through.
        if number in incoming.keys or number < incoming.given_up:
            incoming.arrivals.clear()
        key = incoming.keys[number] = self.names.key(group_id, name)
        for collective in [one for seq, one in key.live.items() if seq < below]:
            if self._awaits(collective, incoming.peer):
                message = f"the link between ranks {incoming.peer} and {self.rank} broke, and what it carried is lost"
                self.abort(collective, Cause(CauseKind.LINK, self.rank, message), effects)

    def on_left(self, incoming: Incoming, group_id: bytes, effects: Effects) -> None:
        """Handle LEFT: what the peer had to send for the group has arrived on this link, or never will."""
        incoming.forget(group_id)
        message = f"rank {incoming.peer} has left the group"
        for collective in [one for one in self._exchanging(incoming.peer) if one.group.id == group_id]:
            if self._awaits(collective, incoming.peer):
                self.abort(collective, Cause(CauseKind.CANCELLED, incoming.peer, message), effects)

    def define_signature(self, incoming: Incoming, number: int, fields: list[Any], effects: Effects) -> None:
        """Define the peer's number for a signature."""
        try:
            signature = self.names.same(from_wire(fields))
        except (TypeError, ValueError):
            effects.append((VIOLATION, incoming, "a signature that is not made of plain values"))
            return
        if number >= MAX_SIGNATURES:
            effects.append((VIOLATION, incoming, f"signature number {number}"))
        else:
            if number in incoming.signatures:
                incoming.arrivals.clear()
            incoming.signatures[number] = signature

    def on_ask(self, incoming: Incoming, header: Header, effects: Effects) -> None:
        """Answer an ASK: the peer waits until a collective is posted here."""
        _, number, seq, signature_number, _ = header
        key = incoming.keys.get(number)
        signature = incoming.signatures.get(signature_number)
        if key is None or signature is None:
            effects.append((VIOLATION, incoming, "a question under a number that was never defined"))
            return
        collective = key.find(seq)
        if collective is not None:
            self._answer(collective, incoming, signature, header, effects)
        elif not self._aborted.is_over(key, seq):
            incoming.asks += 1
            if incoming.asks > MAX_ASKS:
                effects.append((VIOLATION, incoming, "too many questions"))
            else:
                early = self._early(key, seq, signature, effects)
                if early.asks is None:
                    early.asks = []
                early.asks.append((incoming, signature, header))

    def on_posted(self, outgoing: Outgoing, number: int, seq: int, effects: Effects) -> None:
        """Handle POSTED: the peer has posted a collective that this rank asked about."""
        key = outgoing.keys.get(number)
        collective = key.live.get(seq) if key is not None else None
        if collective is not None and outgoing.peer in collective.group.index:
            self._saw(collective, collective.group.index[outgoing.peer], effects)

    def on_abort(self, group_id: bytes, name: str, seq: int, cause: Cause, effects: Effects) -> None:
        """Handle an abort by another rank: the collective fails now, or as soon as it is posted."""
        if group_id == LINKS:
            if name == str(self.rank):
                effects.append((BROKEN, cause.rank, seq, cause.message))
            return
        key = self.names.find(group_id, name)
        collective = None if key is None else key.find(seq)
        if collective is not None:
            self._forget(collective, effects)
            effects.append((FAILED, collective, cause))
        elif (key is None or seq >= key.next_seq) and self._aborted.put(group_id, name, seq, cause):
            if key is not None:
                self._bury(key, seq, effects)
            effects.append((EARLY, group_id, name, seq, None))

    def on_peer_left(self, peer: int, cause: Cause) -> None:
        """Record that a peer posts nothing more: later posts that need it fail, its earlier posts may complete."""
        self.lost.setdefault(peer, cause)
        self._links.forget(peer)

    def on_peer_lost(self, peer: int, cause: Cause, effects: Effects) -> None:
        """Fail every collective of a lost peer, now and from now on."""
        self.on_peer_left(peer, cause)
        for collective in [one for one in self.live if peer in one.group.index]:
            self._forget(collective, effects)
            effects.append((FAILED, collective, cause))
        for key in self.names:
            if key.early and self._aborted.is_closed(key.group_id):
                for seq in list(key.early):
                    self._bury(key, seq, effects)

    def awaiting(self, peer: int) -> list[Collective]:
        """Return the collectives in flight that wait for chunks of a peer."""
        return [one for one in self._exchanging(peer) if self._awaits(one, peer)]

    # ---------------------------------------------------------------- inside

    def _begin(self, collective: Collective, effects: Effects) -> None:
        key, driver = collective.series.key, collective.driver
        key.live[key.next_seq] = collective
        key.next_seq += 1
        self.live[collective] = driver
        driver.begin(collective)
        if key.early:
            self._replay(collective, effects)

    def _exchanging(self, peer: int) -> list[Collective]:
        return [one for one in self.live if peer in one.group.index and one.group.index[peer] in one.program.neighbours]

    @staticmethod
    def _awaits(collective: Collective, peer: int) -> bool:
        sender = collective.group.index.get(peer)
        return sender is not None and collective.awaits(sender)
