from __future__ import annotations

from collections import defaultdict, deque

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core.frame import MAX_HEADER_NBYTES, Kind, decode_header
from kfcomm.core.gossip import (
    EVERYBODY,
    MAX_GROUP_NBYTES,
    MAX_NAMED_RANKS,
    MAX_QUERY_OPS,
    MAX_RECENT,
    MAX_TEXT_NBYTES,
    MAX_WAYS,
    WINDOW,
    Body,
    Effect,
    Gossip,
    batches,
    clip,
    dials,
    ring_neighbours,
)
from kfcomm.errors import LocalProtocolError

CAUSE = ["timeout", 0, "too late", [0], []]
ABORT = [Body.ABORT, b"group", "grad/0", 3, CAUSE]


class World:
    """Gossips joined by links that keep their order; links are served in an order chosen by the test."""

    def __init__(self, size: int, crashed: frozenset[int] = frozenset()) -> None:
        self.ranks = {rank: Gossip(rank, size) for rank in range(size) if rank not in crashed}
        self.wires: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.heard: dict[int, list[tuple]] = defaultdict(list)
        self.left: dict[int, list[int]] = defaultdict(list)

    def link(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            self.carry_out(here, self.ranks[here].neighbour_joined(there))

    def link_neighbours(self) -> None:
        for rank, gossip in self.ranks.items():
            for other in gossip.neighbours:
                if other in self.ranks and gossip.is_dialler(other):
                    self.link(rank, other)

    def flood(self, rank: int, body: list) -> int:
        number, effects = self.ranks[rank].flood(body)
        self.carry_out(rank, effects)
        return number

    def leave(self, rank: int) -> None:
        self.ranks[rank].leave()
        self.say_left(rank)

    def say_left(self, rank: int) -> list[tuple]:
        effects = self.ranks[rank].say_left()
        self.carry_out(rank, effects)
        return effects

    def carry_out(self, rank: int, effects: list[tuple]) -> None:
        for tag, *fields in effects:
            if tag == Effect.SEND:
                other, header = fields
                if other in self.ranks:
                    self.wires[rank, other].append(msgpack.packb(header))
            else:
                assert tag == Effect.DELIVER
                self.hear(rank, *fields)

    def hear(self, rank: int, origin: int, number: int, body: list) -> None:
        self.heard[rank].append((origin, number, body[0]))
        if body[0] == Body.LEAVING:
            self.left[rank].extend(body[1])
        if body[0] == Body.QUERY and body[1] in (EVERYBODY, rank):
            posted = [bool(seq % 2) for _, _, seq in body[2]]
            self.carry_out(rank, self.ranks[rank].answer(origin, number, posted, f"rank {rank}"))

    def run(self, choose) -> None:
        while busy := sorted(wire for wire, frames in self.wires.items() if frames):
            source, target = choose(busy)
            header = decode_header(self.wires[source, target].popleft())
            self.carry_out(target, self.ranks[target].receive(source, header))

    def component(self, rank: int) -> set[int]:
        found, todo = {rank}, [rank]
        while todo:
            fresh = set(self.ranks[todo.pop()].linked) - found
            found |= fresh
            todo.extend(fresh)
        return found


def first(busy):
    return busy[0]


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 64))
    crashed = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    return size, frozenset(crashed)


@settings(max_examples=25)
@given(worlds(), st.data(), st.randoms(use_true_random=False))
def test_each_flood_reaches_every_connected_rank_exactly_once(world, data, random):
    size, crashed = world
    net = World(size, crashed)
    net.link_neighbours()
    origins = data.draw(st.lists(st.sampled_from(sorted(net.ranks)), min_size=1, max_size=4))
    floods = [(origin, net.flood(origin, ABORT)) for origin in origins]
    net.run(random.choice)
    for rank in net.ranks:
        expected = [flood for flood in floods if flood[0] != rank and flood[0] in net.component(rank)]
        assert sorted((origin, number) for origin, number, _ in net.heard[rank]) == sorted(expected)


