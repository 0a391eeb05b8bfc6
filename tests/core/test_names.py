from __future__ import annotations

import pytest

from kfcomm.core import names
from kfcomm.core import program as programs
from kfcomm.core.collective import GroupView, ItemSizes, name_of, shown
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


# ---------------------------------------------------------------- what uses of a name have in common

GROUP = GroupView(b"group", (0, 1), 0)
SIZES = ItemSizes(4, 4)
ONE, OTHER = Signature("send", shape=(1,)), Signature("send", shape=(2,))


def series(known, name="a", signature=ONE, *, group=GROUP, count=1, sizes=SIZES):
    program = programs.send.__wrapped__(0, count, 1)  # made anew each time
    return known.series(group, known.used(group.id, name), signature, program, sizes)


def test_one_series_per_key_and_signature():
    known = Names()
    first = series(known)
    assert (first.group, first.key, first.key_id) == (GROUP, known.find(b"group", "a"), 0)
    assert (first.signature, first.signature_id) == (ONE, 0)
    assert (first.sizes, first.posted, first.version) == (SIZES, 1, known.version)
    same_group = GroupView(GROUP.id, GROUP.members, GROUP.rank)
    for again in (series(known), series(known, signature=Signature("send", shape=(1,)), group=same_group)):
        assert again is first
    other = series(known, signature=OTHER)
    assert (other.key, other.signature, other.signature_id) == (first.key, OTHER, 1)
    assert (series(known), series(known, signature=OTHER)) == (first, other)
    assert series(known, "b") is not first
    assert {first.key.series, *first.key.others.values()} == {first, other}


@pytest.mark.parametrize(
    "change",
    [{"count": 2}, {"sizes": ItemSizes(4, 8)}, {"group": GroupView(b"group", (0, 2), 0)}],
    ids=["program", "sizes", "members"],
)
def test_changed_program_makes_another_series(change):
    known = Names()
    first = series(known)
    second = series(known, **change)
    assert second is not first
    assert series(known, **change) is second
    assert (second.key_id, second.signature_id) == (first.key_id, first.signature_id)
    assert second.key.series is second


def test_a_key_that_has_another_number_is_compiled_anew(few):
    first = series(few)
    numbered(few, "b", "c", "d")  # d takes over the number of a
    second = series(few)
    assert (first.key, first.key_id) == (second.key, 0)
    assert second is not first
    assert second.key_id == second.key.id == 1
    assert first.version != few.version == second.version


def test_a_key_that_has_its_number_back_is_compiled_as_before(few):
    first = series(few)
    numbered(few, "b", "c", "d", "e", "f")  # d, e and f take over all three
    assert first.version != few.version
    assert series(few) is first
    assert first.key_id == first.key.id == 0
    assert first.version == few.version


def test_a_signature_that_took_over_a_number_is_compiled_anew(few):
    first = series(few)
    for length in range(2, 5):
        few.signature(Signature("send", shape=(length,)))
    second = series(few, signature=Signature("send", shape=(4,)))
    assert second is not first
    assert second.signature_id == first.signature_id == 0
    assert first.version != few.version == second.version
    third = series(few)
    assert third is not first
    assert (third.signature, third.signature_id) == (ONE, 1)


def test_the_version_is_another_one_only_when_a_number_is_given_another_meaning(few):
    numbered(few, "a", "b", "c", "a")
    for one in (ONE, OTHER, ONE):
        few.signature(one)
    assert few.version == 0
    numbered(few, "d")
    assert few.version == 1
    few.signature(Signature("send", shape=(3,)))
    assert few.version == 1
    few.signature(Signature("send", shape=(4,)))
    assert few.version == 2


@pytest.mark.parametrize(
    ("key", "words", "name"),
    [
        ("grad/0", "'grad/0'", "grad/0"),
        ("grad/0\0many 2", "'grad/0' (many 2)", "grad/0"),
        ("", "an unnamed collective", "unnamed"),
        ("\0data", "an unnamed collective (data)", "unnamed"),
        ("\0strategy", "set_strategy", "set_strategy"),
        ("\0probe", "probe", "probe"),
    ],
)
def test_a_key_has_words_and_a_name(key, words, name):
    assert shown(key) == words
    assert name_of(key) == name


def test_names_of_a_group_that_was_left_give_up_their_numbers_and_stay_for_a_while(monkeypatch):
    monkeypatch.setattr(names, "MAX_LEFT", 2)
    known = Names()
    for number in range(4):
        key = known.used(b"%d" % number, "a")
        key.next_seq = 5
    known.key(b"2", "of a peer").next_seq = 7  # which this rank has not used: it has no number
    assert [key.id for key in known] == [0, 1, 2, 3, names.UNNUMBERED]
    for number in (2, 0, 1):
        known.leave(b"%d" % number)
    assert known.find(b"2", "a") is None
    assert [(key.group_id, key.next_seq, key.has_ended) for key in known] == [
        (b"0", 5, True),
        (b"1", 5, True),
        (b"3", 5, False),
    ]
    assert known.key(b"0", "late").has_ended
    known.leave(b"3")
    assert len(known) == 2
    known.leave(b"never used")
    assert [key.group_id for key in known] == [b"3"]


def test_renewed_names_have_another_version():
    known = Names()
    first = series(known)
    known.renew()
    assert first.version != known.version
    assert series(known) is first
    assert first.version == known.version
