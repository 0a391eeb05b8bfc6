"""Who gets what arrives: collectives matched by (group, key, sequence of that key), never by order.

The router of a rank holds every collective that is posted and not complete, and what came early for those
that are not posted yet. It spends and returns credit and finds mismatches; what is over before it has begun is known
to ``tombstones``, what a broken link may have lost to ``links``. Links bind to an epoch when they open, so an epoch
never appears here.

Invariants:

- Everything that arrives is absorbed at once: by its collective, by the early store (within the peer's
  credit), or dropped, if its collective is over.
- A chunk reaches a collective only if both ends have the same signature; else the collective is aborted
  on every rank, with both signatures in the message.
- For what comes from a peer no method raises: a broken rule becomes a ``VIOLATION`` effect.

It owns no memory: payloads are handles of its caller. Effects are tuples appended to the caller's list, the
machines' (``machine.Do``) among them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import (
    AnySignature,
    Arrival,
    Collective,
    Early,
    EarlyItem,
    GroupView,
    Incoming,
    ItemSizes,
    Key,
    Outgoing,
    Series,
    shown,
)
from kfcomm.core.credit import DEFAULT_CREDIT, Credit
from kfcomm.core.frame import MAX_ID, Header, Kind
from kfcomm.core.links import LINKS, Links
from kfcomm.core.machine import UP, Effects
from kfcomm.core.names import MAX_SIGNATURES, Names
from kfcomm.core.program import Program
from kfcomm.core.signature import Signature, disagreement, from_wire
from kfcomm.core.tombstones import Tombstones

MAX_ARRIVALS = 1 << 15
"""Kinds of chunks of one link that are known at a time."""
MAX_ASKS = 1 << 17
"""More unanswered questions than this on one link are taken for an attack."""


class Tell(IntEnum):
    """Tags of the router's own effects; the fields after the tag are in brackets."""

    ANSWER = 16
    """[incoming, header]: send this frame back on the link that ``incoming`` stands for."""
    FLOOD = 17
    """[group id, name, seq, cause]: tell every rank that this collective is aborted."""
    FAILED = 18
    """[collective, cause]: it is over on this rank."""
    VIOLATION = 19
    """[incoming, reason]: the peer broke the protocol; close that link."""
    EARLY = 20
    """[group id, name, seq, signature or None]: first sign of a collective that is not posted here."""
    DROPPED = 21
    """[payload]: nobody wants it."""
    BROKEN = 22
    """[peer, number, reason]: the peer says that this link to it is broken; it is, unless there is a newer one."""


ANSWER, FLOOD, FAILED, VIOLATION, EARLY, DROPPED, BROKEN = (int(tell) for tell in Tell)
POSTED = int(Kind.POSTED)

OVERDRAWN = "more chunks than it had credit for"

Ticket = tuple[Any, ...]
"""What ``match`` found for a chunk: opaque, to be handed to ``arrived`` with its payload."""