@settings(max_examples=25)
@given(worlds(), st.data(), st.randoms(use_true_random=False))
def test_answers_find_the_one_who_asked(world, data, random):
    size, crashed = world
    net = World(size, crashed)
    net.link_neighbours()
    origin = data.draw(st.sampled_from(sorted(net.ranks)))
    number = net.flood(origin, [Body.QUERY, EVERYBODY, [[b"g", "a", 1], [b"g", "b", 2]]])
    net.run(random.choice)
    answers = [entry for entry in net.heard[origin] if entry[2] == Body.STATUS]
    assert answers == [(origin, number, Body.STATUS)] * (len(net.component(origin)) - 1)
    assert not [entry for rank in net.ranks if rank != origin for entry in net.heard[rank] if entry[2] == Body.STATUS]


@settings(max_examples=25)
@given(st.integers(2, 24), st.data(), st.randoms(use_true_random=False))
def test_the_survivors_of_any_crashes_find_each_other_again(size, data, random):
    """Every rank acts only on what it sees: its own links breaking, a dialled rank that is gone, and gossip."""
    net = World(size)
    net.link_neighbours()
    crashed = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    for rank in crashed:
        del net.ranks[rank]
    for wire in [wire for wire in net.wires if crashed.intersection(wire)]:
        del net.wires[wire]
    for rank, gossip in net.ranks.items():
        for other in crashed.intersection(gossip.linked):
            gossip.neighbour_lost(other)
            net.flood(rank, [Body.LOST, other, "gone", True])
    for _ in range(size):
        net.run(random.choice)
        for rank, gossip in net.ranks.items():
            for other in gossip.missing:
                if other in net.ranks:
                    net.link(rank, other)
                else:
                    net.flood(rank, [Body.LOST, other, "nobody listens", False])
    net.run(random.choice)
    for rank, gossip in net.ranks.items():
        assert net.component(rank) == set(net.ranks)
        assert gossip.living == tuple(sorted(net.ranks))


