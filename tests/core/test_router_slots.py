"""Slots that peers hand out and take back: the router keeps what it is told, and looks at none of it."""

from __future__ import annotations

from kfcomm.core import router
from kfcomm.core.collective import Collective
from kfcomm.core.frame import Kind
from tests.core.desk import SUM, Desk

MEMORY = object()
SLOT, NO_SLOT = int(Kind.SLOT), int(Kind.NO_SLOT)


def offered(desk, peer=1, *, number=0, signature=0, memory=MEMORY):
    desk.router.on_slot(desk.incoming[peer], (SLOT, number, signature, 7, 3, 4096), memory, desk.effects)
    return desk.series().key.offers


def taken_back(desk, peer=1, *, number=0, signature=0):
    return desk.router.on_no_slot(desk.incoming[peer], (NO_SLOT, number, signature, 7), desk.effects)


def test_what_was_handed_out_is_kept_until_it_is_taken():
    desk = Desk()
    desk.define(1)
    assert offered(desk) == {SUM.signature: (1, 7, MEMORY, 3, 4096)}
    assert offered(desk, memory=desk) == {SUM.signature: (1, 7, desk, 3, 4096)}
    assert not desk.take()


def test_not_too_many_are_kept(monkeypatch):
    monkeypatch.setattr(router, "MAX_OFFERS", 0)
    desk = Desk()
    desk.define(1)
    assert offered(desk) == {}


def test_what_is_taken_back_is_not_offered_any_more():
    desk = Desk()
    desk.define(1)
    assert taken_back(desk) is None
    offered(desk)
    assert taken_back(desk) is None
    key = desk.series().key
    assert key.offers == {}
    key.slots = {SUM.signature: MEMORY}
    assert taken_back(desk) is MEMORY


def test_slots_under_numbers_without_a_meaning_break_the_rules():
    desk = Desk()
    desk.define(1)
    for numbers in ({"number": 5}, {"signature": 5}):
        assert offered(desk, **numbers) is None
        assert taken_back(desk, **numbers) is None
    assert offered(desk, memory=None) is None
    assert [reason.split()[:2] for reason in desk.reasons()] == [["a", "slot"], ["no", "slot"]] * 2 + [["a", "slot"]]


def test_a_collective_that_has_begun_by_itself_may_enter():
    desk = Desk()
    series = desk.series()
    collective = Collective()
    collective.begin(series, 0)
    series.key.next_seq += 1
    desk.router.enter(collective)
    assert desk.router.live == {collective: None}
    assert series.key.live == {0: collective}
    desk.router.complete(collective)
    assert not desk.router.live
    assert not series.key.live
