from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core import names, sending, tombstones
from kfcomm.core import router as routers
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective, Early, GroupView, Incoming, Outgoing, shown
from kfcomm.core.credit import Credit, ReceiveWindow
from kfcomm.core.frame import MAX_ID, SCHEMA, Kind
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.links import LINKS
from kfcomm.core.machine import DOWN, UP, Do
from kfcomm.core.names import MAX_SIGNATURES
from kfcomm.core.router import Router, Tell
from kfcomm.core.sending import announce, may_send
from kfcomm.types import Verb
from tests.core import specs
from tests.core.specs import ITEM, Spec
from tests.core.world import Memory, Weather, World

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

    def post(self, spec=SUM, **options):
        view = self.view(spec)
        return self.router.post(
            view, spec.name, spec.signature, spec.program(view.rank), spec.sizes, self.effects,
            overlapping=spec.overlapping, generation=spec.generation, **options,
        )  # fmt: skip

    def refuse(self, spec=SUM, **options):
        return self.router.refuse(self.view(spec), spec.name, "why", self.effects, **options)

    def series(self, spec=SUM):
        view = self.view(spec)
        return self.router.series(view, spec.name, spec.signature, spec.program(view.rank), spec.sizes)

    def define(self, peer, spec=SUM, number=0, signature_number=None):
        incoming = self.incoming[peer]
        self.router.define_key(incoming, number, spec.group_id, spec.name, 0, self.effects)
        number = number if signature_number is None else signature_number
        self.router.define_signature(incoming, number, _listed(spec.signature), self.effects)

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

    def reasons(self):
        return [reason for _, _, reason in self.take(Tell.VIOLATION)]


def header(seq=0, number=0, lane=0, phase=UP, index=0, charged=0, generation=0):
    """Of a chunk; key and signature have the same number."""
    return [Kind.CHUNK, number, seq, number, lane, phase, index, 2 * generation + charged]


def _listed(value):
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def admit(desk, effect):
    (to,) = effect[2]
    outgoing = desk.outgoing[SUM.members[to]]
    foretold = may_send(outgoing, effect[1], to, NBYTES)
    before, header = sending.admit(outgoing, effect, effect[1], to, NBYTES)
    assert foretold == (header is not None)
    return before, header


# ---------------------------------------------------------------- sending


def test_names_are_defined_once_and_credit_is_spent_until_the_receiver_has_posted():
    desk = Desk(1, Credit(NBYTES, 10))
    collective = desk.post(replace(SUM, chunk=2))
    first, second = desk.take(Do.SEND)
    definitions, header = admit(desk, first)
    assert [one[0] for one in definitions] == [Kind.KEY, Kind.SIGNATURE]
    assert header == (Kind.CHUNK, 0, 0, 0, 0, UP, 0, 1)
    assert admit(desk, second) == ([(Kind.ASK, 0, 0, 0, 0)], None)
    assert admit(desk, second) == ([], None)  # asked once
    desk.router.on_posted(desk.outgoing[0], 0, 0, desk.effects)
    assert desk.take() == [second, second]
    assert admit(desk, second) == ([], (Kind.CHUNK, 0, 0, 0, 0, UP, 1, 0))
    assert collective.arrived_ranks() == (0, 1)
    assert collective.missing_ranks() == (2,)
    assert collective.unheard() == ()


