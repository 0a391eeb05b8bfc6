"""One router at a time, with its links: posted to, sent to and asked by hand."""

from __future__ import annotations

from dataclasses import replace

from kfcomm.core import links
from kfcomm.core.calls import Tell
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import GroupView
from kfcomm.core.frame import Kind
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.links import Credit, Incoming, Outgoing
from kfcomm.core.machine import UP, Do
from kfcomm.core.recorder import EffectRecorder
from kfcomm.core.router import Router
from kfcomm.types import Verb
from tests.core.specs import ITEM, Spec

STAR = (GraphPair.of(Graph.from_parents([0, 0, 0])),)
RANKS = (0, 1, 2)
SUM = Spec("grad", Verb.ALL_REDUCE, RANKS, STAR, (4,), chunk=4)
UNLIKE = (GraphPair(STAR[0].reduce, Graph.from_parents([0, 0, 1])),)
"""Other graphs, along which the reduction goes as along the star."""
NBYTES = 4 * ITEM.itemsize
TIMEOUT = Cause(CauseKind.TIMEOUT, 2, "too late")


class Desk:
    """One router, rank 0 of 3 unless told otherwise, and the links that end and begin there."""

    def __init__(self, rank=0, credit=None):
        credit = credit or Credit(1000, 10)
        self.router = Router(rank)
        self.rank = rank
        self.effects = []
        self.incoming = {peer: Incoming(peer, credit) for peer in range(5)}
        self.outgoing = {peer: Outgoing(peer, credit) for peer in range(5)}

    def take(self, *tags):
        """The effects since the last time, or those with one of these tags."""
        taken = [effect for effect in self.effects if not tags or effect[0] in tags]
        self.effects.clear()
        return taken

    def view(self, spec=SUM):
        return GroupView(spec.group_id, spec.members, spec.members.index(self.rank))

    def post(self, spec=SUM, seq=None):
        return self.router.post(spec.post(self.view(spec), seq), EffectRecorder(self.effects), self.effects)

    def again(self, series, generation=0):
        """The next use of a series, the short way: the collective, or None if it has to go the long way."""
        driver = EffectRecorder(self.effects)
        return driver.machine if self.router.post_again(series, generation << 1, driver, self.effects) else None

    def refuse(self, spec=SUM, **options):
        return self.router.refuse(self.view(spec), spec.name, "why", self.effects, **options)

    def series(self, spec=SUM):
        view = self.view(spec)
        return self.router.series(view, spec.name, spec.signature, spec.program(view.rank), spec.sizes)

    def define(self, peer, spec=SUM, number=0, signature_number=None):
        incoming = self.incoming[peer]
        self.router.define_key(incoming, (Kind.KEY, number, spec.group_id, spec.name, 0), self.effects)
        number = number if signature_number is None else signature_number
        self.router.define_signature(incoming, number, listed(spec.signature), self.effects)

    def match(self, peer, nbytes=NBYTES, **fields):
        return self.router.match(self.incoming[peer], header(**fields), nbytes, self.effects)

    def receive(self, peer, payload="x", nbytes=NBYTES, **fields):
        """The short way alone."""
        return self.router.receive(self.incoming[peer], header(**fields), nbytes, payload, self.effects)

    def chunk(self, peer, payload, **fields):
        """The long way alone."""
        ticket = self.match(peer, **fields)
        if ticket is not None:
            self.router.arrived(ticket, payload, self.effects)
        return ticket

    def whole(self, peer, payload="x", **fields):
        """As the engine does: whose it is."""
        whose = self.receive(peer, payload, **fields)
        if whose is None:
            ticket = self.chunk(peer, payload, **fields)
            whose = None if ticket is None else ticket[0]
        return whose

    def ask(self, peer, seq=0, number=0, generation=0):
        self.router.on_ask(self.incoming[peer], [Kind.ASK, number, seq, number, generation], self.effects)

    def told(self, seq=0, spec=SUM, cause=TIMEOUT):
        self.router.on_abort(spec.group_id, spec.name, seq, cause, self.effects)

    def resume(self):
        """The sends that were held back, as the engine resumes them."""
        for _, collective, send in self.take(Tell.RESUME):
            collective.resume(send)
        return self.take(Do.SEND)

    def reasons(self):
        return [reason for _, _, reason in self.take(Tell.VIOLATION)]


def header(seq=0, number=0, lane=0, phase=UP, index=0, charged=0, generation=0):
    """Of a chunk; key and signature have the same number."""
    return [Kind.CHUNK, number, seq, number, lane, phase, index, 2 * generation + charged]


def listed(value):
    return [listed(one) for one in value] if isinstance(value, tuple) else value


def admit(desk, effect):
    _, collective, (to,), *chunk = effect
    outgoing = desk.outgoing[SUM.members[to]]
    foretold = links.may_send(outgoing, collective, to, NBYTES)
    before, header = links.admit(outgoing, collective, to, tuple(chunk), NBYTES)
    assert foretold == (header is not None)
    return before, header


TWICE = replace(SUM, overlapping=True)


def primed_desk(spec=TWICE, uses=2):
    """A rank that has had a chunk of the first use from rank 1: those of others like it may go the short way."""
    desk = Desk()
    for _ in range(uses):
        desk.post(spec)
    desk.define(1, spec)
    desk.take()
    assert desk.receive(1) is None
    assert desk.chunk(1, "x")
    desk.take()
    return desk
