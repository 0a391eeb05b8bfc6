"""What may be sent to a rank before it has posted: as much as it has given credit for; the rest asks, and waits.

The frames themselves are their caller's to send. See ``credit`` for why nobody can be blocked by that.
"""

from __future__ import annotations

from kfcomm.core.collective import Collective, Outgoing
from kfcomm.core.frame import Header, Kind
from kfcomm.core.links import definitions
from kfcomm.core.machine import SEND, Effect

CHUNK, ASK = int(Kind.CHUNK), int(Kind.ASK)


def admit(
    outgoing: Outgoing, effect: Effect, collective: Collective, to: int, nbytes: int
) -> tuple[list[Header], Header | None]:
    """Frames for one destination of a SEND effect: definitions to send first, and the chunk's header.

    None for the header holds the chunk back: a SEND of it alone comes again when its receiver has posted, through the
    effects of ``Router.on_posted``.
    """
    _, _, _, lane, index, phase, source, payload = effect
    series = collective.series
    key_id, number = series.key_id, series.signature_id
    before = [] if series in outgoing.known else definitions(outgoing, collective)
    if collective.posted >> to & 1:
        charged = 0
    elif not (collective.deferred and to in collective.deferred) and outgoing.window.take(nbytes):
        charged = 1
    else:
        if collective.deferred is None:
            collective.deferred = {}
        waiting = collective.deferred.setdefault(to, [])
        if not waiting:
            before.append((ASK, key_id, collective.seq, number, collective.generation))
        waiting.append((SEND, collective, (to,), lane, index, phase, source, payload))
        return before, None
    stamp = collective.stamp + charged
    return before, (CHUNK, key_id, collective.seq, number, lane.number, phase, index, stamp)


def may_send(outgoing: Outgoing, collective: Collective, to: int, nbytes: int) -> bool:
    """Whether ``admit`` lets a chunk of so many bytes go at once."""
    if collective.posted >> to & 1:
        return True
    return not (collective.deferred and to in collective.deferred) and outgoing.window.allows(nbytes)


def announce(outgoing: Outgoing, collective: Collective) -> list[Header]:
    """Frames that tell one of ``collective.unheard()`` what this rank has posted.

    For a collective that has waited a while: ranks that disagree about the graph can all wait for each other
    without a chunk between them (as two that both believe to be the root). Neighbours in a graph form one
    piece, so if each rank announces itself to its own, at least two that differ will meet.
    """
    series = collective.series
    ask = (ASK, series.key_id, collective.seq, series.signature_id, collective.generation)
    return [*definitions(outgoing, collective), ask]
