"""Slots that peers hand out and take back: what is offered is kept until it is taken; what breaks rules ends a link."""

from __future__ import annotations

import pytest

from kfcomm.core.frame import Kind
from kfcomm.engine import slots
from kfcomm.engine.slots import SlotTable
from kfcomm.errors import RemoteProtocolError
from tests.core.desk import SUM, Desk

MEMORY = object()
SLOT, NO_SLOT = int(Kind.SLOT), int(Kind.NO_SLOT)


class Slot:
    """As much of one as is asked for here."""

    root = 1
    is_dead = False


@pytest.fixture
def desk():
    desk = Desk()
    desk.define(1)
    return desk


@pytest.fixture
def table():
    return SlotTable(None, None)


def offered(desk, table, *, number=0, signature=0, memory=MEMORY):
    table.handed_out(desk.incoming[1], (SLOT, number, signature, 7, 3, 4096), memory)
    return desk.series().key.offers


def taken_back(desk, table, *, number=0, signature=0):
    table.taken_back(desk.incoming[1], (NO_SLOT, number, signature, 7))
    return desk.series().key


def test_offered_slot_is_kept_until_taken(desk, table):
    assert offered(desk, table) == {SUM.signature: (1, 7, MEMORY, 3, 4096)}
    assert offered(desk, table, memory=desk) == {SUM.signature: (1, 7, desk, 3, 4096)}


def test_not_too_many_are_kept(monkeypatch, desk, table):
    monkeypatch.setattr(slots, "MAX_OFFERS", 0)
    assert offered(desk, table) == {}


def test_withdrawn_slot_is_not_offered_again(desk, table):
    assert taken_back(desk, table).offers is None
    offered(desk, table)
    key = taken_back(desk, table)
    assert key.offers == {}
    key.slots = {SUM.signature: Slot()}
    taken_back(desk, table)
    assert key.slots[SUM.signature].is_dead


def test_it_is_taken_back_only_by_who_has_handed_it_out(desk, table):
    key = desk.series().key
    slot = Slot()
    slot.root = 2
    key.slots = {SUM.signature: slot}
    taken_back(desk, table)
    assert not slot.is_dead


@pytest.mark.parametrize("numbers", [{"number": 5}, {"signature": 5}])
@pytest.mark.parametrize("told", [offered, taken_back])
def test_numbers_without_a_meaning_break_the_rules(desk, table, told, numbers):
    with pytest.raises(RemoteProtocolError, match="rank 1 sent a slot under a number that was never defined"):
        told(desk, table, **numbers)


def test_slots_in_no_memory_break_the_rules(desk, table):
    with pytest.raises(RemoteProtocolError, match="rank 1 sent a slot in memory that it does not share"):
        offered(desk, table, memory=None)
