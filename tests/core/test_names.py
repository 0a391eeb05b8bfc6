from __future__ import annotations

import pytest

from kfcomm.core import names
from kfcomm.core.names import Names
from kfcomm.core.signature import Signature
from kfcomm.errors import LocalProtocolError


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 3)
    monkeypatch.setattr(names, "MAX_SIGNATURES", 3)
    return Names()


def numbered(known, *keys):
    for name in keys:
        known.used(b"group", name)
    return [known.key(b"group", name).id for name in keys]


def test_a_key_is_made_once_and_only_on_purpose():
    known = Names()
    assert known.find(b"group", "a") is None
    key = known.key(b"group", "a")
    assert known.key(b"group", "a") is key is known.find(b"group", "a")
    assert known.key(b"other", "a") is not key
    assert len(known) == 2
    assert [one.group_id for one in known] == [b"group", b"other"]


def test_a_key_keeps_its_number_while_it_owns_it(few):
    assert numbered(few, "a", "b", "a", "c", "b") == [0, 1, 0, 2, 1]
    assert numbered(few, "d") == [0]
    assert numbered(few, "b") == [1]
    assert numbered(few, "a") == [1]  # taken over from b, which was the next in turn
    assert numbered(few, "d") == [0]


def test_the_number_of_a_key_in_flight_is_not_taken(few):
    numbered(few, "a", "b", "c")
    few.key(b"group", "a").live[0] = object()
    assert numbered(few, "d", "e", "d") == [1, 2, 1]
    for name in "de":
        few.key(b"group", name).live[0] = object()
    with pytest.raises(LocalProtocolError, match="more than 3 names in flight"):
        few.used(b"group", "f")
    few.key(b"group", "d").live.clear()
    assert numbered(few, "f") == [1]


def test_a_signature_that_was_replaced_is_not_known_by_its_address(few):
    signatures = [Signature("send", shape=(length,)) for length in range(4)]
    numbers = [few.signature(one)[0] for one in signatures]
    assert numbers == [0, 1, 2, 0]
    assert [few.signature(one)[0] for one in signatures] == [1, 2, 0, 1]
    assert few.signature(signatures[3]) == few.signature(Signature("send", shape=(3,))) == (1, signatures[3])


def test_equal_signatures_are_one_value_and_one_number():
    known = Names()
    one = known.signature(Signature("barrier"))
    assert known.signature(Signature("barrier")) is one
    assert known.same(tuple(Signature("barrier"))) is one[1]
    stranger = tuple(Signature("send"))
    assert known.same(stranger) is stranger
    with pytest.raises(TypeError):
        known.same(({},))


def test_the_oldest_signature_gives_up_its_number(few):
    signatures = [Signature("send", root=number) for number in range(5)]
    assert [few.signature(one)[0] for one in signatures] == [0, 1, 2, 0, 1]
    assert few.signature(signatures[2])[0] == 2
    assert few.signature(signatures[0])[0] == 2
    assert len(few._signatures) == len(few._numbered) == 3


def test_later_generations_take_the_number_of_the_last_but_one() -> None:
    known = Names()
    first, other = Signature("all_reduce", generation=1), Signature("barrier", generation=1)
    assert [known.signature(one)[0] for one in (first, other)] == [0, 1]
    generations = [first._replace(generation=number) for number in range(2, 9)]
    assert [known.signature(one)[0] for one in generations] == [2, 0, 2, 0, 2, 0, 2]
    assert known.same(generations[-1]) is generations[-1]
    assert known.signature(other) == (1, other)


def test_a_number_that_went_to_another_signature_is_not_taken_back(few) -> None:
    first = Signature("send", generation=1)
    assert few.signature(first)[0] == 0
    assert [few.signature(Signature("send", shape=(length,)))[0] for length in range(3)] == [1, 2, 0]
    assert few.signature(first._replace(generation=3))[0] == 1