def test_a_send_that_waits_is_not_overtaken_though_there_is_credit_again():
    desk = Desk(1, Credit(NBYTES // 2, 10))
    desk.post(replace(SUM, chunk=2))
    first, second = desk.take(Do.SEND)
    assert admit(desk, first)[1] is None
    desk.outgoing[0].window.give(1000, 10)
    assert admit(desk, second)[1] is None


def test_another_graph_may_change_the_signature_under_the_same_key():
    desk = Desk(1)
    for spec in (SUM, replace(SUM, pairs=UNLIKE), SUM):
        desk.post(replace(spec, overlapping=True))
    definitions = [admit(desk, effect)[0] for effect in desk.take(Do.SEND)]
    assert [[one[0] for one in before] for before in definitions] == [
        [Kind.KEY, Kind.SIGNATURE],
        [Kind.SIGNATURE],
        [],
    ]


def test_a_generation_defines_nothing_and_is_told_in_chunks_and_questions():
    desk = Desk(1, Credit(NBYTES, 10))
    specs_ = [replace(SUM, overlapping=True, generation=generation) for generation in (0, 3, 3, 0)]
    first, second, third, fourth = [desk.post(spec) for spec in specs_]
    assert first.series is second.series
    assert [one.generation for one in (first, second, third, fourth)] == [0, 3, 3, 0]
    effects = desk.take(Do.SEND)
    assert admit(desk, effects[0])[1] == (Kind.CHUNK, 0, 0, 0, 0, UP, 0, 1)
    desk.outgoing[0].window.give(NBYTES, 1)
    assert admit(desk, effects[1]) == ([], (Kind.CHUNK, 0, 1, 0, 0, UP, 0, 2 * 3 + 1))
    assert admit(desk, effects[2]) == ([(Kind.ASK, 0, 2, 0, 3)], None)
    desk.router.on_posted(desk.outgoing[0], 0, 2, desk.effects)
    assert admit(desk, *desk.take()) == ([], (Kind.CHUNK, 0, 2, 0, 0, UP, 0, 2 * 3))
    assert announce(desk.outgoing[0], second) == [(Kind.ASK, 0, 1, 0, 3)]


def test_an_answer_about_what_was_not_asked_is_ignored():
    desk = Desk(1)
    collective = desk.post()
    desk.router.on_posted(desk.outgoing[0], 7, 0, desk.effects)
    admit(desk, desk.take(Do.SEND)[0])
    desk.router.on_posted(desk.outgoing[0], 0, 9, desk.effects)
    desk.outgoing[4].keys[0] = collective.key
    desk.router.on_posted(desk.outgoing[4], 0, 0, desk.effects)  # a rank outside the group
    assert collective.arrived_ranks() == (1,)


def test_announcing_asks_and_the_answer_is_heard():
    root, leaf = Desk(0), Desk(1)
    waiting = root.post()
    assert waiting.unheard() == (1, 2)
    key, signature, ask = announce(root.outgoing[1], waiting)
    assert [key[0], signature[0], ask] == [Kind.KEY, Kind.SIGNATURE, (Kind.ASK, 0, 0, 0, 0)]
    assert announce(root.outgoing[1], waiting) == [ask]
    leaf.router.define_key(leaf.incoming[0], *key[1:], leaf.effects)
    leaf.router.define_signature(leaf.incoming[0], *signature[1:], leaf.effects)
    leaf.router.on_ask(leaf.incoming[0], ask, leaf.effects)
    leaf.post()
    ((_, incoming, answer),) = leaf.take(Tell.ANSWER)
    assert (incoming, answer) == (leaf.incoming[0], (Kind.POSTED, 0, 0))
    root.router.on_posted(root.outgoing[1], *answer[1:], root.effects)
    assert waiting.unheard() == (2,)


# ---------------------------------------------------------------- receiving


def test_an_early_chunk_waits_and_its_credit_with_it():
    desk = Desk()
    desk.define(1)
    desk.chunk(1, "x", charged=1)
    assert desk.take() == [(Tell.EARLY, SUM.group_id, "grad", 0, SUM.signature)]
    desk.define(2)
    desk.chunk(2, "y", charged=1)
    assert desk.take() == []
    assert desk.router.expected(SUM.group_id, "grad") == SUM.signature
    assert desk.incoming[1].window.settle() is None
    collective = desk.post()
    assert [effect[0] for effect in desk.take()] == [Do.FOLD, Do.FOLD_LAST, Do.SEND]
    assert collective.arrived_ranks() == RANKS
    assert desk.incoming[1].window.owed_headers == 1
    assert desk.router.expected(SUM.group_id, "grad") is None


def test_a_chunk_that_is_still_arriving_when_its_collective_is_posted_joins_it():
    desk = Desk()
    desk.define(1)
    ticket = desk.match(1, charged=1)
    collective = desk.post()
    desk.take()
    desk.router.arrived(ticket, "x", desk.effects)
    assert [effect[0] for effect in desk.take()] == [Do.FOLD]
    assert desk.incoming[1].window.owed_headers == 1
    assert collective.arrived_ranks() == (0, 1)


@pytest.mark.parametrize("posted", ["before", "meanwhile", "never"])
def test_a_chunk_that_is_still_arriving_when_its_collective_ends_is_dropped(posted):
    desk = Desk()
    desk.define(1)
    if posted == "before":
        desk.post()
    ticket = desk.match(1, charged=1)
    if posted == "meanwhile":
        desk.post()
    desk.told()
    desk.take()
    desk.router.arrived(ticket, "x", desk.effects)
    assert desk.take() == [(Tell.DROPPED, "x")]
    assert desk.incoming[1].window.owed_headers == 1


def test_late_chunks_go_to_the_sink_and_return_their_credit():
    desk = Desk()
    desk.define(1)
    desk.router.abort(desk.post(), TIMEOUT, desk.effects)
    assert [effect[0] for effect in desk.take()] == [Tell.FLOOD, Tell.FAILED]
    assert desk.match(1, charged=1) is None
    assert desk.match(1, charged=0) is None
    assert desk.take() == []
    assert desk.incoming[1].window.owed_headers == 1


def test_what_a_failed_collective_holds_is_dropped():
    desk = Desk()
    desk.define(2)
    collective = desk.post()
    desk.chunk(2, "second child")
    assert desk.take() == [(Do.HOLD, collective, "second child")]
    desk.told()
    assert desk.take() == [(Tell.DROPPED, "second child"), (Tell.FAILED, collective, TIMEOUT)]


def test_who_asks_has_posted():
    desk = Desk()
    collective = desk.post()
    desk.define(2)
    desk.ask(2)
    assert desk.take(Tell.ANSWER) == [(Tell.ANSWER, desk.incoming[2], (Kind.POSTED, 0, 0))]
    assert collective.arrived_ranks() == (0, 2)


def test_a_question_about_what_is_over_is_not_kept():
    desk = Desk()
    desk.define(1)
    desk.told(seq=0)
    desk.ask(1)
    desk.post()
    desk.take()
    desk.ask(1)
    assert desk.take() == []
    assert desk.incoming[1].asks == 0


def test_questions_and_chunks_for_what_is_aborted_before_it_is_posted_are_buried():
    desk = Desk()
    desk.define(1)
    desk.ask(1)
    desk.chunk(1, "x", charged=1)
    desk.take()
    desk.told()
    assert desk.take() == [(Tell.DROPPED, "x"), (Tell.EARLY, SUM.group_id, "grad", 0, None)]
    assert desk.incoming[1].asks == 0
    assert desk.router.expected(SUM.group_id, "grad") == TIMEOUT
    assert desk.post() == TIMEOUT
    assert desk.router.expected(SUM.group_id, "grad") is None
    assert isinstance(desk.post(), Collective)


def test_what_is_aborted_hinders_nothing_else():
    desk = Desk()
    desk.told()
    assert isinstance(desk.post(replace(SUM, name="other")), Collective)
    assert desk.post() == TIMEOUT


def test_what_begins_may_be_the_callers_own():
    class Own(Collective):
        pass

    desk = Desk(1)
    own = Own()
    assert desk.post(collective=own) is own
    assert [effect[1] for effect in desk.take(Do.SEND)] == [own]
    assert list(desk.router.live) == [own]


@pytest.mark.parametrize("theirs", [replace(SUM, pairs=UNLIKE), replace(SUM, generation=9)])
def test_after_a_mismatch_nobody_is_answered(theirs):
    desk = Desk()
    desk.define(1, theirs)
    desk.define(2)
    desk.ask(1, generation=theirs.generation)
    desk.ask(2)
    desk.chunk(2, "x", charged=1)
    collective = desk.post()
    assert [effect[0] for effect in desk.take()] == [Tell.EARLY, Tell.FLOOD, Tell.FAILED, Tell.DROPPED]
    assert collective not in desk.router.live
    assert (desk.incoming[1].asks, desk.incoming[2].asks) == (0, 0)


@pytest.mark.parametrize("when", ["posted", "early", "asked", "asked early", "like another"])
def test_a_chunk_or_a_question_of_another_generation_is_a_mismatch(when):
    desk = Desk()
    ours, theirs = replace(SUM, generation=4, overlapping=True), replace(SUM, generation=5)
    seq = 0
    desk.define(1, theirs)
    if when == "like another":
        desk.post(ours)
        assert desk.chunk(1, "x", generation=4)
        seq = 1
    collective = desk.post(ours) if "early" not in when else None
    desk.take()
    if "asked" in when:
        desk.ask(1, seq, generation=5)
    else:
        assert (desk.whole(1, seq=seq, charged=1, generation=5) is None) == (collective is not None)
    if collective is None:
        assert [effect[0] for effect in desk.take()] == [Tell.EARLY]
        collective = desk.post(ours)
    flood, failed, *rest = desk.take()
    assert (flood[0], failed[0]) == (Tell.FLOOD, Tell.FAILED)
    assert [effect[0] for effect in rest] == ([Tell.DROPPED] if when == "early" else [])
    assert collective not in desk.router.live
    cause = failed[2]
    assert cause.kind is CauseKind.MISMATCH
    assert cause.message.startswith("'grad' differs between ranks (generation): rank 1 has all_reduce")
    assert "(generation 5, graphs " in cause.message.split("; rank 0 has ")[0]
    assert "(generation 4, graphs " in cause.message.split("; rank 0 has ")[1]
    assert desk.incoming[1].asks == 0
    assert desk.incoming[1].window.owed_headers == desk.incoming[1].window._spent_headers


def test_a_chunk_of_a_later_generation_is_charged_only_if_its_header_says_so():
    desk = Desk()
    window = desk.incoming[1].window
    desk.define(1)
    assert desk.whole(1, generation=3) is None
    assert desk.reasons() == ["a chunk of 'grad', which is not posted, without credit"]
    desk.router.abort(desk.post(replace(SUM, generation=3)), TIMEOUT, desk.effects)
    assert desk.whole(1, generation=3) is None  # too late
    collective = desk.post(replace(SUM, generation=3))
    assert desk.whole(1, seq=1, generation=3) is collective
    assert (window.owed_headers, window._spent_headers) == (0, 0)
    assert desk.reasons() == []


# ---------------------------------------------------------------- what is known of a kind of chunks


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


def test_a_chunk_like_one_before_it_goes_the_short_way():
    desk = primed_desk()
    first, second = desk.router.live
    assert desk.receive(1, "y", seq=1) is second
    assert [(effect[0], effect[1], effect[4]) for effect in desk.take()] == [(Do.FOLD, second, "y")]
    assert second.missing_ranks() == (2,)
    assert desk.receive(2, "z") is None  # the other link has brought nothing yet
    assert desk.take() == []
    assert first.missing_ranks() == (2,)


@pytest.mark.parametrize("charged", [0, 1])
def test_what_the_short_way_takes_owes_its_credit_back(charged):
    desk = primed_desk()
    assert desk.receive(1, seq=1, charged=charged) in desk.router.live
    window = desk.incoming[1].window
    window.matched(1000)  # enough to be worth an answer
    assert window.settle() == Credit(1000 + charged * NBYTES, 1 + charged)


def test_what_the_short_way_takes_beyond_the_credit_breaks_its_link():
    desk = primed_desk()
    desk.incoming[1].window = ReceiveWindow(Credit(NBYTES - 1, 10))
    assert desk.receive(1, seq=1, charged=1) in desk.router.live
    assert desk.reasons() == ["more chunks than it had credit for"]


@pytest.mark.parametrize(
    "fields",
    [
        {"number": 1},
        {"lane": 1},
        {"phase": DOWN},
        {"index": 1},
        {"nbytes": NBYTES - 4},
        {"nbytes": NBYTES + 4},
        {"generation": 1},
        {"seq": 0},  # that was here before
        {"seq": 2},  # not posted
    ],
)
def test_a_chunk_unlike_those_before_it_goes_the_long_way(fields):
    desk = primed_desk()
    window = desk.incoming[1].window
    assert desk.receive(1, **{"seq": 1, "charged": 1} | fields) is None
    assert desk.take() == []
    assert (window.owed_headers, window._spent_headers) == (0, 0)
    assert [one.arrived_ranks() for one in desk.router.live] == [(0, 1), (0,)]


def test_of_several_chunks_each_has_its_size():
    desk = primed_desk(replace(TWICE, counts=(10,)))  # two whole ones, and a half
    second = list(desk.router.live)[1]
    assert desk.receive(1, seq=1, index=2) is None
    assert desk.receive(1, seq=1, index=1, nbytes=8) is None
    assert desk.receive(1, seq=1, index=3, nbytes=8) is None
    assert desk.receive(1, seq=1, index=2, nbytes=8) is second
    assert desk.receive(1, seq=1, index=1) is second
    assert desk.receive(1, seq=1, index=0) is second


def test_what_waits_for_the_word_that_its_receiver_has_posted_goes_when_a_chunk_comes():
    desk = Desk(1, Credit(NBYTES, 10))
    spec = replace(SUM, pairs=(GraphPair.of(Graph.from_parents([0, 0, 1])),), overlapping=True)  # 0 - 1 - 2
    desk.define(2, spec)
    desk.define(0, spec)
    first, second = [desk.post(spec) for _ in range(2)]
    for _ in range(2):
        desk.outgoing[0].window.take(NBYTES)
    desk.chunk(2, "x")
    desk.chunk(0, "r", phase=DOWN)
    desk.chunk(2, "x", seq=1)
    *_, up = desk.take(Do.SEND)
    assert up[1] is second
    assert admit(desk, up)[1] is None
    assert desk.receive(0, "r", seq=1, phase=DOWN) is None  # it has to go the long way
    desk.chunk(0, "r", seq=1, phase=DOWN)
    again, stored, down = desk.take(Do.SEND, Do.STORE)
    assert (again, stored[:2], down[:2]) == (up, (Do.STORE, second), (Do.SEND, second))
    assert first.missing_ranks() == second.missing_ranks() == ()


def test_what_is_passed_on_goes_the_long_way_always():
    """It has to be kept for long, and what comes the short way may be read during the call only."""
    desk = Desk(1)
    chain = (GraphPair.of(Graph.from_parents([0, 0, 1])),)
    spec = Spec("all", Verb.GATHER, RANKS, chain, (4, 4, 4), chunk=4, overlapping=True)
    for seq in range(2):
        desk.post(spec)
        desk.define(2, spec)
        assert desk.receive(2, seq=seq, lane=2, phase=DOWN) is None
        assert desk.chunk(2, "x", seq=seq, lane=2, phase=DOWN)


@pytest.mark.parametrize("what", ["key", "signature"])
@pytest.mark.parametrize("other", [TWICE, replace(TWICE, name="other", chunk=2)])
def test_a_number_that_is_defined_anew_is_known_by_its_new_meaning_only(what, other):
    desk = primed_desk()
    second = list(desk.router.live)[1]
    incoming = desk.incoming[1]
    assert len(incoming.arrivals) == 1
    if what == "key":
        desk.router.define_key(incoming, 0, other.group_id, other.name, 0, desk.effects)
    else:
        desk.router.define_signature(incoming, 0, _listed(other.signature), desk.effects)
    assert not incoming.arrivals
    assert desk.receive(1, seq=1) is None
    whose = desk.whole(1, seq=1, charged=1)
    if other is TWICE:
        assert whose is second
        assert desk.receive(1, seq=1) is None
        assert len(incoming.arrivals) == 1
    elif what == "key":
        assert type(whose) is Early
        assert second in desk.router.live
    else:
        assert whose is None
        assert second not in desk.router.live


def test_a_number_that_is_defined_for_the_first_time_leaves_what_is_known():
    desk = primed_desk()
    desk.define(1, replace(SUM, name="other", chunk=2), number=1)
    assert len(desk.incoming[1].arrivals) == 1
    assert desk.receive(1, seq=1) in desk.router.live


def test_a_use_that_was_compiled_anew_is_looked_up_anew(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 1)
    desk = primed_desk(uses=1)
    (first,) = desk.router.live
    desk.router.abort(first, TIMEOUT, desk.effects)
    desk.router.abort(desk.post(replace(SUM, name="other", counts=(8,))), TIMEOUT, desk.effects)
    monkeypatch.setattr(names, "MAX_ID", 2)
    second, third = desk.post(TWICE), desk.post(TWICE)
    assert second.series is not first.series
    desk.take()
    assert desk.receive(1, "y", seq=1) is None
    assert desk.take() == []
    assert desk.chunk(1, "y", seq=1)
    assert desk.receive(1, "z", seq=2) is third


def test_what_is_known_of_a_link_is_bounded(monkeypatch):
    monkeypatch.setattr(routers, "MAX_ARRIVALS", 3)
    desk = Desk()
    most = 0
    for number in range(8):
        spec = replace(TWICE, name=f"key{number}")
        for _ in range(2):
            desk.post(spec)
        desk.define(1, spec, number)
        assert desk.whole(1, number=number) in desk.router.live
        assert desk.receive(1, number=number, seq=1) in desk.router.live  # the newest is known in any case
        most = max(most, len(desk.incoming[1].arrivals))
    assert most == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signature_that_is_equal_but_another_object_is_accepted(when):
    desk = Desk()
    if when == "before":
        desk.define(1, TWICE)
    collectives = [desk.post(TWICE) for _ in range(2)]
    if when == "after":
        desk.define(1, TWICE)
    defined = desk.incoming[1].signatures[0]
    assert defined == collectives[0].signature
    assert (defined is collectives[0].signature) == (when == "after")
    assert desk.whole(1) is collectives[0]
    assert desk.receive(1, seq=1) is collectives[1]
    desk.ask(1)
    assert [effect[0] for effect in desk.take()] == [Do.FOLD, Do.FOLD, Tell.ANSWER]


# ---------------------------------------------------------------- what a link need not be told


def kinds(definitions):
    return [one[0] for one in definitions]


def sent(desk, spec):
    """Post, and give it up; what had to be defined first, and the numbers of key and signature in the chunk."""
    collective = desk.post(spec)
    (effect,) = desk.take(Do.SEND)
    before, chunk = admit(desk, effect)
    assert collective.series in desk.outgoing[0].known
    desk.router.abort(collective, TIMEOUT, desk.effects)
    desk.take()
    return kinds(before), chunk[1], chunk[3]


def test_what_was_sent_before_needs_no_definitions_until_a_signature_number_means_something_else(monkeypatch):
    monkeypatch.setattr(names, "MAX_SIGNATURES", 2)
    desk = Desk(1)
    a, b, c = (replace(SUM, name=name, chunk=4 + place) for place, name in enumerate("abc"))
    assert sent(desk, a) == ([Kind.KEY, Kind.SIGNATURE], 0, 0)
    assert sent(desk, a) == ([], 0, 0)
    assert sent(desk, b) == ([Kind.KEY, Kind.SIGNATURE], 1, 1)
    assert sent(desk, a) == ([], 0, 0)
    assert len(desk.outgoing[0].known) == 2
    assert sent(desk, c) == ([Kind.KEY, Kind.SIGNATURE], 2, 0)  # the number that a's had
    assert len(desk.outgoing[0].known) == 1
    assert sent(desk, a) == ([Kind.SIGNATURE], 0, 1)
    assert len(desk.outgoing[0].known) == 1
    assert sent(desk, b) == ([Kind.SIGNATURE], 1, 0)


def test_what_was_sent_before_is_forgotten_when_its_key_number_means_something_else(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 2)
    desk = Desk(1)
    a, b, c = (replace(SUM, name=name) for name in "abc")
    assert sent(desk, a) == ([Kind.KEY, Kind.SIGNATURE], 0, 0)
    assert sent(desk, b) == ([Kind.KEY], 1, 0)
    assert sent(desk, c) == ([Kind.KEY], 0, 0)
    assert len(desk.outgoing[0].known) == 1
    assert sent(desk, b) == ([], 1, 0)  # defined on the link, though forgotten among what is known
    assert sent(desk, a) == ([Kind.KEY], 1, 0)
    assert sent(desk, c) == ([], 0, 0)
    assert sent(desk, a) == ([], 1, 0)


def test_a_key_that_was_given_another_number_and_its_old_one_again_is_defined_again(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 2)
    desk = Desk(1)
    a, b, c = (replace(SUM, name=name) for name in "abc")
    sent(desk, a)
    sent(desk, b)
    sent(desk, c)  # takes 0 from a
    assert sent(desk, a) == ([Kind.KEY], 1, 0)
    assert sent(desk, b) == ([Kind.KEY], 0, 0)
    assert sent(desk, c) == ([Kind.KEY], 1, 0)
    assert sent(desk, a) == ([Kind.KEY], 0, 0)  # as at first, but the link has been told otherwise since


def test_a_key_with_another_number_that_was_given_away_without_a_word_on_the_link_is_right_too(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 2)
    desk = Desk(1)
    a, b, c = (replace(SUM, name=name) for name in "abc")
    sent(desk, a)
    for other in (b, c):  # takes 0 from a, but sends nothing
        desk.router.abort(desk.post(other), TIMEOUT, desk.effects)
    desk.take()
    assert sent(desk, a) == ([Kind.KEY], 1, 0)
    assert sent(desk, c) == ([Kind.KEY], 0, 0)
    assert sent(desk, a) == ([], 1, 0)


# ---------------------------------------------------------------- aborts and tombstones


def test_the_first_news_of_an_abort_counts():
    desk = Desk()
    desk.told()
    desk.told(cause=Cause(CauseKind.CANCELLED, 1, "no matter"))
    assert [effect[0] for effect in desk.take()] == [Tell.EARLY]
    assert desk.post() == TIMEOUT
    desk.told()
    assert desk.take() == []


def test_aborts_of_what_is_not_ours_leave_no_key_and_no_more_than_so_many_tombstones(monkeypatch):
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 4)
    desk = Desk()
    for number in range(10):
        desk.told(spec=replace(SUM, name=f"key{number}"))
    assert desk.router.num_keys == 0
    assert len(desk.router._dead) == 4
    assert isinstance(desk.post(replace(SUM, name="key5")), Collective)
    assert isinstance(desk.post(replace(SUM, name="key6")), Cause)


def test_a_second_use_while_the_first_is_in_flight_drops_what_came_for_it():
    desk = Desk()
    first = desk.post()
    desk.define(1)
    desk.chunk(1, "x", seq=1, charged=1)
    desk.ask(1, seq=1)
    desk.take()
    cause = desk.post()
    assert isinstance(cause, Cause)
    assert cause.kind is CauseKind.REFUSED
    assert desk.take() == [(Tell.DROPPED, "x"), (Tell.FLOOD, SUM.group_id, "grad", 1, cause)]
    assert desk.incoming[1].asks == 0
    assert list(desk.router.live) == [first]


def test_a_refused_call_takes_its_number_and_what_was_known_of_it():
    desk = Desk()
    desk.told(seq=0)
    cause = desk.refuse()
    assert desk.take(Tell.FLOOD) == [(Tell.FLOOD, SUM.group_id, "grad", 0, cause)]
    assert not desk.router._dead
    assert desk.router.num_uses(SUM.group_id, "grad") == 1
    assert desk.post().seq == 1


def test_numbers_may_be_left_out_and_what_was_known_of_them_goes():
    desk = Desk()
    assert desk.router.num_uses(SUM.group_id, "grad") == 0
    desk.define(1)
    desk.chunk(1, "x", seq=0, charged=1)
    desk.told(seq=1)
    desk.chunk(1, "y", seq=3, charged=1)
    desk.take()
    collective = desk.post(seq=3)
    assert collective.seq == 3
    assert desk.take(Tell.DROPPED) == [(Tell.DROPPED, "x")]
    assert collective.arrived_ranks() == (0, 1)
    assert not desk.router._dead
    desk.told(seq=5)
    desk.refuse(seq=6)
    assert not desk.router._dead
    assert desk.router.num_uses(SUM.group_id, "grad") == 7
    assert desk.router.uses() == [(SUM.group_id, "grad", 7)]
    assert desk.post(replace(SUM, overlapping=True), seq=9).seq == 9


def test_a_second_abort_of_the_same_does_nothing():
    desk = Desk()
    collective = desk.post()
    for _ in range(2):
        desk.router.abort(collective, TIMEOUT, desk.effects)
    assert [effect[0] for effect in desk.take()] == [Tell.FLOOD, Tell.FAILED]
    desk.router.complete(collective)


def test_a_loss_is_told_by_itself():
    desk = Desk()
    collective = desk.post()
    desk.router.abort(collective, Cause(CauseKind.LOST, 1, "gone"), desk.effects)
    assert [effect[0] for effect in desk.take()] == [Tell.FAILED]


def test_a_lost_peer_closes_its_groups():
    desk = Desk()
    pair = replace(SUM, members=(0, 2), pairs=specs.pairs(random.Random(1), 2), name="other")
    late = replace(SUM, members=(2, 1, 0), name="late")
    doomed, other = desk.post(), desk.post(pair)
    for peer, spec, number in ((2, replace(SUM, name="x"), 0), (2, pair, 1), (2, late, 2)):
        desk.define(peer, spec, number)
    desk.chunk(2, "early", number=0, charged=1)
    desk.chunk(2, "early too", number=2, charged=1)
    desk.take()
    lost = Cause(CauseKind.LOST, 1, "gone")
    desk.router.on_peer_lost(1, lost, desk.effects)
    assert desk.take() == [(Tell.FAILED, doomed, lost), (Tell.DROPPED, "early")]
    assert list(desk.router.live) == [other]
    assert desk.match(2, number=0, charged=1) is None
    desk.ask(2, number=0)
    assert desk.incoming[2].asks == 0
    assert desk.post(late) is lost  # a group of which this rank knew nothing
    assert desk.take() == [(Tell.DROPPED, "early too")]
    assert desk.incoming[2].window.owed_headers == desk.incoming[2].window._spent_headers == 3
    assert isinstance(desk.post(replace(pair, name="next")), Collective)


# ---------------------------------------------------------------- broken links


def test_a_broken_link_may_have_carried_what_its_sender_has_posted_under_names_that_it_knew():
    desk = Desk(1)
    outgoing, first = desk.router.open(0)
    assert first == [(Kind.OPEN, 1)]
    desk.outgoing[0] = outgoing
    collective = desk.post()
    admit(desk, desk.take(Do.SEND)[0])
    desk.post(replace(SUM, name="never sent"))
    desk.post(replace(SUM, name="with others", members=(2, 1), pairs=specs.pairs(random.Random(1), 2)))
    assert desk.router.broke(desk.outgoing[2]) == []
    assert not desk.router.owes(2)
    assert desk.router.broke(outgoing) == [collective]
    assert desk.router.owes(0)
    desk.post(replace(SUM, overlapping=True))  # later than the break: it is not concerned
    again, first = desk.router.open(0)
    assert first == [(Kind.OPEN, 2), (Kind.KEY, 0, SUM.group_id, "grad", 1)]
    assert not desk.router.owes(0)
    assert desk.router.broke(again) == [collective, *list(desk.router.live)[-1:]]  # of which nobody has told yet
    assert desk.router.open(0)[1] == [(Kind.OPEN, 3), (Kind.KEY, 0, SUM.group_id, "grad", 2)]


def test_a_name_that_lost_its_number_is_still_among_those_that_a_link_knew(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 1)
    desk = Desk(1)
    for name in "ab":
        collective = desk.post(replace(SUM, name=name))
        admit(desk, desk.take(Do.SEND)[0])
        desk.router.abort(collective, TIMEOUT, desk.effects)
        desk.take()
    for _ in range(2):
        desk.router.broke(desk.outgoing[0])
        desk.outgoing[0], first = desk.router.open(0)
        assert [(number, name, below) for _, number, _, name, below in first[1:]] == [(0, "a", 1), (0, "b", 1)]
        assert desk.outgoing[0].keys[0].name == "b"


def test_the_next_link_tells_the_receiver_whose_chunks_may_be_lost():
    desk = Desk()
    specs_ = [replace(SUM, overlapping=True, salt=number) for number in range(3)]
    waiting, whole, later = [desk.post(one) for one in specs_]
    desk.define(1)
    desk.chunk(1, "x", seq=1)
    desk.take()
    for peer in (4, 1):  # rank 4 is not of the group
        desk.router.define_key(desk.incoming[peer], 0, SUM.group_id, "grad", 2, desk.effects)
    flood, failed = desk.take()
    assert flood[:4] == (Tell.FLOOD, SUM.group_id, "grad", 0)
    assert failed[:2] == (Tell.FAILED, waiting)
    assert failed[2].kind is CauseKind.LINK
    assert list(desk.router.live) == [whole, later]
    assert desk.router.awaiting(1) == [later]
    assert desk.router.awaiting(2) == [whole, later]
    desk.router.define_key(desk.incoming[1], 0, SUM.group_id, "grad", 2, desk.effects)
    assert desk.take() == []


def test_the_receiver_of_a_broken_link_asks_its_sender_to_notice():
    desk = Desk(1)
    cause = Cause(CauseKind.LINK, 0, "broke")
    desk.router.on_abort(LINKS, "2", 7, cause, desk.effects)
    assert desk.take() == []
    desk.router.on_abort(LINKS, "1", 7, cause, desk.effects)
    assert desk.take() == [(Tell.BROKEN, 0, 7, "broke")]


def test_nobody_is_told_who_is_gone():
    desk = Desk(1)
    collective = desk.post()
    admit(desk, desk.take(Do.SEND)[0])
    desk.router.broke(desk.outgoing[0])
    desk.router.on_peer_left(0, Cause(CauseKind.LOST, 0, "left"))
    assert not desk.router.owes(0)
    assert desk.router.broke(desk.outgoing[0]) == []
    assert not desk.router.owes(0)
    assert list(desk.router.live) == [collective]


def test_keys_are_shown_as_people_know_them():
    assert (Desk().post().name, Desk().post().title) == ("grad", "'grad'")
    assert shown("grad/0") == "'grad/0'"
    assert shown("grad/0\0data") == "'grad/0' (data)"
    assert shown("") == "an unnamed collective"
    assert shown("\0data") == "an unnamed collective (data)"


# ---------------------------------------------------------------- who breaks the rules


def posted_desk():
    desk = Desk()
    desk.post()
    desk.define(1)
    desk.define(4)
    desk.take()
    return desk


@pytest.mark.parametrize("way", ["match", "whole", "like another"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"number": 3}, "a chunk under a number that was never defined"),
        ({"lane": 1}, "a chunk of 'grad' that does not belong there"),
        ({"lane": MAX_ID}, "a chunk of 'grad' that does not belong there"),
        ({"index": 1}, "a chunk of 'grad' that does not belong there"),
        ({"phase": DOWN}, "a chunk of 'grad' that does not belong there"),
        ({"phase": 7}, "a chunk of 'grad' that does not belong there"),
        ({"nbytes": 0}, "a chunk of 'grad' of 0 bytes"),
        ({"nbytes": NBYTES + 1}, f"a chunk of 'grad' of {NBYTES + 1} bytes"),
        ({"seq": 2}, "a chunk of 'grad', which is not posted, without credit"),
        ({"charged": 1, "nbytes": 1001}, "more chunks than it had credit for"),
    ],
)
def test_a_chunk_that_breaks_a_rule_breaks_its_link_only(way, fields, reason):
    if way == "like another":
        desk = primed_desk()
        fields = {"seq": 1} | fields
    else:
        desk = posted_desk()
    live = list(desk.router.live)
    assert (desk.match if way == "match" else desk.whole)(1, **fields) is None
    assert desk.reasons() == [reason]
    assert list(desk.router.live) == live


