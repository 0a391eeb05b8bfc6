"""Consensus on survivors, in every order of messages and deaths up to a bound, and the failure detector."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core import membership
from kfcomm.core.membership import (
    LONGEST_INTERVAL_S,
    MAX_PART_NBYTES,
    EpochDecision,
    FailureDetector,
    Tag,
    fault,
    from_wire,
    to_wire,
)

Action = tuple[Any, ...]
BY_CHANCE = ("die", "suspect", "leave")
"""What need not happen."""


@dataclass
class World:
    """The decisions of all ranks, joined by links that keep their order and lose the end of what a rank says on dying.

    A falsely suspected rank continues until it hears that the others count it as lost. A rank that knows the decision
    may leave: the others hear that after its earlier messages, and it hears nothing more.
    """

    size: int
    deaths: int
    suspicions: int
    leaves: int = 0
    ranks: list[EpochDecision] = field(default_factory=list)
    links: dict[tuple[int, int], list[list[Any]]] = field(default_factory=dict)
    news: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    suspected: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ranks = [EpochDecision(rank, self.size) for rank in range(self.size)]
        self.links = {(one, other): [] for one in range(self.size) for other in range(self.size) if one != other}
        self.news = {rank: [] for rank in range(self.size)}

    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead | self.left]

    def actions(self) -> Iterator[Action]:
        for rank in self.living():
            if rank not in self.entered:
                yield "enter", rank
            if self.news[rank]:
                yield "news", rank
            if self.deaths and len(self.living()) > 1:
                yield from (("die", rank, lost) for lost in (0, 1, 2))
            if self.suspicions and len(self.living()) > 1:
                yield "suspect", rank
            if self.leaves and self.ranks[rank].value is not None:
                yield "leave", rank
        for (source, target), frames in self.links.items():
            if frames and target not in self.dead | self.left:
                yield "receive", source, target

    def do(self, action: Action) -> None:
        what, rank, *more = action
        getattr(self, what)(rank, *more)

    def say(self, rank: int, messages: list[membership.Message]) -> None:
        for message in messages:
            fields = to_wire(message)
            assert not fault(fields, self.size)
            for other in range(self.size):
                if other != rank:
                    self.links[rank, other].append(fields)

    def enter(self, rank: int) -> None:
        self.entered.add(rank)
        self.say(rank, self.ranks[rank].enter(b"part %d" % rank))

    def receive(self, source: int, target: int) -> None:
        fields = self.links[source, target].pop(0)
        if not fields:
            self.hear(target, source, True)
            return
        message = from_wire(fields)
        self.say(target, self.ranks[target].receive(source, message))

    def hear(self, rank: int, lost: int, has_ended: bool) -> None:
        if lost == rank:
            self.dead.add(rank)
        else:
            self.say(rank, self.ranks[rank].lost([lost], have_ended=has_ended))

    def die(self, rank: int, num_lost: int) -> None:
        """The last that it said, so many messages, is lost on every other link."""
        self.deaths -= 1
        self.dead.add(rank)
        for other in range(self.size):
            if other != rank:
                frames = self.links[rank, other]
                if (other - rank) % 2:
                    del frames[max(0, len(frames) - num_lost) :]
                self.news[other].append((rank, True))

    def leave(self, rank: int) -> None:
        """It says so last of all."""
        self.leaves -= 1
        self.say(rank, self.ranks[rank].leave())
        self.left.add(rank)
        for other in range(self.size):
            if other != rank:
                self.links[rank, other].append([])

    def suspect(self, rank: int) -> None:
        self.suspicions -= 1
        self.suspected.add(rank)
        for other in range(self.size):
            self.news[other].append((rank, False))

    def check(self) -> None:
        """Check the invariants of any moment."""
        told = [*self.living(), *self.left]
        values = {self.ranks[rank].value for rank in told} - {None}
        assert len(values) <= 1
        for value in values:
            assert value == tuple(sorted(value))
            for rank in told:
                if self.ranks[rank].value is not None and rank not in self.suspected:
                    assert dict(value)[rank] == b"part %d" % rank

    def check_end(self) -> None:
        """Check the invariants of the end, when nothing more can happen."""
        for rank in self.living():
            one = self.ranks[rank]
            assert one.value is not None or one.is_cut_off, f"rank {rank} waits for ever"
            if one.value is None:
                assert self.suspected, "ranks are cut off although no living rank was suspected"


def step(world: World, action: Action) -> None:
    if action[0] == "news":
        rank = action[1]
        world.hear(rank, *world.news[rank].pop(0))
    else:
        world.do(action)


def explore(size: int, deaths: int, suspicions: int, leaves: int, limit: int) -> int:
    """Explore all orders of events, up to so many states; returns their number."""
    first = pickle.dumps(World(size, deaths, suspicions, leaves))
    seen, stack = {first}, [first]
    while stack and len(seen) < limit:
        state = stack.pop()
        world = pickle.loads(state)
        world.check()
        actions = list(world.actions())
        if not [one for one in actions if one[0] not in BY_CHANCE]:
            world.check_end()
        for action in actions:
            then = pickle.loads(state)
            step(then, action)
            after = pickle.dumps(then)
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen)


def walk(seed: int, size: int) -> World:
    """One way through it, at random."""
    random = Random(seed)
    world = World(size, random.randrange(size), random.choice([0, 0, size // 3 + 1]), random.choice([0, size]))
    while actions := list(world.actions()):
        calm = [one for one in actions if one[0] not in BY_CHANCE]
        if not calm:
            world.check_end()
        step(world, random.choice(calm * 3 + actions if calm else actions))
        world.check()
    world.check_end()
    return world


@pytest.mark.parametrize(
    ("size", "deaths", "suspicions", "leaves", "limit"),
    [
        (1, 0, 0, 0, 100),
        (2, 1, 0, 0, 4_000),
        (2, 0, 1, 0, 4_000),
        (2, 1, 0, 1, 4_000),
        (3, 1, 0, 0, 6_000),
        (3, 1, 0, 1, 6_000),
    ],
)
def test_every_order_up_to_a_bound(size: int, deaths: int, suspicions: int, leaves: int, limit: int) -> None:
    assert explore(size, deaths, suspicions, leaves, limit) > size


@given(st.integers(0, 1 << 31), st.integers(1, 6))
def test_many_orders_beyond_it(seed: int, size: int) -> None:
    walk(seed, size)


def half_is_enough(self: EpochDecision, ranks: Any, ended: Any) -> bool:
    return 2 * len(ranks) >= self._size


def nobody_is_waited_for(self: EpochDecision) -> tuple[int, ...]:
    return ()


def decisions_are_not_passed_on(self: EpochDecision, said: Any) -> None:
    """No message follows."""


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("_is_quorum", half_is_enough),
        ("missing", property(nobody_is_waited_for)),
        ("_pass_on", decisions_are_not_passed_on),
    ],
)
def test_the_search_finds_what_is_broken(monkeypatch: pytest.MonkeyPatch, method: str, broken: Any) -> None:
    monkeypatch.setattr(EpochDecision, method, broken)

    def search() -> None:
        for seed in range(30_000):
            walk(seed, 2 + seed % 4)

    with pytest.raises((AssertionError, KeyError)):
        search()


def test_no_decision_before_all_entered_and_missing_is_known() -> None:
    one, two, three = (EpochDecision(rank, 3) for rank in range(3))
    (said,) = one.enter(b"1")
    assert two.receive(0, said) == []
    assert one.missing == (1, 2)
    assert one.value is None
    (said,) = two.enter(b"2")
    assert one.receive(1, said) == []
    proposal, vote = one.lost([2], have_ended=False)
    assert proposal == (Tag.ACCEPT, 0, [], ((0, b"1"), (1, b"2")))
    assert vote == (Tag.ACCEPTED, 0)
    assert two.receive(0, proposal) == [(Tag.ACCEPTED, 0)]
    assert one.receive(1, (Tag.ACCEPTED, 0)) == [(Tag.DECIDED, ((0, b"1"), (1, b"2")))]
    assert one.value == ((0, b"1"), (1, b"2"))
    # who comes too late is told, and takes what the others have decided
    assert one.receive(2, (Tag.PREPARE, 5, [])) == [(Tag.DECIDED, one.value)]
    assert three.receive(0, (Tag.DECIDED, one.value)) == []
    assert three.value == one.value


def test_half_of_the_ranks_are_cut_off_until_the_others_are_known_to_have_ended() -> None:
    one = EpochDecision(0, 2)
    one.enter(b"")
    assert not one.is_cut_off
    assert one.lost([1], have_ended=False) == []
    assert one.is_cut_off
    said = one.lost([1], have_ended=True)
    assert [message[0] for message in said] == [Tag.PREPARE, Tag.PROMISE, Tag.ACCEPT, Tag.ACCEPTED, Tag.DECIDED]
    assert one.value == ((0, b""),)


def test_leaving_rank_repeats_decision_shared_with_dying_one() -> None:
    one, two, three = (EpochDecision(rank, 3) for rank in range(3))
    entered = [rank.enter(b"")[0] for rank in (one, two, three)]
    for rank in (1, 2):
        said = one.receive(rank, entered[rank])
        three.receive(2 - rank, entered[2 - rank])
        two.receive(2 * rank - 2, entered[2 * rank - 2])
    for message in said:  # to the third alone: then the first dies
        three.receive(0, message)
    assert three.value is not None
    for message in three.leave():
        two.receive(2, message)
    two.lost([2], have_ended=True)
    two.lost([0], have_ended=True)
    assert two.value == three.value


def test_a_vote_for_what_is_not_known_yet_counts_when_it_is() -> None:
    two = EpochDecision(1, 3)
    two.enter(b"")
    assert two.receive(2, (Tag.ACCEPTED, 0)) == []
    assert two.receive(0, (Tag.ACCEPT, 0, [], ((0, b""), (1, b""), (2, b"")))) == [(Tag.ACCEPTED, 0)]
    assert two.value is not None
    assert two.receive(0, (Tag.ACCEPT, 0, [], ())) == []


def test_leader_proposes_value_that_may_be_decided() -> None:
    two = EpochDecision(1, 3)
    two.enter(b"mine")
    two.receive(2, (Tag.ENTER, b""))
    prepare, own = two.lost([0], have_ended=True)
    assert prepare == (Tag.PREPARE, 4, [0])
    assert own == (Tag.PROMISE, 4, -1, ())
    value = ((0, b""), (1, b"mine"))
    proposal, *_ = two.receive(2, (Tag.PROMISE, 4, 0, value))
    assert proposal == (Tag.ACCEPT, 4, [0], value)
    assert two.receive(0, (Tag.DECIDED, ())) == []  # it has ended: what it says now nobody heard in time
    assert two.value is None


def test_a_late_proposal_and_a_late_promise_are_of_no_account() -> None:
    one = EpochDecision(0, 3)
    one.enter(b"")
    assert one.receive(1, (Tag.PREPARE, 4, [])) == [(Tag.PROMISE, 4, -1, ())]
    assert one.receive(0, (Tag.ACCEPT, 0, [], ())) == []
    assert one.receive(1, (Tag.PREPARE, 1, [])) == []
    assert one.receive(2, (Tag.PROMISE, 9, -1, ())) == []
    assert one.receive(1, (Tag.DECIDED, ((1, b""),))) == []
    assert one.receive(1, (Tag.DECIDED, ((2, b""),))) == []
    assert one.value == ((1, b""),)


GOOD: list[membership.Message] = [
    (Tag.ENTER, b"part"),
    (Tag.PREPARE, 4, [0, 1]),
    (Tag.PROMISE, 4, -1, ()),
    (Tag.PROMISE, 4, 0, ((0, b""), (2, b"x"))),
    (Tag.ACCEPT, 0, [], ((0, b""),)),
    (Tag.ACCEPTED, 3),
    (Tag.DECIDED, ((0, b""),)),
]


@pytest.mark.parametrize("message", GOOD)
def test_messages_travel(message: membership.Message) -> None:
    assert not fault(to_wire(message), 3)
    assert from_wire(to_wire(message)) == message


@pytest.mark.parametrize(
    "fields",
    [
        [], [6], [-1, b""], ["0", b""], [True, b""], [0], [0, "text"], [0, b"x" * (MAX_PART_NBYTES + 1)], [1, 4, [3]],
        [1, 4, [0, 0, 0, 0]], [1, 4, [True]], [1, -2, []], [1, 1 << 62, []], [1, 4, 0], [2, 4, -1, [[0]]],
        [2, 4, -1, [[0, b""], [1, b""], [2, b""], [0, b""]]], [2, 4, -1, [0]], [3, 4, [], [[5, b""]]], [4, None],
        [5, 1], [5, [[0, "text"]]], [4, 1, 1],
    ],
)  # fmt: skip
def test_invalid_message_is_fault(fields: list[Any]) -> None:
    assert fault(fields, 3)


LOST_S = 6.0


def test_peer_that_answers_is_never_lost() -> None:
    detector = FailureDetector(LOST_S)
    detector.watch((1, 2), 0.0)
    now_s = 0.0
    for _ in range(100):
        found = detector.look(now_s)
        assert found.gone == []
        for peer in found.quiet:
            detector.heard(peer, now_s)
        now_s = found.next_s


def test_silent_peer_is_asked_then_lost_in_time() -> None:
    detector = FailureDetector(LOST_S)
    detector.watch((1, 2), 0.5)
    now_s, asked = 0.5, 0
    while not (found := detector.look(now_s)).gone:
        detector.heard(2, now_s)
        asked += 1 in found.quiet
        now_s = found.next_s
    assert found.gone == [(1, LOST_S)]
    assert now_s == 0.5 + LOST_S
    assert asked >= 4
    detector.watch((2,), now_s)
    assert detector.look(now_s).gone == []


def test_time_asleep_does_not_count_as_silence() -> None:
    detector = FailureDetector(LOST_S)
    detector.watch((1,), 0.0)
    next_s = detector.look(0.0).next_s
    found = detector.look(next_s + 1000.0)
    assert found.gone == []
    assert found.quiet == [1]
    while not found.gone:
        found = detector.look(found.next_s)
    assert 1000.0 + LOST_S <= found.next_s <= 1000.0 + 2 * LOST_S


def test_unwatched_peer_is_ignored() -> None:
    detector = FailureDetector(LOST_S)
    detector.heard(3, 0.0)
    detector.watch((), 0.0)
    assert detector.look(100.0) == ([], [], 101.0)


def test_infinite_limit_never_loses_a_peer() -> None:
    detector = FailureDetector(math.inf)
    detector.watch((1,), 0.0)
    assert detector.look(0.0).next_s == LONGEST_INTERVAL_S
    assert detector.look(1e9).gone == []


@given(
    st.floats(0.5, 100.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.booleans()), max_size=60),
)
def test_peer_is_lost_at_its_time_and_not_before(lost_after_s: float, steps: list[tuple[float, bool, bool]]) -> None:
    """Slightly late looks never declare a rank lost early, and no look in time comes after the deadline."""
    detector = FailureDetector(lost_after_s)
    interval_s = min(lost_after_s / 6, LONGEST_INTERVAL_S)
    detector.watch((1,), 0.0)
    heard_s = now_s = 0.0
    for late, hears, rewatches in steps:
        now_s = detector.look(now_s).next_s + late * interval_s * 0.99
        if hears:
            detector.heard(1, now_s)
            heard_s = now_s
        if rewatches:
            detector.watch((0, 1), now_s)
        gone = dict(detector.look(now_s).gone)
        if 1 in gone:
            assert now_s - heard_s >= lost_after_s * (1 - 1e-9)
            return
        assert now_s - heard_s < lost_after_s