class Router:
    """All collectives of one rank in one epoch. ``rank`` is the world rank, ``credit`` that of every link."""

    def __init__(self, rank: int, credit: Credit = DEFAULT_CREDIT) -> None:
        self.rank = rank
        self.credit = credit
        self.live: dict[Collective, None] = {}
        self.names = Names()
        self._links = Links()
        self._tombstones = Tombstones()
        # The same tables, at hand for every post, where a call costs more than a look.
        self.lost = self._tombstones.lost
        self.dead = self._tombstones.causes
        self._groups = self._tombstones.groups

    # ---------------------------------------------------------------- what this rank does

    def post(
        self,
        group: GroupView,
        name: str,
        signature: Signature,
        program: Program,
        sizes: ItemSizes,
        effects: Effects,
        *,
        overlapping: bool = False,
        seq: int | None = None,
        generation: int = 0,
        collective: Collective | None = None,
    ) -> Collective | Cause:
        """Begin a collective under the key's next sequence number, or say why it cannot begin.

        ``overlapping``: further uses of the key may begin before earlier ones are complete; otherwise a
        second use while the first is in flight fails on every rank, and the first goes on.
        ``seq``: take this number, which is not below the next, and leave out those before it.
        ``generation``: of the strategy under which the program was made; the same on every rank.
        ``collective``: what is to begin; a new one if left out.

        Raises:
            LocalProtocolError: ``2**20`` names are in flight.
        """
        key = self.names.used(group.id, name)
        self._groups.setdefault(group.id, group)
        if key.begun is not None:
            key.begun.enter()
        if seq is not None:
            self._leave_out(key, seq, effects)
        if self.dead or self.lost or (key.live and not overlapping):
            cause = self._obstacle(group, key, overlapping, effects)
            if cause is not None:
                key.spoil(key.next_seq)
                key.next_seq += 1
                return cause
        if collective is None:
            collective = Collective()
        collective.begin(self.names.series(group, key, signature, program, sizes), generation)
        self._start(key, collective, effects)
        return collective

    def post_again(self, series: Series, collective: Collective, effects: Effects) -> bool:
        """Begin the next use of a series, as ``post`` does, if nothing is unusual; False if anything is.

        A second use in flight is unusual. ``collective`` has begun but for its number.
        """
        key = series.key
        if key.live or key.begun or self.dead or self.lost or series.version != self.names.version:
            return False
        collective.seq = seq = key.next_seq
        key.next_seq = seq + 1
        key.live[seq] = collective
        self.live[collective] = None
        collective.start(effects)
        if key.early:
            self._replay(collective, effects)
        return True

    def enter(self, collective: Collective) -> None:
        """A collective that has begun by itself, under the number of its key that was the next, is under way."""
        collective.key.live[collective.seq] = collective
        self.live[collective] = None

    def series(self, group: GroupView, name: str, signature: Signature, program: Program, sizes: ItemSizes) -> Series:
        """What the uses of a name with this signature have in common: what ``post_again`` takes."""
        return self.names.series(group, self.names.used(group.id, name), signature, program, sizes)

    def refuse(self, group: GroupView, name: str, message: str, effects: Effects, *, seq: int | None = None) -> Cause:
        """A call failed its local checks: it takes its sequence number (see ``post``), and fails on every rank."""
        key = self.names.key(group.id, name)
        if seq is not None:
            self._leave_out(key, seq, effects)
        cause = Cause(CauseKind.REFUSED, self.rank, message)
        self._tombstones.take(key, key.next_seq)
        self._bury(key, key.next_seq, effects)
        effects.append((FLOOD, key.group_id, key.name, key.next_seq, cause))
        key.spoil(key.next_seq)
        key.next_seq += 1
        return cause

    def leave_out(self, group: GroupView, name: str, below: int, effects: Effects) -> None:
        """No use of this key with a number below this one will be posted that was not: what came for them is dropped.

        The other ranks are not told: their calls are failed by other means, or left out, too.
        """
        self._leave_out(self.names.key(group.id, name), below, effects)

    def leave(self, group_id: bytes, effects: Effects) -> None:
        """This rank posts nothing more in a group, of which it has nothing in flight.

        What it had posted is still known for a while, see ``Names``; what comes for it is dropped. O(its names).
        """
        for key in self.names.of_group(group_id):
            for seq in list(key.early):
                self._bury(key, seq, effects)
        self.names.leave(group_id)
        self._groups.pop(group_id, None)

    def abort(self, collective: Collective, cause: Cause, effects: Effects) -> None:
        """Fail a collective here and, unless the others hear the cause by itself (a lost peer), everywhere."""
        if self._forget(collective, effects):
            key = collective.key
            if cause.kind not in (CauseKind.LOST, CauseKind.EPOCH):
                effects.append((FLOOD, key.group_id, key.name, collective.seq, cause))
            effects.append((FAILED, collective, cause))

    def complete(self, collective: Collective) -> None:
        """A DONE effect was carried out: the router forgets the collective."""
        if self.live.pop(collective, 0) is None:
            del collective.key.live[collective.seq]

    def open(self, peer: int) -> tuple[Outgoing, list[Header]]:
        """The sending end of a new link to a peer, and the frames that come first on it."""
        return self._links.open(peer, self.credit)

    def opened(self, peer: int) -> Incoming:
        """The receiving end of a link that a peer opened."""
        return Incoming(peer, self.credit)

    def broke(self, outgoing: Outgoing) -> list[Collective]:
        """A link that this rank opened is broken: what it has in flight that the link may have carried.

        To be aborted; the peer is told of the rest by the next link, see ``owes``.
        """
        peer = outgoing.peer
        if peer in self.lost:
            return []
        self._links.broke(outgoing)
        return [one for one in self._exchanging(peer) if outgoing.keys.get(one.key.id) is one.key]

    def owes(self, peer: int) -> bool:
        """Whether a link to this peer should be opened even if there is nothing to send."""
        return self._links.owes(peer)

    # ---------------------------------------------------------------- what peers do

    def define_key(
        self, incoming: Incoming, number: int, group_id: bytes, name: str, below: int, effects: Effects
    ) -> None:
        """The peer will call this name by a number; of its uses below another one, broken links may have lost some."""
        if number >= MAX_ID:
            effects.append((VIOLATION, incoming, f"key number {number}"))
            return
        if number in incoming.keys or number < incoming.given_up:
            incoming.arrivals.clear()
        key = incoming.keys[number] = self.names.key(group_id, name)
        for collective in [one for seq, one in key.live.items() if seq < below]:
            if self._awaits(collective, incoming.peer):
                message = f"the link between ranks {incoming.peer} and {self.rank} broke, and what it carried is lost"
                self.abort(collective, Cause(CauseKind.LINK, self.rank, message), effects)

    def on_left(self, incoming: Incoming, group_id: bytes, effects: Effects) -> None:
        """The peer has left a group: all that it had to send for it has come on this link, or will not come."""
        incoming.forget(group_id)
        message = f"rank {incoming.peer} has left the group"
        for collective in [one for one in self._exchanging(incoming.peer) if one.group.id == group_id]:
            if self._awaits(collective, incoming.peer):
                self.abort(collective, Cause(CauseKind.CANCELLED, incoming.peer, message), effects)

    def define_signature(self, incoming: Incoming, number: int, fields: list[Any], effects: Effects) -> None:
        """The peer will call this signature by a number."""
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

    def receive(
        self, incoming: Incoming, header: Header, nbytes: int, payload: Any, effects: Effects
    ) -> Collective | None:
        """A chunk that is here as a whole and like one that came before it: give it to its collective at once.

        None if it has to go by ``match`` and ``arrived``, which alone know what to make of it: it is the first of its
        kind, early, late, or wrong. Nothing has happened then, but that its sender may be known to have posted: it has,
        whatever is to become of the chunk.
        """
        _, key_id, seq, number, lane, phase, index, stamp = header
        arrival = incoming.arrivals.get((key_id, number, lane, phase))
        if arrival is None:
            return None
        collective = arrival.live.get(seq)
        if collective is None or collective.series is not arrival.series or collective.deferred:
            return None
        if index != arrival.last:
            if index > arrival.last or nbytes != arrival.nbytes:
                return None
        elif nbytes != arrival.last_nbytes:
            return None
        charged = stamp - collective.stamp
        if charged and charged != 1:
            return None
        collective.posted |= arrival.posted
        if not collective.take(arrival.route, index, payload, effects):
            return None
        if charged and not incoming.window.pass_on(nbytes):
            effects.append((VIOLATION, incoming, OVERDRAWN))
        return collective

    def match(self, incoming: Incoming, header: Header, nbytes: int, effects: Effects) -> Ticket | None:
        """Whose chunk this is. None: nobody's, drop the payload (the effects say why, if there is more to say)."""
        _, number, seq, signature_number, _, _, _, stamp = header
        charged = stamp & 1
        key = incoming.keys.get(number)
        signature = incoming.signatures.get(signature_number)
        if key is None or signature is None:
            effects.append((VIOLATION, incoming, "a chunk under a number that was never defined"))
            return None
        if charged and not incoming.window.charge(nbytes):
            effects.append((VIOLATION, incoming, OVERDRAWN))
            return None
        collective = key.find(seq)
        if collective is None:
            return self._match_early(incoming, key, signature, header, nbytes, effects)
        if charged:
            incoming.window.matched(nbytes)
        return self._match_posted(incoming, collective, signature, header, nbytes, effects)

    def arrived(self, ticket: Ticket, payload: Any, effects: Effects) -> None:
        """The payload of a matched chunk is complete."""
        target = ticket[0]
        if type(target) is not Early:
            if target.key.live.get(target.seq) is target:
                target.arrived(ticket[1], ticket[2], payload, effects)
            else:
                effects.append((DROPPED, payload))
            return
        item = (*ticket[1:], payload)
        if target.dropped:
            self._discard(item, effects)
        elif target.collective is None:
            target.items.append(item)
        else:
            self._deliver_early(target.collective, item, effects)

    def on_ask(self, incoming: Incoming, header: Header, effects: Effects) -> None:
        """The peer wants to know when a collective is posted here."""
        _, number, seq, signature_number, _ = header
        key = incoming.keys.get(number)
        signature = incoming.signatures.get(signature_number)
        if key is None or signature is None:
            effects.append((VIOLATION, incoming, "a question under a number that was never defined"))
            return
        collective = key.find(seq)
        if collective is not None:
            self._answer(collective, incoming, signature, header, effects)
        elif not self._tombstones.is_over(key, seq):
            incoming.asks += 1
            if incoming.asks > MAX_ASKS:
                effects.append((VIOLATION, incoming, "too many questions"))
            else:
                early = self._early(key, seq, signature, effects)
                if early.asks is None:
                    early.asks = []
                early.asks.append((incoming, signature, header))

    def on_posted(self, outgoing: Outgoing, number: int, seq: int, effects: Effects) -> None:
        """The peer has posted a collective that we asked about."""
        key = outgoing.keys.get(number)
        collective = key.live.get(seq) if key is not None else None
        if collective is not None and outgoing.peer in collective.group.index:
            self._saw(collective, collective.group.index[outgoing.peer], effects)

    def on_abort(self, group_id: bytes, name: str, seq: int, cause: Cause, effects: Effects) -> None:
        """Another rank aborted a collective: it fails where it is pending, or as soon as it is posted."""
        if group_id == LINKS:
            if name == str(self.rank):
                effects.append((BROKEN, cause.rank, seq, cause.message))
            return
        key = self.names.find(group_id, name)
        collective = None if key is None else key.find(seq)
        if collective is not None:
            self._forget(collective, effects)
            effects.append((FAILED, collective, cause))
        elif (key is None or seq >= key.next_seq) and self._tombstones.put(group_id, name, seq, cause):
            if key is not None:
                self._bury(key, seq, effects)
            effects.append((EARLY, group_id, name, seq, None))

    def on_peer_left(self, peer: int, cause: Cause) -> None:
        """A peer posts nothing more: later posts that need it fail; what it has posted may still complete."""
        self.lost.setdefault(peer, cause)
        self._links.forget(peer)

    def on_peer_lost(self, peer: int, cause: Cause, effects: Effects) -> None:
        """A peer is gone: what it takes part in fails, now and from now on."""
        self.on_peer_left(peer, cause)
        for collective in [one for one in self.live if peer in one.group.index]:
            self._forget(collective, effects)
            effects.append((FAILED, collective, cause))
        for key in self.names:
            if key.early and self._tombstones.is_closed(key.group_id):
                for seq in list(key.early):
                    self._bury(key, seq, effects)

    # ---------------------------------------------------------------- what others may ask

    def awaiting(self, peer: int) -> list[Collective]:
        """The collectives in flight to which a peer has yet to send something."""
        return [one for one in self._exchanging(peer) if self._awaits(one, peer)]

    @property
    def num_keys(self) -> int:
        """Names met so far, in all groups."""
        return len(self.names)

    def uses(self) -> list[tuple[bytes, str, int]]:
        """Group, name and number of uses on this rank of every name met, oldest first. Safe to call from any thread."""
        return [(key.group_id, key.name, key.next_seq) for key in list(self.names)]

    def num_uses(self, group_id: bytes, name: str) -> int:
        """Sequence numbers of a key that were taken on this rank: the next one."""
        key = self.names.find(group_id, name)
        return 0 if key is None else key.next_seq

    def is_posted(self, group_id: bytes, name: str, seq: int) -> bool:
        """Whether this rank has posted that collective, now or earlier. Safe to call from any thread."""
        key = self.names.find(group_id, name)
        return key is not None and seq < key.next_seq

    def expected(self, group_id: bytes, name: str) -> AnySignature | Cause | None:
        """What is known of the key's next use: its signature if something came early, its cause if it is dead."""
        key = self.names.find(group_id, name)
        early = None if key is None else key.early.get(key.next_seq)
        if early is not None:
            return early.signature
        return self.dead.get((group_id, name, 0 if key is None else key.next_seq))

    # ---------------------------------------------------------------- inside

    def _start(self, key: Key, collective: Collective, effects: Effects) -> None:
        key.live[key.next_seq] = collective
        self.live[collective] = None
        key.next_seq += 1
        collective.start(effects)
        if key.early:
            self._replay(collective, effects)

    def _obstacle(self, group: GroupView, key: Key, overlapping: bool, effects: Effects) -> Cause | None:
        cause = self._tombstones.take(key, key.next_seq) if self.dead else None
        if cause is not None:
            return cause
        cause = self._tombstones.gone_from(group) if self.lost else None
        if cause is not None:
            self._bury(key, key.next_seq, effects)
            return cause
        if key.live and not overlapping:
            where = f"on {group.called(group.rank)} in flight"
            cause = Cause(CauseKind.REFUSED, self.rank, f"{group.titled(key.name)} was used again {where}")
            self._bury(key, key.next_seq, effects)
            effects.append((FLOOD, key.group_id, key.name, key.next_seq, cause))
            return cause
        return None

    def _leave_out(self, key: Key, seq: int, effects: Effects) -> None:
        """The next use of this key is ``seq``: what is known of those before is of no use. There may be very many."""
        if self.dead:
            self._tombstones.forget(key, range(key.next_seq, seq))
        if key.early:
            for skipped in sorted(early for early in key.early if early < seq):
                self._bury(key, skipped, effects)
        if seq > key.next_seq:
            key.spoil(seq - 1)
            key.next_seq = seq

    def _forget(self, collective: Collective, effects: Effects) -> bool:
        if self.live.pop(collective, 0) == 0:
            return False
        del collective.key.live[collective.seq]
        collective.key.spoil(collective.seq)
        collective.deferred = None
        effects += [(DROPPED, payload) for payload in collective.take_held()]
        return True

    def _exchanging(self, peer: int) -> list[Collective]:
        return [one for one in self.live if peer in one.group.index and one.group.index[peer] in one.program.neighbours]

    @staticmethod
    def _awaits(collective: Collective, peer: int) -> bool:
        sender = collective.group.index.get(peer)
        return sender is not None and collective.awaits(sender)

    def _match_posted(
        self,
        incoming: Incoming,
        collective: Collective,
        signature: AnySignature,
        header: Header,
        nbytes: int,
        effects: Effects,
    ) -> Ticket | None:
        sender = collective.group.index.get(incoming.peer)
        if sender is None:
            effects.append((VIOLATION, incoming, f"a chunk of {collective.title}, where it takes no part"))
            return None
        _, key_id, _, number, lane, phase, index, stamp = header
        if not self._agrees(sender, collective, signature, stamp >> 1, effects):
            return None
        route = collective.program.routes.get((lane, phase, sender))
        if route is None or not collective.accepts(route, index):
            effects.append((VIOLATION, incoming, f"a chunk of {collective.title} that does not belong there"))
            return None
        if nbytes != collective.nbytes_expected(route, index):
            effects.append((VIOLATION, incoming, f"a chunk of {collective.title} of {nbytes} bytes"))
            return None
        if not collective.posted >> sender & 1:
            self._saw(collective, sender, effects)
        if phase == UP or route.lane.keeps or not route.lane.targets:  # what is passed on has to be kept for long
            known = incoming.arrivals.get((key_id, number, lane, phase))
            if known is None or known.series is not collective.series:
                if len(incoming.arrivals) >= MAX_ARRIVALS:
                    incoming.arrivals.clear()
                incoming.arrivals[key_id, number, lane, phase] = Arrival(collective.series, route, sender)
        return (collective, route, index)

    def _agrees(
        self, sender: int, collective: Collective, signature: AnySignature, generation: int, effects: Effects
    ) -> bool:
        ours = collective.signature
        if (signature is ours or signature == ours) and generation == collective.generation:
            return True
        group = collective.group
        own = (group.called(group.rank), ours, collective.generation)
        message = disagreement((group.called(sender), signature, generation), own)
        cause = Cause(CauseKind.MISMATCH, self.rank, f"{collective.title:.300} differs between ranks{message}")
        self.abort(collective, cause, effects)
        return False

    def _saw(self, collective: Collective, rank: int, effects: Effects) -> None:
        """A sign that this group rank has posted the collective."""
        collective.posted |= 1 << rank
        if collective.deferred:
            effects.extend(collective.deferred.pop(rank, ()))

    def _match_early(
        self, incoming: Incoming, key: Key, signature: AnySignature, header: Header, nbytes: int, effects: Effects
    ) -> Ticket | None:
        seq, charged = header[2], header[7] & 1
        if self._tombstones.is_over(key, seq):
            if charged:
                incoming.window.matched(nbytes)
            return None
        if not charged:
            effects.append((VIOLATION, incoming, f"a chunk of {shown(key.name)}, which is not posted, without credit"))
            return None
        return (self._early(key, seq, signature, effects), incoming, signature, header, nbytes)

    def _early(self, key: Key, seq: int, signature: AnySignature, effects: Effects) -> Early:
        early = key.early.get(seq)
        if early is None:
            early = key.early[seq] = Early(signature)
            effects.append((EARLY, key.group_id, key.name, seq, signature))
        return early

    def _answer(
        self, collective: Collective, incoming: Incoming, signature: AnySignature, header: Header, effects: Effects
    ) -> None:
        sender = collective.group.index.get(incoming.peer)
        if sender is None:
            effects.append((VIOLATION, incoming, f"a question about {collective.title}, where it takes no part"))
        elif self._agrees(sender, collective, signature, header[4], effects):
            self._saw(collective, sender, effects)
            effects.append((ANSWER, incoming, (POSTED, header[1], header[2])))

    def _replay(self, collective: Collective, effects: Effects) -> None:
        """Let a collective that has begun have what came early for it."""
        early = collective.key.early.pop(collective.seq, None)
        if early is None:
            return
        early.collective = collective
        for incoming, signature, header in early.asks or ():
            incoming.asks -= 1
            if collective in self.live:
                self._answer(collective, incoming, signature, header, effects)
        for item in early.items:
            self._deliver_early(collective, item, effects)

    def _deliver_early(self, collective: Collective, item: EarlyItem, effects: Effects) -> None:
        incoming, signature, header, nbytes, payload = item
        ticket = None
        if collective in self.live:
            ticket = self._match_posted(incoming, collective, signature, header, nbytes, effects)
        if ticket is None:
            self._discard(item, effects)
        else:
            incoming.window.matched(nbytes)
            self.arrived(ticket, payload, effects)

    @staticmethod
    def _discard(item: EarlyItem, effects: Effects) -> None:
        incoming, _, _, nbytes, payload = item
        incoming.window.matched(nbytes)
        effects.append((DROPPED, payload))

    def _bury(self, key: Key, seq: int, effects: Effects) -> None:
        """Drop what came early for a collective that will never run."""
        early = key.early.pop(seq, None)
        if early is not None:
            early.dropped = True
            for item in early.items:
                self._discard(item, effects)
            for incoming, _, _ in early.asks or ():
                incoming.asks -= 1