@pytest.mark.parametrize("charged", [0, 1])
def test_a_chunk_is_taken_at_once_and_owes_its_credit_back(charged):
    desk = posted_desk()
    (collective,) = desk.router.live
    assert desk.whole(1, "x", charged=charged) is collective
    assert [effect[4] for effect in desk.take(Do.FOLD, Do.FOLD_UP, Do.FOLD_LAST)] == ["x"]
    assert collective.missing_ranks() == (2,)
    window = desk.incoming[1].window
    window.matched(1000)  # enough to be worth an answer
    assert window.settle() == Credit(1000 + charged * NBYTES, 1 + charged)


def test_a_chunk_beyond_the_credit_breaks_its_link():
    desk = posted_desk()
    desk.incoming[1].window = ReceiveWindow(Credit(NBYTES - 1, 10))
    assert desk.whole(1, charged=1) is None
    assert desk.reasons() == ["more chunks than it had credit for"]


def test_a_whole_chunk_that_came_early_is_kept():
    desk = Desk()
    desk.define(1)
    assert type(desk.whole(1, "x", charged=1)) is Early
    desk.post()
    assert [effect[4] for effect in desk.take(Do.FOLD)] == ["x"]


def test_a_chunk_comes_once():
    desk = posted_desk()
    desk.chunk(1, "x")
    assert desk.chunk(1, "x") is None
    assert desk.reasons() == ["a chunk of 'grad' that does not belong there"]