@given(st.integers(1, 200))
def test_neighbours_are_few_mutual_and_dialled_by_one_side(size):
    living = range(size)
    for rank in (0, size // 2, size - 1):
        near = ring_neighbours(rank, living)
        assert rank not in near
        assert len(near) <= 2 * max(size - 1, 0).bit_length()
        for other in near:
            assert rank in ring_neighbours(other, living)
            assert dials(rank, other, living) != dials(other, rank, living)


def test_neighbours_of_eight():
    assert Gossip(0, 8).neighbours == (1, 2, 4, 6, 7)
    assert dialled(Gossip(0, 8)) == (1, 2, 4)
    assert dialled(Gossip(4, 8)) == (5, 6)
    assert Gossip(0, 1).neighbours == ()


def dialled(gossip):
    return tuple(rank for rank in gossip.missing if gossip.is_dialler(rank))


def test_a_link_that_comes_up_late_brings_the_news():
    net = World(3)
    net.flood(0, ABORT)
    net.flood(0, [Body.LOST, 2, "gone", False])
    net.leave(0)
    net.link(0, 1)
    net.run(first)
    assert net.heard[1] == [(0, 0, Body.LEAVING), (0, 1, Body.LOST), (0, 0, Body.ABORT)]
    assert net.ranks[1].living == (1,)
    assert net.ranks[0].living == (0, 1)
    net.link(0, 1)
    net.run(first)
    assert len(net.heard[1]) == 3


def test_late_link_reports_gone_ranks_after_many_floods():
    gossip = Gossip(0, 4)
    gossip.flood([Body.LOST, 3, "gone", False])
    for _ in range(2 * MAX_RECENT):
        gossip.flood(ABORT)
    told = gossip.neighbour_joined(1)
    assert len(told) == 1 + MAX_RECENT
    assert told[0] == (Effect.SEND, 1, (Kind.GOSSIP, 0, 0, [Body.LOST, 3, "gone", False]))


def test_end_of_lost_process_is_reported():
    gossip = Gossip(0, 4)
    for has_ended in (False, True, False):
        gossip.flood([Body.LOST, 3, "gone", has_ended])
    assert [effect[2][3][3] for effect in gossip.neighbour_joined(1)] == [True]


def test_of_an_agreement_the_latest_of_each_kind_is_told():
    gossip = Gossip(0, 4)
    for number in range(3):
        gossip.flood([Body.AGREE, number, [0, b"part"]])
        gossip.flood([Body.AGREE, number, [4, number]])
    for _ in range(2 * MAX_RECENT):
        gossip.flood(ABORT)
    told = [effect[2][3] for effect in gossip.neighbour_joined(1)]
    assert told[:2] == [[Body.AGREE, 2, [0, b"part"]], [Body.AGREE, 2, [4, 2]]]
    assert len(told) == 2 + MAX_RECENT


@settings(max_examples=25)
@given(worlds(), st.data(), st.randoms(use_true_random=False))
def test_each_leaving_rank_is_reported_once_to_every_connected_rank(world, data, random):
    size, crashed = world
    net = World(size, crashed)
    net.link_neighbours()
    leavers = data.draw(st.sets(st.sampled_from(sorted(net.ranks)), min_size=1))
    for rank in leavers:
        net.leave(rank)
    said = True
    while said:
        net.run(random.choice)
        said = [effects for rank in net.ranks if (effects := net.say_left(rank))]
    for rank, gossip in net.ranks.items():
        heard = leavers & net.component(rank) - {rank}
        assert sorted(net.left[rank]) == sorted(heard)
        assert gossip.living == tuple(one for one in range(size) if one == rank or one not in heard)


@pytest.mark.parametrize("size", [2, 8, 13, 64, 100])
def test_ranks_that_leave_at_once_hear_of_each_other_in_log_rounds(size):
    net = World(size)
    net.link_neighbours()
    for gossip in net.ranks.values():
        gossip.leave()
    num_links = sum(len(gossip.linked) for gossip in net.ranks.values())
    rounds = (size - 1).bit_length()
    for _ in range(rounds):
        sent = sum(len(net.say_left(rank)) for rank in net.ranks)
        assert sent <= num_links
        net.run(first)
    assert all(gossip.living == (rank,) for rank, gossip in net.ranks.items())


def test_many_leaving_ranks_take_several_messages():
    gossip = Gossip(0, 3000)
    gossip.neighbour_joined(1)
    gossip.neighbour_joined(2)
    for first_rank in (1, 1001):
        gossip.receive(2, [Kind.GOSSIP, 2, 0, [Body.LEAVING, list(range(first_rank, first_rank + 1000))]])
    effects = gossip.say_left()
    assert [len(effect[2][3][1]) for effect in effects] == [1024, 976]
    assert {effect[1] for effect in effects} == {1}


def test_leaving_ranks_are_reported_before_a_later_flood():
    gossip = Gossip(0, 4)
    gossip.neighbour_joined(1)
    gossip.neighbour_joined(2)
    assert gossip.receive(2, [Kind.GOSSIP, 2, 0, [Body.LEAVING, [2]]]) == [(Effect.DELIVER, 2, 0, [Body.LEAVING, [2]])]
    assert gossip.receive(1, [Kind.GOSSIP, 1, 0, [Body.LEAVING, [1, 2]]])[0][3] == [Body.LEAVING, [1]]
    assert gossip.receive(1, [Kind.GOSSIP, 1, 0, [Body.LEAVING, [2]]]) == []
    _, effects = gossip.flood(ABORT)
    assert [(effect[1], effect[2][3][0]) for effect in effects] == [
        (2, Body.LEAVING), (1, Body.ABORT), (2, Body.ABORT)
    ]  # fmt: skip
    assert gossip.say_left() == []


def test_a_broken_link_is_not_used():
    gossip = Gossip(0, 4)
    gossip.neighbour_joined(1)
    gossip.neighbour_joined(3)
    gossip.neighbour_lost(1)
    gossip.neighbour_lost(1)
    assert gossip.linked == (3,)
    assert [effect[1] for effect in gossip.flood(ABORT)[1]] == [3]
    assert gossip.missing == (1, 2)


def test_an_answer_whose_way_is_broken_or_unknown_goes_nowhere():
    gossip = Gossip(0, 4)
    gossip.neighbour_joined(1)
    gossip.receive(1, [Kind.GOSSIP, 2, 7, [Body.QUERY, 0, []]])
    assert gossip.answer(2, 7, [], "idle") == [(Effect.SEND, 1, (Kind.GOSSIP, 2, 7, [Body.STATUS, 0, [], "idle"]))]
    assert gossip.answer(2, 8, [], "idle") == []
    gossip.neighbour_lost(1)
    assert gossip.answer(2, 7, [], "idle") == []


def test_a_rank_can_answer_itself():
    gossip = Gossip(0, 1)
    number, effects = gossip.flood([Body.QUERY, 0, []])
    assert effects == []
    assert gossip.answer(0, number, [], "idle") == [(Effect.DELIVER, 0, number, [Body.STATUS, 0, [], "idle"])]


@given(st.lists(st.integers(0, 3 * WINDOW)))
def test_numbers_are_new_once_and_memory_is_bounded(numbers):
    gossip = Gossip(0, 2)
    met: set[int] = set()
    for number in numbers:
        new = bool(gossip.receive(1, [Kind.GOSSIP, 1, number, ABORT]))
        assert not new or number not in met
        assert new or number in met or number <= max(met) - WINDOW
        met.add(number)
        assert len(gossip._seen[1].above) <= WINDOW


def test_ways_of_old_queries_are_forgotten():
    gossip = Gossip(0, 2)
    gossip.neighbour_joined(1)
    for number in range(MAX_WAYS + 1):
        gossip.receive(1, [Kind.GOSSIP, 1, number, [Body.QUERY, 0, []]])
    assert gossip.answer(1, 0, [], "") == []
    assert gossip.answer(1, 1, [], "") != []


BAD = {
    "origin outside": (4, ABORT),
    "nothing": (1, []),
    "tag of another type": (1, ["ABORT"]),
    "tag that is true": (1, [True, b"", "", 0, CAUSE]),
    "unknown tag": (1, [9]),
    "too few fields": (1, [Body.ABORT]),
    "group as text": (1, [Body.ABORT, "group", "key", 0, CAUSE]),
    "group too long": (1, [Body.ABORT, bytes(MAX_GROUP_NBYTES + 1), "key", 0, CAUSE]),
    "key too long": (1, [Body.ABORT, b"", "x" * (MAX_TEXT_NBYTES + 1), 0, CAUSE]),
    "seq negative": (1, [Body.ABORT, b"", "key", -1, CAUSE]),
    "seq huge": (1, [Body.ABORT, b"", "key", 1 << 63, CAUSE]),
    "seq that is true": (1, [Body.ABORT, b"", "key", True, CAUSE]),
    "cause missing": (1, [Body.ABORT, b"", "key", 0, None]),
    "cause too short": (1, [Body.ABORT, b"", "key", 0, []]),
    "cause names an unknown rank": (1, [Body.ABORT, b"", "key", 0, ["timeout", 4, "", [], []]]),
    "cause with unknown ranks": (1, [Body.ABORT, b"", "key", 0, ["timeout", 1, "", [4], []]]),
    "cause with a crowd": (1, [Body.ABORT, b"", "key", 0, ["timeout", 1, "", [], [0] * (MAX_NAMED_RANKS + 1)]]),
    "cause without list": (1, [Body.ABORT, b"", "key", 0, ["timeout", 1, "", {}, []]]),
    "lost stranger": (1, [Body.LOST, 4, "gone", False]),
    "lost nobody": (1, [Body.LOST, -1, "gone", False]),
    "lost, and no more": (1, [Body.LOST, 1, "gone"]),
    "lost for a number of reasons": (1, [Body.LOST, 1, "gone", 1]),
    "an agreement on nothing": (1, [Body.AGREE, 1, []]),
    "an agreement in words": (1, [Body.AGREE, 1, "all right"]),
    "lost without reason": (1, [Body.LOST, 1, None, False]),
    "leaving rank outside": (1, [Body.LEAVING, [4]]),
    "leaving alone": (1, [Body.LEAVING, 1]),
    "release outside": (1, [Body.RELEASE, [4]]),
    "query to an unknown rank": (1, [Body.QUERY, 4, []]),
    "query without list": (1, [Body.QUERY, 0, None]),
    "query too long": (1, [Body.QUERY, 0, [[b"", "", 0]] * (MAX_QUERY_OPS + 1)]),
    "query with half an op": (1, [Body.QUERY, 0, [[b"", ""]]]),
    "query with no op": (1, [Body.QUERY, 0, ["abc"]]),
    "status of an unknown rank": (1, [Body.STATUS, 4, [], ""]),
    "status without list": (1, [Body.STATUS, 0, None, ""]),
    "status with numbers": (1, [Body.STATUS, 0, [1], ""]),
    "status too long": (1, [Body.STATUS, 0, [True] * (MAX_QUERY_OPS + 1), ""]),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_message_fails_that_neighbour_alone(name):
    origin, body = BAD[name]
    gossip = Gossip(0, 4)
    gossip.neighbour_joined(2)
    (effect,) = gossip.receive(1, [Kind.GOSSIP, origin, 0, body])
    assert effect[:2] == (Effect.FAIL, 1)
    assert effect[2]
    if origin < 4:
        with pytest.raises(LocalProtocolError):
            Gossip(origin, 4).flood(body)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=20))
