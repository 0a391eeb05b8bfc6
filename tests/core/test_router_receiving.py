"""A router that receives: chunks and questions, early, in time and late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kfcomm.core import matching, names
from kfcomm.core.calls import Tell
from kfcomm.core.cause import CauseKind
from kfcomm.core.collective import Collective
from kfcomm.core.frame import Kind
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.links import Credit, Early, ReceiveWindow
from kfcomm.core.machine import DOWN, Do
from kfcomm.types import Verb
from tests.core.desk import NBYTES, RANKS, SUM, TIMEOUT, TWICE, UNLIKE, Desk, admit, listed, primed_desk
from tests.core.specs import Spec


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


def test_held_payloads_of_failed_collective_are_dropped():
    desk = Desk()
    desk.define(2)
    collective = desk.post()
    desk.chunk(2, "second child")
    assert desk.take() == [(Do.HOLD, collective, "second child")]
    desk.told()
    assert desk.take() == [(Tell.DROPPED, "second child"), (Tell.FAILED, collective, TIMEOUT)]


def test_ask_implies_posted():
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


def test_aborted_collective_does_not_affect_others():
    desk = Desk()
    desk.told()
    assert isinstance(desk.post(replace(SUM, name="other")), Collective)
    assert desk.post() == TIMEOUT


@pytest.mark.parametrize("theirs", [replace(SUM, pairs=UNLIKE), replace(SUM, generation=9)])
def test_after_a_mismatch_no_peer_is_answered(theirs):
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
    assert "generation 5" in cause.message.split("; rank 0 has ")[0]
    assert "generation 4" in cause.message.split("; rank 0 has ")[1]
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
def test_fast_path_owes_credit(charged):
    desk = primed_desk()
    assert desk.receive(1, seq=1, charged=charged) in desk.router.live
    window = desk.incoming[1].window
    window.matched(1000)  # enough to be worth an answer
    assert window.settle() == Credit(1000 + charged * NBYTES, 1 + charged)


def test_fast_path_beyond_credit_is_violation():
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


def test_chunk_from_receiver_releases_deferred_sends():
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
    resumed, stored, down = desk.take(Tell.RESUME, Do.SEND, Do.STORE)
    assert (stored[:2], down[:2]) == ((Do.STORE, second), (Do.SEND, second))
    desk.effects.append(resumed)
    assert desk.resume() == [up]
    assert first.missing_ranks() == second.missing_ranks() == ()


class Beside:
    """A shortcut to rank 1, in use by a collective."""

    def __init__(self, collective):
        self.collective = collective
        self.has_left = False
        collective.shortcut = self

    def covers(self, rank):
        return rank == 1

    def heard(self):
        return 0b10

    def leave(self):
        self.has_left = True
        self.collective.shortcut = None


def test_chunk_of_a_peer_that_a_shortcut_covers_ends_the_shortcut():
    desk = primed_desk()
    collective = list(desk.router.live)[1]
    beside = Beside(collective)
    assert not collective.awaits(1)  # what it gives comes otherwise
    assert collective.awaits(2)
    assert collective.missing_ranks() == (2,)  # the shortcut has heard of rank 1
    assert desk.receive(1, seq=1) is None
    assert not beside.has_left
    desk.define(2, TWICE)
    assert desk.whole(2, seq=1) is collective
    assert not beside.has_left  # that is none of its peers
    assert desk.whole(1, seq=1) is collective
    assert beside.has_left
    assert not collective.awaits(1)  # it has come


def test_forwarded_chunks_skip_fast_path():
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
        desk.router.define_key(incoming, (Kind.KEY, 0, other.group_id, other.name, 0), desk.effects)
    else:
        desk.router.define_signature(incoming, 0, listed(other.signature), desk.effects)
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


def test_known_arrivals_per_link_are_bounded(monkeypatch):
    monkeypatch.setattr(matching, "MAX_ARRIVALS", 3)
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
