"""Matching of chunks: each goes to the collective of its (group, key, sequence number), posted or not.

Invariants:

- Everything that arrives is absorbed at once: by its collective, by the early store (within the peer's credit), or
  dropped if its collective is over. So no reader waits for a post.
- A chunk reaches a collective only if both ends have the same signature; else the collective is aborted on every rank,
  with both signatures in the message.
"""

from __future__ import annotations

from typing import Any

from kfcomm.core.calls import ANSWER, DROPPED, EARLY, RESUME, VIOLATION, Calls, discard
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import AnySignature, Collective, Key, shown
from kfcomm.core.frame import Header, Kind
from kfcomm.core.links import Arrival, Early, EarlyItem, Incoming, Shown
from kfcomm.core.machine import UP, Effects
from kfcomm.core.signature import disagreement

MAX_ARRIVALS = 1 << 15
"""Kinds of chunks of one link that are known at a time."""

POSTED = int(Kind.POSTED)
OVERDRAWN = "more chunks than it had credit for"

Ticket = tuple[Any, ...]
"""Opaque result of ``match`` for a chunk, to be handed to ``arrived`` with its payload."""


class Matching(Calls):
    """Calls, and the chunks that arrive for them."""

    def receive(
        self, incoming: Incoming, header: Header, nbytes: int, payload: Any, effects: Effects
    ) -> Collective | None:
        """Give a whole chunk like earlier ones to its collective at once; None if ``match`` and ``arrived`` must."""
        # None for the first of its kind, an early, a late and a wrong one. Then nothing has changed, except that its
        # sender may be recorded as having posted, which is true in any case.
        _, key_id, seq, number, lane, phase, index, stamp = header
        arrival = incoming.arrivals.get((key_id, number, lane, phase))
        if arrival is None:
            return None
        collective = arrival.live.get(seq)
        # A use with deferred sends must learn that this sender has posted, which only ``match`` does.
        if collective is None or collective.series is not arrival.series or collective.deferred:
            return None
        if index != arrival.last:
            if index > arrival.last or nbytes != arrival.nbytes:
                return None
        elif nbytes != arrival.last_nbytes:
            return None
        # Both bits of a stamp at once: any other difference than the credit bit is another generation, a mismatch.
        charged = stamp - collective.stamp
        if charged and charged != 1:
            return None
        if collective.shortcut is not None and collective.shortcut.covers(arrival.sender):
            return None
        collective.posted |= arrival.posted
        if not collective.take(arrival.route, index, payload):
            return None
        if charged and not incoming.window.pass_on(nbytes):
            effects.append((VIOLATION, incoming, OVERDRAWN))
        return collective

    def match(self, incoming: Incoming, header: Header, nbytes: int, effects: Effects) -> Ticket | None:
        """Return a ticket for a chunk; None if its payload is to be dropped (a violation is among the effects)."""
        _, number, seq, signature_number, _, _, _, stamp = header
        charged = stamp & 1
        key = incoming.keys.get(number)
        signature = incoming.signatures.get(signature_number)
        if key is None or signature is None:
            effects.append((VIOLATION, incoming, "a chunk under a number that was never defined"))
            return None
        # Before the match: the sender has spent this credit, whatever becomes of the chunk.
        if charged and not incoming.window.charge(nbytes):
            effects.append((VIOLATION, incoming, OVERDRAWN))
            return None
        collective = key.find(seq)
        if collective is None:
            return self._match_early(key, (incoming, signature, header, nbytes), effects)
        if charged:
            incoming.window.matched(nbytes)
        return self._match_posted(collective, (incoming, signature, header, nbytes), effects)

    def arrived(self, ticket: Ticket, payload: Any, effects: Effects) -> None:
        """Take the complete payload of a matched chunk."""
        target = ticket[0]
        if type(target) is not Early:
            # It may have failed while the payload arrived.
            if target.key.live.get(target.seq) is target:
                target.arrived(ticket[1], ticket[2], payload)
            else:
                effects.append((DROPPED, payload))
            return
        item = (*ticket[1:], payload)
        if target.dropped:
            discard(item, effects)
        elif target.collective is None:
            target.items.append(item)
        else:
            self._deliver_early(target.collective, item, effects)

    # ---------------------------------------------------------------- inside

    def _match_posted(self, collective: Collective, chunk: Shown, effects: Effects) -> Ticket | None:
        incoming, signature, header, nbytes = chunk
        sender = collective.group.index.get(incoming.peer)
        if sender is None:
            effects.append((VIOLATION, incoming, f"a chunk of {collective.title}, where it takes no part"))
            return None
        _, key_id, _, number, lane, phase, index, stamp = header
        if not self._agrees(sender, collective, signature, stamp >> 1, effects):
            return None
        if collective.shortcut is not None and collective.shortcut.covers(sender):
            collective.shortcut.leave()
        route = collective.program.routes.get((lane, phase, sender))
        if route is None or not collective.accepts(route, index):
            effects.append((VIOLATION, incoming, f"a chunk of {collective.title} that does not belong there"))
            return None
        if nbytes != collective.nbytes_expected(route, index):
            effects.append((VIOLATION, incoming, f"a chunk of {collective.title} of {nbytes} bytes"))
            return None
        if not collective.posted >> sender & 1:
            self._saw(collective, sender, effects)
        if phase == UP or route.lane.keeps or not route.lane.targets:  # a forwarded payload must be stored for long
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
        """Record that this group rank has posted the collective, and send what waited for that."""
        collective.posted |= 1 << rank
        if collective.deferred:
            effects.extend((RESUME, collective, send) for send in collective.deferred.pop(rank, ()))

    def _match_early(self, key: Key, chunk: Shown, effects: Effects) -> Ticket | None:
        incoming, signature, header, nbytes = chunk
        seq, charged = header[2], header[7] & 1
        # Late chunks are no fault of the sender, which hears of the end later: it gets its credit back.
        if self._aborted.is_over(key, seq):
            if charged:
                incoming.window.matched(nbytes)  # it is dropped, so its credit goes back
            return None
        if not charged:  # its sender cannot have seen this rank post, and must have spent credit
            effects.append((VIOLATION, incoming, f"a chunk of {shown(key.name)}, which is not posted, without credit"))
            return None
        return (self._early(key, seq, signature, effects), *chunk)

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
        """Give a collective that has begun its early chunks and questions."""
        early = collective.key.early.pop(collective.seq, None)
        if early is None:
            return
        # Before the items: payloads of others may still be under way, and go to the collective when they are whole.
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
            ticket = self._match_posted(collective, (incoming, signature, header, nbytes), effects)
        if ticket is None:
            discard(item, effects)
        else:
            incoming.window.matched(nbytes)
            self.arrived(ticket, payload, effects)
