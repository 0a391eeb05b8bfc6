"""Failures at one router: aborts before and after the post, lost peers, broken links."""

from __future__ import annotations

import random
from dataclasses import replace

from kfcomm.core import calls, names
from kfcomm.core.calls import Tell
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective
from kfcomm.core.frame import Kind
from kfcomm.core.links import LINKS
from kfcomm.core.machine import Do
from tests.core import specs
from tests.core.desk import SUM, TIMEOUT, Desk, admit

# ---------------------------------------------------------------- aborts


def test_the_first_news_of_an_abort_counts():
    desk = Desk()
    desk.told()
    desk.told(cause=Cause(CauseKind.CANCELLED, 1, "no matter"))
    assert [effect[0] for effect in desk.take()] == [Tell.EARLY]
    assert desk.post() == TIMEOUT
    desk.told()
    assert desk.take() == []


def test_foreign_aborts_leave_no_key_and_are_bounded(monkeypatch):
    monkeypatch.setattr(calls, "MAX_ABORTED", 4)
    desk = Desk()
    for number in range(10):
        desk.told(spec=replace(SUM, name=f"key{number}"))
    assert desk.router.num_keys == 0
    assert len(desk.router.dead) == 4
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
    assert not desk.router.dead
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
    assert not desk.router.dead
    desk.told(seq=5)
    desk.refuse(seq=6)
    assert not desk.router.dead
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
        desk.router.define_key(desk.incoming[peer], (Kind.KEY, 0, SUM.group_id, "grad", 2), desk.effects)
    flood, failed = desk.take()
    assert flood[:4] == (Tell.FLOOD, SUM.group_id, "grad", 0)
    assert failed[:2] == (Tell.FAILED, waiting)
    assert failed[2].kind is CauseKind.LINK
    assert list(desk.router.live) == [whole, later]
    assert desk.router.awaiting(1) == [later]
    assert desk.router.awaiting(2) == [whole, later]
    desk.router.define_key(desk.incoming[1], (Kind.KEY, 0, SUM.group_id, "grad", 2), desk.effects)
    assert desk.take() == []


def test_leaving_group_forgets_its_definitions():
    desk = Desk(1)
    other = replace(SUM, members=(1, 2), pairs=specs.pairs(random.Random(1), 2), name="other")
    outgoing = desk.outgoing[0] = desk.router.open(0)[0]
    for spec in (SUM, other):
        collective = desk.post(spec)
        if spec is SUM:
            admit(desk, desk.take(Do.SEND)[0])
        desk.router.abort(collective, TIMEOUT, desk.effects)
    desk.define(2)
    desk.chunk(2, "early", seq=1, charged=1)
    desk.take()
    assert not outgoing.forget(other.group_id)
    desk.router.leave(SUM.group_id, desk.effects)
    assert desk.take() == [(Tell.DROPPED, "early")]
    assert outgoing.forget(SUM.group_id)
    assert not outgoing.keys
    assert not outgoing.known
    assert desk.router.is_posted(SUM.group_id, "grad", 0)
    assert not desk.router.is_posted(SUM.group_id, "grad", 1)
    assert desk.chunk(2, "late", seq=1, charged=1) is None
    desk.ask(2, seq=1)
    assert desk.incoming[2].asks == 0
    assert desk.incoming[2].window._spent_headers == desk.incoming[2].window.owed_headers


def test_a_new_link_tells_again_of_groups_that_were_left():
    desk = Desk(1)
    outgoing = desk.outgoing[0] = desk.router.open(0)[0]
    desk.router.abort(desk.post(), TIMEOUT, desk.effects)
    outgoing.keys[0] = desk.series().key
    outgoing.forget(SUM.group_id)
    for number in (2, 3):
        desk.router.broke(outgoing)
        assert desk.router.owes(0)
        outgoing, first = desk.router.open(0)
        assert first == [(Kind.OPEN, number), (Kind.LEFT, SUM.group_id)]
        assert not desk.router.owes(0)
    desk.router.broke(outgoing)
    desk.router.on_peer_left(0, Cause(CauseKind.LOST, 0, "left"))
    assert not desk.router.owes(0)


def test_waiting_for_peer_that_left_group_fails():
    desk = Desk()
    specs_ = [replace(SUM, overlapping=True, salt=number) for number in range(2)]
    waiting, whole = [desk.post(one) for one in specs_]
    other = desk.post(replace(SUM, name="other", members=(0, 1), pairs=specs.pairs(random.Random(1), 2)))
    desk.define(1, number=3)
    desk.chunk(1, "x", seq=1, number=3)
    desk.take()
    desk.router.on_left(desk.incoming[1], SUM.group_id, desk.effects)
    flood, failed = desk.take()
    assert flood[:4] == (Tell.FLOOD, SUM.group_id, "grad", 0)
    assert failed == (Tell.FAILED, waiting, Cause(CauseKind.CANCELLED, 1, "rank 1 has left the group"))
    assert list(desk.router.live) == [whole, other]
    incoming = desk.incoming[1]
    assert not incoming.keys
    assert not incoming.arrivals
    assert incoming.given_up == 4
    incoming.arrivals[9, 0, 0, 0] = None
    desk.define(1, number=5)
    assert incoming.arrivals
    desk.define(1, number=3, signature_number=6)  # it may stand for something else now
    assert not incoming.arrivals


def test_the_receiver_of_a_broken_link_asks_its_sender_to_notice():
    desk = Desk(1)
    cause = Cause(CauseKind.LINK, 0, "broke")
    desk.router.on_abort(LINKS, "2", 7, cause, desk.effects)
    assert desk.take() == []
    desk.router.on_abort(LINKS, "1", 7, cause, desk.effects)
    assert desk.take() == [(Tell.BROKEN, 0, 7, "broke")]


def test_gone_peer_is_owed_nothing():
    desk = Desk(1)
    collective = desk.post()
    admit(desk, desk.take(Do.SEND)[0])
    desk.router.broke(desk.outgoing[0])
    desk.router.on_peer_left(0, Cause(CauseKind.LOST, 0, "left"))
    assert not desk.router.owes(0)
    assert desk.router.broke(desk.outgoing[0]) == []
    assert not desk.router.owes(0)
    assert list(desk.router.live) == [collective]