def test_a_chunk_that_comes_on_two_links_at_a_time_counts_once():
    desk = posted_desk()
    first = desk.match(1)
    desk.incoming[1] = Incoming(1)
    desk.define(1)
    desk.chunk(1, "x")
    desk.take()
    desk.router.arrived(first, "again", desk.effects)
    assert [(effect[0], effect[2]) for effect in desk.take()] == [(Do.RELEASE, "again")]


def test_a_rank_outside_the_group_is_not_taken_for_the_source_that_a_root_lacks():
    broadcast = replace(SUM, verb=Verb.BROADCAST, name="b")
    desk = posted_desk()
    desk.post(broadcast)
    desk.define(4, broadcast, number=1)
    for phase, lane in ((UP, 0), (DOWN, 0), (UP, 1), (DOWN, 1)):
        assert desk.whole(4, number=1, lane=lane, phase=phase) is None
        assert desk.reasons() == ["a chunk of 'b', where it takes no part"]


@pytest.mark.parametrize("spec", [SUM, replace(SUM, generation=1), replace(SUM, verb=Verb.BROADCAST)])
def test_a_rank_outside_the_group_neither_sends_nor_asks_nor_disagrees(spec):
    broadcast = replace(SUM, verb=Verb.BROADCAST, name="b")
    desk = posted_desk()
    desk.post(broadcast)
    desk.define(4, spec)
    desk.define(4, replace(spec, name="b"), number=1)
    for phase in (UP, DOWN):
        assert desk.match(4, phase=phase, generation=spec.generation) is None
        assert desk.match(4, number=1, lane=1, phase=phase, generation=spec.generation) is None
    desk.ask(4, generation=spec.generation)
    reasons = desk.reasons()
    assert len(reasons) == 5
    assert all("where it takes no part" in reason for reason in reasons)
    assert len(desk.router.live) == 2


