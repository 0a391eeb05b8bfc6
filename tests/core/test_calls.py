"""Calls under numbers of their own: begun outside the router, or with numbers left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kfcomm.core import names, program
from kfcomm.core.calls import Tell
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective, GroupView, ItemSizes, Post
from kfcomm.core.frame import Kind
from kfcomm.core.links import Incoming
from kfcomm.core.machine import UP
from kfcomm.core.recorder import EffectRecorder
from kfcomm.core.router import Router
from kfcomm.core.signature import Signature
from tests.core.desk import NBYTES, SUM, Desk


class Begun:
    """The next use of a series, which has a number and is not among the live ones."""

    def __init__(self, desk, series):
        self.desk = desk
        self.collective = Collective(series, series.key.next_seq, 0, EffectRecorder(desk.effects))
        series.key.next_seq += 1
        series.key.begun = self

    def enter(self):
        self.collective.key.begun = None
        self.desk.router.enter(self.collective)

    @property
    def is_known(self):
        return self.collective in self.desk.router.live


def begun():
    """A root with one, and a peer that has defined names on its link."""
    desk = Desk(rank=0)
    use = Begun(desk, desk.series())
    desk.router.define_key(desk.incoming[1], (Kind.KEY, 0, SUM.group_id, SUM.name, 0), desk.effects)
    desk.router.define_signature(desk.incoming[1], 0, list(SUM.signature), desk.effects)
    assert not use.is_known
    return desk, use


def test_a_chunk_finds_it():
    desk, use = begun()
    ticket = desk.router.match(desk.incoming[1], (Kind.CHUNK, 0, 0, 0, 0, UP, 0, 1), NBYTES, desk.effects)
    assert ticket[0] is use.collective
    assert use.is_known


@pytest.mark.parametrize("overlapping", [True, False])
def test_another_use_is_a_second_one_in_flight(overlapping):
    desk, use = begun()
    assert desk.again(desk.series()) is None
    assert not use.is_known
    second = desk.post(replace(SUM, overlapping=overlapping))
    assert use.is_known
    assert isinstance(second, Collective) == overlapping
    assert desk.router.num_uses(SUM.group_id, SUM.name) == 2


def test_its_number_is_not_given_away(monkeypatch):
    monkeypatch.setattr(names, "MAX_ID", 2)
    desk, use = begun()
    for name in "abc":
        desk.router.complete(desk.post(replace(SUM, name=name)))
    assert desk.router.names.used(SUM.group_id, SUM.name).id == use.collective.key.id == 0


SIGNATURE = Signature("send", "uint8", (1,), chunk_elements=1)
CAUSE = Cause(CauseKind.CANCELLED, 0, "given up")
PAIR = GroupView(b"pair", (0, 1), 1)


def posted(router, **options):
    effects = []
    post = Post(PAIR, "x", SIGNATURE, program.send(1, 1, 1), ItemSizes(1, 1), **options)
    return router.post(post, EffectRecorder(effects), effects), effects


def early_chunk(router, incoming, seq):
    header = (Kind.CHUNK, 0, seq, 0, 0, 1, 0, 1)
    ticket = router.match(incoming, header, 1, [])
    router.arrived(ticket, f"payload {seq}", [])


def receiver():
    router, incoming = Router(1), Incoming(0)
    router.define_key(incoming, (Kind.KEY, 0, PAIR.id, "x", 0), [])
    router.define_signature(incoming, 0, list(SIGNATURE), [])
    return router, incoming


def test_early_chunks_of_numbers_left_out_are_dropped_and_their_credit_is_owed():
    router, incoming = receiver()
    for seq in range(3):
        early_chunk(router, incoming, seq)
    collective, effects = posted(router, seq=2)
    assert collective.seq == 2
    assert [effect[1] for effect in effects if effect[0] == Tell.DROPPED] == ["payload 0", "payload 1"]
    assert not router.names.find(PAIR.id, "x").early
    assert incoming.window.owed_headers == 3


def test_aborts_of_numbers_left_out_are_forgotten():
    router, _ = receiver()
    for seq in range(3):
        router.on_abort(PAIR.id, "x", seq, CAUSE, [])
    effects = []
    router.refuse(PAIR, "x", "no", effects, seq=1)
    assert [effect[1:4] for effect in effects if effect[0] == Tell.FLOOD] == [(PAIR.id, "x", 1)]
    assert list(router.dead) == [(PAIR.id, "x", 2)]
    assert posted(router)[0] == CAUSE
    assert not router.dead


def test_numbers_are_left_out_without_a_post():
    router, incoming = receiver()
    for seq in (0, 2, 5):
        early_chunk(router, incoming, seq)
    effects = []
    router.leave_out(PAIR, "x", 4, effects)
    assert [effect[:2] for effect in effects] == [(Tell.DROPPED, "payload 0"), (Tell.DROPPED, "payload 2")]
    assert list(router.names.find(PAIR.id, "x").early) == [5]
    assert router.num_uses(PAIR.id, "x") == 4
    header = (Kind.CHUNK, 0, 3, 0, 0, 1, 0, 1)
    assert router.match(incoming, header, 1, []) is None  # what comes now is too late
    assert incoming.window.owed_headers == 3


def test_numbers_that_were_used_are_not_left_out():
    router, _ = receiver()
    collective, _ = posted(router, seq=3)
    router.leave_out(PAIR, "x", 2, [])
    assert list(router.live) == [collective]
    assert router.num_uses(PAIR.id, "x") == 4


def test_very_many_numbers_are_left_out_by_what_is_known_of_them():
    router, incoming = receiver()
    early_chunk(router, incoming, 7)
    other = GroupView(b"other", (0, 1), 1)
    for group, name, seq in [(PAIR, "x", 1 << 39), (PAIR, "x", 1 << 40), (PAIR, "y", 0), (other, "x", 1)]:
        router.on_abort(group.id, name, seq, CAUSE, [])
    collective, effects = posted(router, seq=(1 << 40) + 1)
    assert isinstance(collective, Collective)
    assert collective.seq == (1 << 40) + 1
    assert [effect[1] for effect in effects if effect[0] == Tell.DROPPED] == ["payload 7"]
    assert list(router.dead) == [(PAIR.id, "y", 0), (other.id, "x", 1)]
