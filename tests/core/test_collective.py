"""Groups in words, and names whose slots are retired."""

from types import SimpleNamespace

from kfcomm.core import collective
from kfcomm.core.collective import GroupTable, GroupView, Key

WORLD = GroupView(b"world", (0, 1, 2, 3), 0)
GROUP = GroupView(b"odd", (3, 1), 0)
PAIR = GroupView(b"pair", (1, 3), 0, GROUP)


def test_world_ranks_are_named_alone() -> None:
    assert WORLD.called(2) == "rank 2"
    assert WORLD.all_called([0, 2]) == "ranks [0, 2]"


def test_group_ranks_follow_world_ranks_where_they_differ() -> None:
    assert GROUP.called(0) == "rank 3 (group rank 0)"
    assert GROUP.all_called([0, 1]) == "ranks [3, 1] (group ranks [0, 1])"
    assert PAIR.called(0) == "rank 1"
    assert PAIR.called(1) == "rank 3 (group rank 0)"


def test_long_lists_of_ranks_are_cut() -> None:
    assert WORLD.all_called(range(4), most=2) == "ranks [0, 1, ...]"


def test_title_of_a_message_names_both_ends() -> None:
    assert WORLD.titled("grad") == "'grad'"
    assert PAIR.titled("tag 3") == "a message with tag 3 from rank 1 to rank 3 (group rank 0)"


def test_spoiling_a_use_retires_the_slots_of_its_name() -> None:
    key, slot = Key(0, b"world", "grad"), SimpleNamespace(is_dead=False)
    key.spoil(3)
    key.slots = {0: slot}  # type: ignore[dict-item]
    key.spoil(2)
    assert key.spoilt == 3
    assert slot.is_dead


def test_group_table_tells_equal_groups_apart_and_forgets_the_oldest_it_left(monkeypatch):
    monkeypatch.setattr(collective, "MAX_LEFT", 1)
    table = GroupTable(GroupView(b"world", (0, 1, 2), 2))
    first, second = [table.add(GroupView(b"world", (0, 1, 2), 2), "pair", [2, 1]) for _ in range(2)]
    assert (first.members, first.rank) == ((2, 1), 0)
    assert first.id != second.id
    table.leave(first.id)
    assert table.known[first.id] == ("pair", (2, 1))  # a late message may name it
    table.leave(second.id)
    assert list(table.known) == [b"world", second.id]