def test_a_rank_outside_the_group_that_was_early_is_found_out_late():
    desk = Desk()
    desk.define(4)
    desk.chunk(4, "x", charged=1)
    desk.ask(4)
    desk.post()
    assert [effect[0] for effect in desk.take()] == [Tell.EARLY, Tell.VIOLATION, Tell.VIOLATION, Tell.DROPPED]
    assert len(desk.router.live) == 1


def test_undefined_and_impossible_numbers():
    desk = Desk()
    desk.ask(1)
    desk.router.define_key(desk.incoming[1], MAX_ID, b"group", "name", 0, desk.effects)
    desk.router.define_signature(desk.incoming[1], MAX_SIGNATURES, ["barrier"], desk.effects)
    assert desk.reasons() == [
        "a question under a number that was never defined",
        f"key number {MAX_ID}",
        f"signature number {MAX_SIGNATURES}",
    ]


def test_signatures_are_made_of_plain_values():
    desk = Desk()
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for fields in ([{"a": 1}], [[{}]], deep):
        desk.router.define_signature(desk.incoming[1], 0, fields, desk.effects)
    assert desk.reasons() == ["a signature that is not made of plain values"] * 3


def test_questions_are_bounded(monkeypatch):
    monkeypatch.setattr(routers, "MAX_ASKS", 3)
    desk = Desk()
    desk.define(1)
    for seq in range(5):
        desk.ask(1, seq)
    assert desk.reasons() == ["too many questions"] * 2


