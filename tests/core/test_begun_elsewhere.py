"""A use that is under way elsewhere: the router knows of it as soon as somebody asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kfcomm.core import names
from kfcomm.core.calls import Tell
from kfcomm.core.collective import Collective
from kfcomm.core.frame import Kind
from kfcomm.core.machine import UP, EffectRecorder
from tests.core.desk import NBYTES, SUM, TIMEOUT, Desk


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


def test_a_question_is_answered():
    desk, use = begun()
    desk.router.on_ask(desk.incoming[1], (Kind.ASK, 0, 0, 0, 0), desk.effects)
    assert [effect[0] for effect in desk.take()] == [Tell.ANSWER]
    assert use.is_known


def test_an_abort_ends_it():
    desk, use = begun()
    desk.router.on_abort(SUM.group_id, SUM.name, 0, TIMEOUT, desk.effects)
    assert desk.take() == [(Tell.FAILED, use.collective, TIMEOUT)]


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
