"""Slots for the next epoch: which are given on, when ranks have the same, and which use takes them."""

from __future__ import annotations

import functools
import inspect
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kfcomm.core.signature import Signature
from kfcomm.engine.inherited import NOTHING, InheritedSlots
from kfcomm.engine.slots import SlotTable
from kfcomm.transports.shm import slots
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.shm.slots import Cut, SlotMemory, SlotSpec

COUNT, SIZE = 1000, 3
SURVIVORS = {0: 0, 2: 1}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "WINDOW_NBYTES", 480)
    monkeypatch.setattr(slots, "MIN_PIECE_NBYTES", 0)


def with_memory(test: Any) -> Any:
    """Run a test with memory of its own, which must be gone at its end; a fixture would live on."""

    def run(memory: SlotMemory, given: dict[str, Any]) -> None:
        try:
            test(memory, **given)
        finally:
            memory.close()

    @functools.wraps(test)
    def main(**given: Any) -> None:
        run(SlotMemory.make(range(SIZE), Heaps(0)), given)

    names = list(inspect.signature(test).parameters.values())[1:]
    main.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    del main.__wrapped__  # type: ignore[attr-defined]
    return main


def cut_of(size: int = SIZE, **options: Any) -> Cut:
    return Cut(COUNT, 8, size, **{"is_turned": True} | options)


def signature_of(size: int = SIZE, dtype: str = "float64") -> Signature:
    return Signature("all_reduce", dtype, (COUNT,), "sum", graphs=bytes([size]))


def slot_in(memory: SlotMemory, cut: Cut) -> Any:
    where = memory.hand_out(cut)
    assert where is not None
    return memory.slot(SlotSpec(*where, range(SIZE), 0, 0, np.dtype(np.float64), cut, np.copyto))


def key_of(name: str, slot: Any, signature: Any = None) -> Any:
    return SimpleNamespace(group_id=b"world", name=name, slots={signature or signature_of(): slot})


def series_of(name: str, **options: Any) -> Any:
    group, program = SimpleNamespace(members=[4, 5]), SimpleNamespace(neighbours={1})
    return SimpleNamespace(key=key_of(name, None), signature=signature_of(2, **options), group=group, program=program)


@with_memory
def test_use_0_of_a_name_takes_its_slot_once(memory: SlotMemory) -> None:
    slot = slot_in(memory, cut_of())
    slot.post(np.ones(COUNT), 7)
    found = InheritedSlots.of([key_of("g", slot)], []).for_next(SURVIVORS, Heaps(0))
    assert slot.is_dead
    assert not any(slot.posted())
    taken = found.take(series_of("g"), 0, cut_of(2))
    assert taken is not None
    place, cut = taken
    assert (place.at, place.nbytes) == (slot.at, slot.nbytes)
    assert place.number != slot.number
    assert place.memory.is_inherited
    assert list(place.memory.places) == [0, 1]
    assert cut.nbytes <= slot.nbytes < cut_of(2).nbytes
    assert found.take(series_of("g"), 0, cut_of(2)) is None
    assert found.expected == {5}
    assert not found.is_reached([4])
    assert found.is_reached([5])
    assert found.is_reached([])


@pytest.mark.parametrize(
    ("name", "dtype", "seq", "options"),
    [
        ("h", "float64", 0, {}),
        ("g", "float32", 0, {}),
        ("g", "float64", 1, {}),
        ("g", "float64", 0, {"is_shared": True}),
        ("g", "float64", 0, {"is_turned": False}),
    ],
)
@with_memory
def test_other_uses_take_none(memory: SlotMemory, name: str, dtype: str, seq: int, options: Any) -> None:
    found = InheritedSlots.of([key_of("g", slot_in(memory, cut_of()))], []).for_next(SURVIVORS, Heaps(0))
    assert found.take(series_of(name, dtype=dtype), seq, cut_of(2, **options)) is None


@with_memory
def test_no_slot_is_inherited_while_one_is_in_use(memory: SlotMemory) -> None:
    slot = slot_in(memory, cut_of())
    found = InheritedSlots.of([key_of("g", slot)], [SimpleNamespace(slot=slot)])
    assert found.digest == NOTHING
    assert not slot.is_dead


@pytest.mark.parametrize("options", [{"is_turned": False}, {"is_shared": True}])
@with_memory
def test_other_slots_end_with_their_epoch(memory: SlotMemory, options: Any) -> None:
    assert InheritedSlots.of([key_of("g", slot_in(memory, cut_of(**options)))], []).digest == NOTHING


@with_memory
def test_digests_are_of_names_and_places(memory: SlotMemory) -> None:
    theirs = SlotMemory.make(range(SIZE), Heaps(0))

    def digest(name: str, one: SlotMemory) -> bytes:
        again = SlotMemory(os.dup(one.descriptor), range(SIZE), Heaps(0))
        found = InheritedSlots.of([key_of(name, slot_in(again, cut_of()))], [])
        again.close()
        return found.digest

    assert digest("g", memory) == digest("g", memory)
    assert len({digest("g", memory), digest("h", memory), digest("g", theirs)}) == 3
    theirs.close()


@with_memory
def test_numbers_end(memory: SlotMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_SLOTS", 4)
    keys = [key_of(name, slot_in(memory, cut_of())) for name in "ab"]
    assert InheritedSlots.of(keys, []).digest != NOTHING
    assert InheritedSlots.of(keys, []).digest == NOTHING


class Used:
    """A use under way of a slot, as `SlotTable.park` sees it; its own slot and memory."""

    def __init__(self, num_uses: int, *, is_inherited: bool) -> None:
        self.slot = self.memory = self
        self.num_uses, self.is_inherited, self.is_parked = num_uses, is_inherited, False

    def park(self, *, is_parked: bool) -> None:
        self.is_parked = is_parked


@pytest.mark.parametrize(
    ("use", "can_be_woken"),
    [
        (Used(0, is_inherited=True), False),
        (Used(1, is_inherited=True), True),
        (Used(0, is_inherited=False), True),
    ],
)
def test_first_use_of_an_inherited_slot_is_not_left_to_peers(use: Any, can_be_woken: bool) -> None:
    """A link that is open here may not be open for the peer: such a rank looks by itself."""
    links: Any = SimpleNamespace(incoming=[])
    table = SlotTable(links, None)
    table.pending[use] = None
    assert table.park() is can_be_woken
    assert use.is_parked
    table.unpark()
    assert not use.is_parked
