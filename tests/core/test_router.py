"""A router that posts and sends: names and credit, what a link need not be told, and the short way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kfcomm.core import names
from kfcomm.core.collective import shown
from kfcomm.core.frame import Kind
from kfcomm.core.links import Credit, announce
from kfcomm.core.machine import UP, Do
from tests.core.desk import NBYTES, SUM, TIMEOUT, Desk, admit


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
    assert desk.resume() == [second, second]
    assert admit(desk, second) == ([], (Kind.CHUNK, 0, 0, 0, 0, UP, 1, 0))
    assert collective.arrived_ranks() == (0, 1)
    assert collective.missing_ranks() == (2,)
    assert collective.unheard() == ()


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
    assert admit(desk, *desk.resume()) == ([], (Kind.CHUNK, 0, 2, 0, 0, UP, 0, 2 * 3))
    assert announce(desk.outgoing[0], second) == [(Kind.ASK, 0, 1, 0, 3)]


def test_keys_are_shown_as_people_know_them():
    assert (Desk().post().name, Desk().post().title) == ("grad", "'grad'")
    assert shown("grad/0") == "'grad/0'"
    assert shown("grad/0\0data") == "'grad/0' (data)"
    assert shown("") == "an unnamed collective"
    assert shown("\0data") == "an unnamed collective (data)"


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


def test_definitions_repeat_when_signature_number_is_reused(monkeypatch):
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


# ---------------------------------------------------------------- again


def test_the_short_way_of_a_name_does_what_the_long_one_does():
    desk = Desk(rank=1)
    long = desk.post()
    posted = desk.take(Do.SEND)
    series = desk.series()
    assert series is long.series
    assert desk.again(series) is None  # still in flight
    assert desk.take() == []
    assert desk.router.num_uses(SUM.group_id, SUM.name) == 1
    desk.router.complete(long)
    short = desk.again(series, generation=7)
    assert (short.seq, short.series, short.generation, short.arrived_ranks()) == (1, series, 7, (1,))
    assert (short.key, short.group, short.signature) == (long.key, long.group, long.signature)
    assert [effect[2:] for effect in desk.take(Do.SEND)] == [effect[2:] for effect in posted]
    assert list(desk.router.live) == [short]
    assert desk.router.is_posted(SUM.group_id, SUM.name, 1)


def test_post_again_replays_early_chunks():
    desk = Desk(rank=0)
    desk.router.complete(desk.post())
    desk.define(1)
    desk.chunk(1, "early", seq=1, charged=1)
    desk.take()
    assert desk.again(desk.series()) is not None
    assert [effect[4] for effect in desk.take(Do.FOLD)] == ["early"]


@pytest.mark.parametrize("what", ["abort", "loss"])
def test_post_again_declines_after_abort_or_loss(what):
    desk = Desk(rank=1)
    desk.router.complete(desk.post())
    series = desk.series()
    if what == "abort":
        desk.router.on_abort(SUM.group_id, SUM.name, 1, TIMEOUT, desk.effects)
    else:
        desk.router.on_peer_left(2, TIMEOUT)
    assert desk.again(series) is None


@pytest.mark.parametrize(("bound", "change"), [("MAX_ID", {"name": "other"}), ("MAX_SIGNATURES", {"chunk": 2})])
def test_a_name_whose_number_was_given_away_goes_the_long_way(monkeypatch, bound, change):
    monkeypatch.setattr(names, bound, 1)
    desk = Desk(rank=1)
    series = desk.series()
    desk.router.complete(desk.post())
    desk.router.complete(desk.post(replace(SUM, **change)))
    assert desk.again(series) is None
    renewed = desk.series()
    assert (renewed is series) == (bound == "MAX_ID")  # its number came back to the key
    if renewed is not series:
        assert desk.again(series) is None
    assert desk.again(renewed) is not None