def test_no_body_raises(body):
    gossip = Gossip(0, 4)
    effects = gossip.receive(1, [Kind.GOSSIP, 1, 0, body if isinstance(body, list) else [body]])
    assert {effect[0] for effect in effects} <= {Effect.FAIL, Effect.DELIVER}


def test_misuse_raises():
    with pytest.raises(LocalProtocolError):
        Gossip(2, 2)
    gossip = Gossip(0, 2)
    for rank in (-1, 0, 2):
        with pytest.raises(LocalProtocolError):
            gossip.neighbour_joined(rank)
    with pytest.raises(LocalProtocolError, match="answer"):
        gossip.flood([Body.STATUS, 0, [], ""])
    with pytest.raises(LocalProtocolError, match="leave"):
        gossip.flood([Body.LEAVING, [0]])


@given(
    st.lists(st.tuples(st.binary(max_size=MAX_GROUP_NBYTES), st.text(max_size=1024), st.integers(0, 9)), max_size=200)
)
def test_batches_keep_all_ops_in_order_and_fit_a_frame(ops):
    parts = batches(ops)
    assert [tuple(op) for part in parts for op in part] == ops
    gossip = Gossip(0, 2)
    for part in parts:
        number, _ = gossip.flood([Body.QUERY, 1, part])
        assert len(msgpack.packb([Kind.GOSSIP, 0, number, [Body.QUERY, 1, part]])) <= MAX_HEADER_NBYTES


def test_batches_of_long_names():
    ops = [(b"g", "x" * MAX_TEXT_NBYTES, seq) for seq in range(20)]
    assert [len(part) for part in batches(ops)] == [7, 7, 6]
    assert [len(part) for part in batches([(b"g", "x", 0)] * 130)] == [64, 64, 2]
    assert batches([]) == [[]]


@given(st.text(), st.integers(0, 30))
def test_clip_bounds_bytes(text, nbytes):
    clipped = clip(text, nbytes)
    assert len(clipped.encode()) <= nbytes
    assert text.startswith(clipped)


def test_clip_replaces_what_utf8_cannot_say():
    assert clip("a\ud800b") == "a?b"
