"""A router whose peers break the rules: their link is blamed, and nothing else is harmed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core import router as routers
from kfcomm.core.calls import Tell
from kfcomm.core.frame import MAX_ID, SCHEMA, Kind
from kfcomm.core.links import Credit, Early, Incoming, ReceiveWindow
from kfcomm.core.machine import DOWN, UP, Do
from kfcomm.core.names import MAX_SIGNATURES
from kfcomm.types import Verb
from tests.core import specs
from tests.core.desk import NBYTES, SUM, Desk, listed, primed_desk
from tests.core.specs import ITEM, Spec
from tests.core.world import Memory, Weather, World


def posted_desk():
    desk = Desk()
    desk.post()
    desk.define(1)
    desk.define(4)
    desk.take()
    return desk


@pytest.mark.parametrize("way", ["match", "whole", "like another"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"number": 3}, "a chunk under a number that was never defined"),
        ({"lane": 1}, "a chunk of 'grad' that does not belong there"),
        ({"lane": MAX_ID}, "a chunk of 'grad' that does not belong there"),
        ({"index": 1}, "a chunk of 'grad' that does not belong there"),
        ({"phase": DOWN}, "a chunk of 'grad' that does not belong there"),
        ({"phase": 7}, "a chunk of 'grad' that does not belong there"),
        ({"nbytes": 0}, "a chunk of 'grad' of 0 bytes"),
        ({"nbytes": NBYTES + 1}, f"a chunk of 'grad' of {NBYTES + 1} bytes"),
        ({"seq": 2}, "a chunk of 'grad', which is not posted, without credit"),
        ({"charged": 1, "nbytes": 1001}, "more chunks than it had credit for"),
    ],
)
def test_a_chunk_that_breaks_a_rule_breaks_its_link_only(way, fields, reason):
    if way == "like another":
        desk = primed_desk()
        fields = {"seq": 1} | fields
    else:
        desk = posted_desk()
    live = list(desk.router.live)
    assert (desk.match if way == "match" else desk.whole)(1, **fields) is None
    assert desk.reasons() == [reason]
    assert list(desk.router.live) == live


@pytest.mark.parametrize("charged", [0, 1])
def test_a_chunk_is_taken_at_once_and_owes_its_credit_back(charged):
    desk = posted_desk()
    (collective,) = desk.router.live
    assert desk.whole(1, "x", charged=charged) is collective
    assert [effect[4] for effect in desk.take(Do.FOLD, Do.FOLD_UP, Do.FOLD_LAST)] == ["x"]
    assert collective.missing_ranks() == (2,)
    window = desk.incoming[1].window
    window.matched(1000)  # enough to be worth an answer
    assert window.settle() == Credit(1000 + charged * NBYTES, 1 + charged)


def test_a_chunk_beyond_the_credit_breaks_its_link():
    desk = posted_desk()
    desk.incoming[1].window = ReceiveWindow(Credit(NBYTES - 1, 10))
    assert desk.whole(1, charged=1) is None
    assert desk.reasons() == ["more chunks than it had credit for"]


def test_a_whole_chunk_that_came_early_is_kept():
    desk = Desk()
    desk.define(1)
    assert type(desk.whole(1, "x", charged=1)) is Early
    desk.post()
    assert [effect[4] for effect in desk.take(Do.FOLD)] == ["x"]


def test_a_chunk_comes_once():
    desk = posted_desk()
    desk.chunk(1, "x")
    assert desk.chunk(1, "x") is None
    assert desk.reasons() == ["a chunk of 'grad' that does not belong there"]


def test_a_chunk_that_comes_on_two_links_at_a_time_counts_once():
    desk = posted_desk()
    first = desk.match(1)
    desk.incoming[1] = Incoming(1)
    desk.define(1)
    desk.chunk(1, "x")
    desk.take()
    desk.router.arrived(first, "again", desk.effects)
    assert [(effect[0], effect[2]) for effect in desk.take()] == [(Do.RELEASE, "again")]


def test_a_rank_outside_the_group_is_not_taken_for_the_source_that_a_root_lacks():
    broadcast = replace(SUM, verb=Verb.BROADCAST, name="b")
    desk = posted_desk()
    desk.post(broadcast)
    desk.define(4, broadcast, number=1)
    for phase, lane in ((UP, 0), (DOWN, 0), (UP, 1), (DOWN, 1)):
        assert desk.whole(4, number=1, lane=lane, phase=phase) is None
        assert desk.reasons() == ["a chunk of 'b', where it takes no part"]


@pytest.mark.parametrize("spec", [SUM, replace(SUM, generation=1), replace(SUM, verb=Verb.BROADCAST)])
def test_a_rank_outside_the_group_neither_sends_nor_asks_nor_disagrees(spec):
    broadcast = replace(SUM, verb=Verb.BROADCAST, name="b")
    desk = posted_desk()
    desk.post(broadcast)
    desk.define(4, spec)
    desk.define(4, replace(spec, name="b"), number=1)
    for phase in (UP, DOWN):
        assert desk.match(4, phase=phase, generation=spec.generation) is None
        assert desk.match(4, number=1, lane=1, phase=phase, generation=spec.generation) is None
    desk.ask(4, generation=spec.generation)
    reasons = desk.reasons()
    assert len(reasons) == 5
    assert all("where it takes no part" in reason for reason in reasons)
    assert len(desk.router.live) == 2


def test_a_rank_outside_the_group_that_was_early_is_found_out_late():
    desk = Desk()
    desk.define(4)
    desk.chunk(4, "x", charged=1)
    desk.ask(4)
    desk.post()
    assert [effect[0] for effect in desk.take()] == [Tell.EARLY, Tell.VIOLATION, Tell.VIOLATION, Tell.DROPPED]
    assert len(desk.router.live) == 1


def test_undefined_and_impossible_numbers():
    desk = Desk()
    desk.ask(1)
    desk.router.define_key(desk.incoming[1], (Kind.KEY, MAX_ID, b"group", "name", 0), desk.effects)
    desk.router.define_signature(desk.incoming[1], MAX_SIGNATURES, ["barrier"], desk.effects)
    assert desk.reasons() == [
        "a question under a number that was never defined",
        f"key number {MAX_ID}",
        f"signature number {MAX_SIGNATURES}",
    ]


def test_signatures_are_made_of_plain_values():
    desk = Desk()
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for fields in ([{"a": 1}], [[{}]], deep):
        desk.router.define_signature(desk.incoming[1], 0, fields, desk.effects)
    assert desk.reasons() == ["a signature that is not made of plain values"] * 3


def test_questions_are_bounded(monkeypatch):
    monkeypatch.setattr(routers, "MAX_ASKS", 3)
    desk = Desk()
    desk.define(1)
    for seq in range(5):
        desk.ask(1, seq)
    assert desk.reasons() == ["too many questions"] * 2


def test_more_early_chunks_than_credit():
    desk = Desk()
    desk.define(1)
    for index in range(11):
        desk.chunk(1, "x", index=index, charged=1)
    assert desk.reasons() == ["more chunks than it had credit for"]


# ---------------------------------------------------------------- hostile peers, in a world


def junk(rnd: random.Random, depth: int = 0):
    """Values that a header can carry."""
    kind = rnd.randrange(7 if depth < 3 else 6)
    if kind == 6:
        return [junk(rnd, depth + 1) for _ in range(rnd.randrange(4))]
    return (None, True, rnd.randrange(-5, 2**63), rnd.random(), "x" * rnd.randrange(50), b"\0")[kind]


def hostile(rnd: random.Random, keys: list[Spec], victim: int) -> tuple[list, int]:
    """A header of the right types, and the size of its payload. Many would be right, coming from another rank."""
    place = rnd.randrange(len(keys))
    other = rnd.randrange(len(keys)) if rnd.random() < 0.1 else place
    huge = rnd.randrange(2**63)
    match rnd.choice([Kind.CHUNK] * 12 + [Kind.ASK, Kind.KEY, Kind.SIGNATURE] * 2 + [Kind.OPEN]):
        case Kind.CHUNK:
            header, nbytes = _chunk_for(rnd, keys[place], victim)
            header[1], header[3] = place, other
            if rnd.random() < 0.3:
                header[rnd.randrange(1, 8)] = rnd.choice([0, 1, 2, huge])
            return header, rnd.choice([nbytes] * 8 + [0, 4, 2000])
        case Kind.ASK:
            return [Kind.ASK, place, rnd.choice([0, 0, 1, huge]), other, rnd.choice([0, 0, 0, 1, huge])], 0
        case Kind.KEY:
            name = rnd.choice([keys[place].name, keys[place].name, "", "x" * 100])
            below = rnd.choice([0, 0, 1, huge])
            return [Kind.KEY, rnd.choice([place, place, huge]), keys[other].group_id, name, below], 0
        case Kind.OPEN:
            return [Kind.OPEN, rnd.choice([0, 1, 2, huge])], 0
        case _:
            fields = listed(keys[other].signature)
            if rnd.random() < 0.2:
                fields = [junk(rnd) for _ in range(rnd.randrange(12))]
            return [Kind.SIGNATURE, rnd.choice([place, place, place, huge]), fields], 0


def _chunk_for(rnd: random.Random, key: Spec, victim: int) -> tuple[list, int]:
    """A chunk that a rank waits for in this collective, or waited for."""
    if victim not in key.members:
        return [Kind.CHUNK, 0, 0, 0, 0, UP, 0, 1], 4
    lane = rnd.choice(list(key.program(key.members.index(victim)).lanes.values()))
    index = rnd.randrange(lane.num_chunks)
    nbytes = min(key.chunk, lane.count - index * key.chunk) * ITEM.itemsize
    phase = rnd.choice([UP, DOWN] if lane.up and lane.down else [DOWN if lane.down else UP])
    return [Kind.CHUNK, 0, 0, 0, lane.number, phase, index, rnd.choice([0, 1, 1])], nbytes


@settings(max_examples=60)
@given(
    size=st.integers(2, 6),
    seed=st.integers(0, 2**32 - 1),
    order=st.sampled_from(Weather.ORDERS),
    credit=st.sampled_from([Credit(0, 0), Credit(200, 8), Credit(100_000, 10_000)]),
)
def test_a_hostile_peer_never_raises_and_harms_only_what_it_takes_part_in(size, seed, order, credit):
    rnd = random.Random(seed)
    world = World(size, Weather(seed=seed, order=order, credit=credit))
    villain = rnd.randrange(size)
    keys = []
    for number in range(8):
        members = tuple(rnd.sample(range(size), rnd.randint(1, size)))
        keys.append(specs.spec(rnd, f"key{number}", members, largest=8))
    world.plan_all([key] for key in keys)
    known = set()
    for _ in range(80):
        victim = rnd.choice([rank for rank in range(size) if rank != villain])
        wire = world.wire(villain, victim)
        if wire not in known:
            known.add(wire)
            for number, key in enumerate(keys):
                world.send(wire, [Kind.KEY, number, key.group_id, key.name, 0])
                world.send(wire, [Kind.SIGNATURE, number, listed(key.signature)])
        header, nbytes = hostile(rnd, keys, victim)
        assert all(type(field) is kind for field, kind in zip(header[1:], SCHEMA[header[0]], strict=True))
        world.send(wire, header, np.zeros(nbytes // 4, ITEM) if nbytes else None)
        world.run(steps=rnd.randrange(30))
    world.run()
    # A lie may make an honest rank break a rule of a collective that the villain is in; then that link is blamed.
    blamed = {frozenset((incoming.peer, world.receiver(incoming))) for incoming, _ in world.violations}
    for link in blamed:
        assert any(link | {villain} <= set(key.members) for key in keys) or villain in link
    world.check_done(
        key for key in keys if villain not in key.members and not any(link <= set(key.members) for link in blamed)
    )
    for key in keys:
        for outcome in world.outcomes(key):
            if isinstance(outcome, Memory) and not outcome.done:
                world.abort(key.members[outcome.rank], key, 0)
    world.run()
    for node in world.nodes:
        assert not node.router.live