def test_more_early_chunks_than_credit():
    desk = Desk()
    desk.define(1)
    for index in range(11):
        desk.chunk(1, "x", index=index, charged=1)
    assert desk.reasons() == ["more chunks than it had credit for"]


# ---------------------------------------------------------------- hostile peers, in a world


def junk(rnd: random.Random, depth: int = 0):
    """Whatever msgpack can carry."""
    kind = rnd.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [junk(rnd, depth + 1) for _ in range(rnd.randrange(4))]
    if kind == 7:
        return {"x": junk(rnd, depth + 1)}
    return (None, True, rnd.randrange(-5, 2**63), rnd.random(), "x" * rnd.randrange(50), b"\0")[kind]


def hostile(rnd: random.Random, keys: list[Spec], victim: int) -> tuple[list, int]:
    """A header of the right types, and the size of its payload. Many would be right, coming from another rank."""
    place = rnd.randrange(len(keys))
    other = rnd.randrange(len(keys)) if rnd.random() < 0.1 else place
    huge = rnd.randrange(2**63)
    match rnd.choice([Kind.CHUNK] * 12 + [Kind.ASK, Kind.KEY, Kind.SIGNATURE] * 2 + [Kind.OPEN]):
        case Kind.CHUNK:
            header, nbytes = _chunk_for(rnd, keys[place], victim)
            header[1], header[3] = place, other
            if rnd.random() < 0.3:
                header[rnd.randrange(1, 8)] = rnd.choice([0, 1, 2, huge])
            return header, rnd.choice([nbytes] * 8 + [0, 4, 2000])
        case Kind.ASK:
            return [Kind.ASK, place, rnd.choice([0, 0, 1, huge]), other, rnd.choice([0, 0, 0, 1, huge])], 0
        case Kind.KEY:
            name = rnd.choice([keys[place].name, keys[place].name, "", "x" * 100])
            below = rnd.choice([0, 0, 1, huge])
            return [Kind.KEY, rnd.choice([place, place, huge]), keys[other].group_id, name, below], 0
        case Kind.OPEN:
            return [Kind.OPEN, rnd.choice([0, 1, 2, huge])], 0
        case _:
            fields = _listed(keys[other].signature)
            if rnd.random() < 0.2:
                fields = [junk(rnd) for _ in range(rnd.randrange(12))]
            return [Kind.SIGNATURE, rnd.choice([place, place, place, huge]), fields], 0


def _chunk_for(rnd: random.Random, key: Spec, victim: int) -> tuple[list, int]:
    """A chunk that a rank waits for in this collective, or waited for."""
    if victim not in key.members:
        return [Kind.CHUNK, 0, 0, 0, 0, UP, 0, 1], 4
    lane = rnd.choice(list(key.program(key.members.index(victim)).lanes.values()))
    index = rnd.randrange(lane.num_chunks)
    nbytes = min(key.chunk, lane.count - index * key.chunk) * ITEM.itemsize
    phase = rnd.choice([UP, DOWN] if lane.up and lane.down else [DOWN if lane.down else UP])
    return [Kind.CHUNK, 0, 0, 0, lane.number, phase, index, rnd.choice([0, 1, 1])], nbytes


@settings(max_examples=60)
@given(
    size=st.integers(2, 6),
    seed=st.integers(0, 2**32 - 1),
    order=st.sampled_from(Weather.ORDERS),
    credit=st.sampled_from([Credit(0, 0), Credit(200, 8), Credit(100_000, 10_000)]),
)
def test_a_hostile_peer_never_raises_and_harms_only_what_it_takes_part_in(size, seed, order, credit):
    rnd = random.Random(seed)
    world = World(size, Weather(seed=seed, order=order, credit=credit))
    villain = rnd.randrange(size)
    keys = []
    for number in range(8):
        members = tuple(rnd.sample(range(size), rnd.randint(1, size)))
        keys.append(specs.spec(rnd, f"key{number}", members, largest=8))
    world.plan_all([key] for key in keys)
    known = set()
    for _ in range(80):
        victim = rnd.choice([rank for rank in range(size) if rank != villain])
        wire = world.wire(villain, victim)
        if wire not in known:
            known.add(wire)
            for number, key in enumerate(keys):
                world.send(wire, [Kind.KEY, number, key.group_id, key.name, 0])
                world.send(wire, [Kind.SIGNATURE, number, _listed(key.signature)])
        header, nbytes = hostile(rnd, keys, victim)
        assert all(type(field) is kind for field, kind in zip(header[1:], SCHEMA[header[0]], strict=True))
        world.send(wire, header, np.zeros(nbytes // 4, ITEM) if nbytes else None)
        world.run(steps=rnd.randrange(30))
    world.run()
    # A lie may make an honest rank break a rule of a collective that the villain is in; then that link is blamed.
    blamed = {frozenset((incoming.peer, world.receiver(incoming))) for incoming, _ in world.violations}
    for link in blamed:
        assert any(link | {villain} <= set(key.members) for key in keys) or villain in link
    world.check_done(
        key for key in keys if villain not in key.members and not any(link <= set(key.members) for link in blamed)
    )
    for key in keys:
        for outcome in world.outcomes(key):
            if isinstance(outcome, Memory) and not outcome.done:
                world.abort(key.members[outcome.rank], key, 0)
    world.run()
    for node in world.nodes:
        assert not node.router.live


# ---------------------------------------------------------------- again


def again(desk, series, generation=0):
    """The next use of a series, the short way: the collective, or None if it has to go the long way."""
    collective = Collective()
    collective.begin(series, generation)
    return collective if desk.router.post_again(series, collective, desk.effects) else None


def test_the_short_way_of_a_name_does_what_the_long_one_does():
    desk = Desk(rank=1)
    long = desk.post()
    posted = desk.take(Do.SEND)
    series = desk.series()
    assert series is long.series
    assert again(desk, series) is None  # still in flight
    assert desk.take() == []
    assert desk.router.num_uses(SUM.group_id, SUM.name) == 1
    desk.router.complete(long)
    short = again(desk, series, generation=7)
    assert (short.seq, short.series, short.generation, short.arrived_ranks()) == (1, series, 7, (1,))
    assert (short.key, short.group, short.signature) == (long.key, long.group, long.signature)
    assert [effect[2:] for effect in desk.take(Do.SEND)] == [effect[2:] for effect in posted]
    assert list(desk.router.live) == [short]
    assert desk.router.is_posted(SUM.group_id, SUM.name, 1)


def test_the_short_way_is_there_before_the_first_use():
    desk = Desk(rank=1)
    first = again(desk, desk.series())
    assert first.seq == 0
    assert [effect[1] for effect in desk.take(Do.SEND)] == [first]


def test_what_came_early_is_had_on_the_short_way_too():
    desk = Desk(rank=0)
    desk.router.complete(desk.post())
    desk.define(1)
    desk.chunk(1, "early", seq=1, charged=1)
    desk.take()
    assert again(desk, desk.series()) is not None
    assert [effect[4] for effect in desk.take(Do.FOLD)] == ["early"]


@pytest.mark.parametrize("what", ["tombstone", "loss"])
def test_what_is_unusual_goes_the_long_way(what):
    desk = Desk(rank=1)
    desk.router.complete(desk.post())
    series = desk.series()
    if what == "tombstone":
        desk.router.on_abort(SUM.group_id, SUM.name, 1, TIMEOUT, desk.effects)
    else:
        desk.router.on_peer_left(2, TIMEOUT)
    assert again(desk, series) is None


@pytest.mark.parametrize(("bound", "change"), [("MAX_ID", {"name": "other"}), ("MAX_SIGNATURES", {"chunk": 2})])
def test_a_name_whose_number_was_given_away_goes_the_long_way(monkeypatch, bound, change):
    monkeypatch.setattr(names, bound, 1)
    desk = Desk(rank=1)
    series = desk.series()
    desk.router.complete(desk.post())
    desk.router.complete(desk.post(replace(SUM, **change)))
    assert again(desk, series) is None
    renewed = desk.series()
    assert (renewed is series) == (bound == "MAX_ID")  # its number came back to the key
    if renewed is not series:
        assert again(desk, series) is None
    assert again(desk, renewed) is not None
