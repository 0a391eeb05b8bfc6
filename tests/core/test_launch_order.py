"""Worlds of launch orders: whatever the order of arrivals, devices that run what is launched never wait in a ring."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.launch_order import (
    ASK,
    FIXED,
    FROZEN,
    LAUNCH,
    LEADER,
    RESUME,
    STUCK,
    TELL,
    TOLD,
    VIOLATION,
    Cycles,
    Mode,
    launch_order,
)

Use = tuple[int, str]
"""Number of a group, and a key."""


class Devices:
    """Ranks with an order for each group, a stream for each on every device, and channels between the ranks."""

    def __init__(self, groups: Sequence[Sequence[int]], seed: int = 0, *, follows: bool = True) -> None:
        self.groups = groups
        self.size = 1 + max(map(max, groups))
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.orders = {
            (number, rank): launch_order(place, len(members), follows=follows)
            for number, members in enumerate(groups)
            for place, rank in enumerate(members)
        }
        self.channels: dict[tuple[int, int, int], deque[Any]] = {}
        self.launched: dict[tuple[int, int], list[tuple[str, int]]] = {where: [] for where in self.orders}
        self.running: dict[tuple[int, int], deque[tuple[str, int]]] = {where: deque() for where in self.orders}
        self.completed: list[Counter[Use]] = [Counter() for _ in range(self.size)]
        self.arrivals: list[Counter[Use]] = [Counter() for _ in range(self.size)]

    def arrive(self, rank: int, use: Use) -> tuple[str, int]:
        effects: list[Any] = []
        number, key = use
        token = (key, self.arrivals[rank][use])
        self.arrivals[rank][use] += 1
        self.orders[number, rank].arrived(key, token, self.now_s, effects)
        self.carry_out(number, rank, effects)
        return token

    def carry_out(self, number: int, rank: int, effects: list[Any]) -> None:
        members = self.groups[number]
        for tag, *fields in effects:
            if tag == LAUNCH:
                self.launched[number, rank].append(fields[0])
                self.running[number, rank].append(fields[0])
            else:
                assert tag == (TELL if rank == members[LEADER] else ASK), (rank, tag, fields)
                for other in members[1:] if tag == TELL else members[:1]:
                    self.channels.setdefault((number, rank, other), deque()).append(fields[0])
        self.run(number)

    def run(self, number: int) -> None:
        """As NCCL does: whatever is first on all members runs as one; it must be the same."""
        queues = [self.running[number, member] for member in self.groups[number]]
        while all(queues):
            firsts = {queue.popleft() for queue in queues}
            assert len(firsts) == 1, f"launched in different orders: {firsts}"
            for member in self.groups[number]:
                self.completed[member][number, firsts.copy().pop()[0]] += 1

    def deliver(self) -> bool:
        """One message, from any channel that has one."""
        ready = [way for way, queue in self.channels.items() if queue]
        if not ready:
            return False
        number, sender, target = way = self.random.choice(ready)
        effects: list[Any] = []
        order = self.orders[number, target]
        order.received(self.groups[number].index(sender), self.channels[way].popleft(), self.now_s, effects)
        self.carry_out(number, target, effects)
        return True

    def settle(self) -> None:
        """Until nothing is under way and nothing is due."""
        for _ in range(10_000):
            if self.deliver():
                continue
            due = [order.deadline_s() for order in self.orders.values()]
            waits = [one for one in due if one is not None]
            if not waits:
                return
            self.now_s = min(waits)
            for where, order in self.orders.items():
                effects: list[Any] = []
                order.handle_timer(self.now_s, effects)
                self.carry_out(*where, effects)
        raise AssertionError("it does not come to rest")

    def play(self, programs: Sequence[Sequence[Use | None]], *, hasty: float = 0.5) -> None:
        """Each rank's uses arrive in its own order, among deliveries; at None it waits for its earlier uses."""
        left = [deque(program) for program in programs]
        while any(left):
            ready = [rank for rank, uses in enumerate(left) if uses and self._may(rank, uses[0])]
            if ready and (self.random.random() < hasty or not self.deliver()):
                rank = self.random.choice(ready)
                use = left[rank].popleft()
                if use is not None:
                    self.arrive(rank, use)
            elif not ready and not self.deliver():
                before = sum(map(len, self.launched.values()))
                self.settle()
                ready = [rank for rank, uses in enumerate(left) if uses and self._may(rank, uses[0])]
                assert ready or sum(map(len, self.launched.values())) > before, self.explain()
        self.settle()
        for rank, arrived in enumerate(self.arrivals):
            assert self.completed[rank] == arrived, self.explain()

    def _may(self, rank: int, use: Use | None) -> bool:
        """A name is not used again before its last use is over."""
        if use is None:
            return self.completed[rank] == self.arrivals[rank]
        return self.completed[rank][use] == self.arrivals[rank][use]

    def explain(self) -> str:
        return "\n".join(
            f"group {where[0]}, rank {where[1]}: {order.mode}, runs {self.running[where]}"
            for where, order in self.orders.items()
        )

    @property
    def num_messages(self) -> int:
        return sum(order.num_messages for order in self.orders.values())

    def modes(self) -> set[Mode]:
        return {order.mode for order in self.orders.values()}


def shuffled(rng: random.Random, uses: Sequence[Use]) -> list[Use]:
    return rng.sample(list(uses), len(uses))


def keys(count: int) -> list[Use]:
    return [(0, f"key/{number}") for number in range(count)]


def test_learned_in_the_first_step_then_followed_without_a_message() -> None:
    size, count = 8, 1000
    world = Devices([range(size)], seed=1)
    for step in range(3):
        world.play([shuffled(world.random, keys(count)) for _ in range(size)])
        # one for each key, and one that says that these are all, when the first of them comes again
        assert world.num_messages == count + (step > 0)
    assert world.modes() == {Mode.FOLLOWING}
    assert all(launched == world.launched[0, 0] for launched in world.launched.values())


GROUPS = st.integers(1, 5).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True), min_size=1, max_size=3
    )
)
SEEDS = st.integers(0, 1 << 32)
HASTY = st.sampled_from([0.1, 0.5, 0.9])


@given(st.integers(1, 5), SEEDS, HASTY, st.integers(1, 3), st.data())
def test_any_orders_and_any_changes(size: int, seed: int, hasty: float, again: int, data: st.DataObject) -> None:
    """Keys that come, go, and come twice; a step is waited for before the next."""
    devices = Devices([range(size)], seed)
    pool = [(0, key) for key in "abcd"]
    steps = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=8), min_size=1, max_size=7))
    programs: list[list[Use | None]] = [[] for _ in range(size)]
    for uses in steps * again:
        for program in programs:
            if len(set(uses)) == len(uses):
                program += [*shuffled(devices.random, uses), None]
            else:  # a key that comes twice is waited for in between: a program of one use after the other
                program += [one for use in uses for one in (use, None)]
    devices.play(programs, hasty=hasty)


@given(GROUPS, SEEDS, HASTY, st.integers(1, 6))
def test_steps_that_repeat_may_run_into_each_other(
    groups: list[list[int]], seed: int, hasty: float, num_steps: int
) -> None:
    """Several groups share devices; each rank has an order of its own in every step."""
    devices = Devices(groups, seed)
    pool = [(number, key) for number in range(len(groups)) for key in "abc"]
    programs: list[list[Use | None]] = [[] for _ in range(devices.size)]
    for _ in range(num_steps):
        for rank, program in enumerate(programs):
            program += shuffled(devices.random, [use for use in pool if rank in groups[use[0]]])
    devices.play(programs, hasty=hasty)


@pytest.mark.parametrize("hasty", [0.05, 0.95])
def test_a_key_that_is_new_and_one_that_comes_no_more(hasty: float) -> None:
    size = 4
    world = Devices([range(size)], seed=2)
    old, new = keys(10), [*keys(6), (0, "new")]
    for uses in (old, old, old, new, new, new, new):
        world.play([shuffled(world.random, uses) for _ in range(size)], hasty=hasty)
    assert world.modes() == {Mode.FOLLOWING}
    before = world.num_messages
    world.play([shuffled(world.random, new) for _ in range(size)], hasty=hasty)
    assert world.num_messages == before


def test_a_key_that_comes_twice_in_each_step_is_learned_in_the_end() -> None:
    size = 3
    world = Devices([range(size)], seed=3)
    step = [(0, key) for key in "abac"]
    for _ in range(12):
        world.play([step] * size)
    before = world.num_messages
    for _ in range(5):
        world.play([step] * size)
    assert world.num_messages == before


def test_a_member_that_does_not_post_is_waited_for_alone() -> None:
    world = Devices([range(3)])
    for _ in range(3):
        world.play([keys(3)] * 3)
    for rank in range(3):
        for use in keys(3)[1 if rank == 2 else 0 :]:
            world.arrive(rank, use)
    assert [len(world.launched[0, rank]) for rank in range(3)] == [12, 12, 9]
    world.arrive(2, (0, "key/0"))
    assert world.completed[2] == world.arrivals[2]


def test_a_use_that_is_withdrawn_on_all_ranks_leaves_its_place_to_the_next() -> None:
    world = Devices([range(2)])
    for _ in range(3):
        world.play([keys(3)] * 2)
    first, second, third = keys(3)
    for rank in (0, 1):
        tokens = [world.arrive(rank, use) for use in (second, second)]
        world.orders[0, rank].withdraw(second[1], tokens[0])
        world.orders[0, rank].withdraw(second[1], tokens[1])
    for rank in (1, 0):
        for use in (third, second, first):
            world.arrive(rank, use)
        assert world.launched[0, rank][-3:] == [(first[1], 3), (second[1], 5), (third[1], 3)]
    assert world.modes() == {Mode.FOLLOWING}


def test_an_order_that_is_not_followed_is_told_each_time() -> None:
    world = Devices([range(3)], seed=2, follows=False)
    for step in range(1, 4):
        world.play([shuffled(world.random, keys(20)) for _ in range(3)])
        assert world.num_messages == 20 * step
    assert world.modes() == {Mode.LEARNING}
    assert all(launched == world.launched[0, 0] for launched in world.launched.values())


def test_a_slow_program_is_doubted_ever_more_slowly() -> None:
    world = Devices([range(2)])
    waits = []
    for _ in range(20):
        for _ in range(4):
            world.play([keys(2)] * 2)
        first, second = keys(2)
        order = world.orders[0, 1]
        world.arrive(1, second)
        due = order.deadline_s()
        assert due is not None
        waits.append(due - world.now_s)
        effects: list[Any] = []
        order.handle_timer(due - 0.01, effects)
        assert not effects
        for rank, use in ((0, second), (0, first)):
            world.arrive(rank, use)
        world.settle()
        world.arrive(1, first)
        world.settle()
        assert world.completed[1] == world.arrivals[1]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1.0, 64.0)


@pytest.mark.parametrize(
    ("rank", "sender", "message"),
    [
        (1, 2, (TOLD, 0, "key")),
        (1, 0, (99, 0)),
        (1, 0, ()),
        (1, 0, (TOLD, 0, [])),
        (1, 0, (TOLD, 0)),
        (1, 0, (FIXED, 0, 3)),
        (1, 0, (FIXED, 0, "two")),
        (1, 0, (RESUME, 0, [1, 2])),
        (1, 0, (RESUME, 0, [-1, -1, -1])),
        (0, 1, (99, 0)),
        (0, 1, (FROZEN, 0, "far")),
    ],
)
def test_invalid_message_is_violation(rank: int, sender: int, message: Any) -> None:
    order = Devices([range(3)]).orders[0, rank]
    effects: list[Any] = []
    order.received(sender, message, 0.0, effects)
    assert [(effect[0], effect[1]) for effect in effects] == [(VIOLATION, sender)]


def test_a_key_may_be_used_again_before_it_is_launched() -> None:
    """As calls without a name are."""
    world = Devices([range(2)])
    for _ in range(3):
        for rank in (1, 0):
            for _ in range(3):
                world.arrive(rank, (0, ""))
        world.settle()
    assert world.completed[0] == world.completed[1] == {(0, ""): 9}


def test_a_rank_that_doubts_while_all_are_frozen_changes_nothing() -> None:
    order = launch_order(LEADER, 3)
    effects: list[Any] = []
    order.received(1, (STUCK, 0), 0.0, effects)
    assert [effect[0] for effect in effects] == [TELL]
    order.received(2, (STUCK, 1), 0.0, effects)
    order.received(2, (STUCK, 0), 0.0, effects)
    assert (len(effects), order.mode) == (1, Mode.FROZEN)


def first_found(names: str, **options) -> tuple[int, int]:
    """After how many names a pass is found, and how long it is."""
    watched: Cycles[str] = Cycles(**options)
    for number, name in enumerate(names, 1):
        if length := watched.add(name):
            return number, length
    return 0, 0


def test_the_first_name_that_comes_again_begins_a_second_pass() -> None:
    assert first_found("abcb") == (4, 3)
    assert first_found("aa") == (2, 1)
    assert first_found("abcd") == (0, 0)
    watched: Cycles[str] = Cycles()
    assert [watched.add(name) for name in "abba"] == [0, 0, 2, 2]
    assert watched.names == ["a", "b"]


def test_two_whole_passes_have_the_same_names_as_often_in_any_order() -> None:
    assert first_found("abacabac", is_first=False) == (8, 4)
    assert first_found("abab", is_first=False) == (4, 2)
    assert first_found("aabb", is_first=False) == (2, 1)
    assert first_found("aabaab", is_first=False, shortest=3) == (6, 3)
    assert first_found("abcd", is_first=False) == (0, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 9))
def test_repeated_sequence_is_found(names: list[int], seed: int, before: int) -> None:
    """Also after other names; never later than two passes after them, if nothing shorter repeats within it."""
    rng = random.Random(seed)
    watched: Cycles[int] = Cycles(is_first=False, shortest=len(names))
    sequence = [-number - 1 for number in range(before)]
    for _ in range(2):
        sequence += rng.sample(names, len(names))
    found = [watched.add(name) for name in sequence]
    assert found[-1] == len(names)
    assert not any(found[: before + len(names)])


def test_sequence_without_repetition_takes_bounded_memory(monkeypatch) -> None:
    monkeypatch.setattr("kfcomm.core.launch_order.MAX_CYCLE", 4)
    watched: Cycles[int] = Cycles()
    assert not any(watched.add(number) for number in range(20))
    assert watched.names == list(range(8))
    watched = Cycles()
    assert [watched.add(number % 5) for number in range(10)] == [0] * 10  # a pass of five is too long


def test_take_gives_the_next_place_only_while_a_pass_is_followed_and_nothing_waits() -> None:
    leader, effects = launch_order(LEADER, 2), []
    for key in "ab":
        assert not leader.take(key)
        leader.arrived(key, key, 0.0, effects)
    assert not leader.take("a")  # it is not known yet that the pass is over
    leader.arrived("a", "a", 0.0, effects)
    assert leader.mode is Mode.FOLLOWING
    assert [leader.take(key) for key in ("a", "b", "b", "a")] == [False, True, False, True]
    leader.arrived("a", "a", 0.0, effects)
    assert not leader.take("b")  # one waits: they are launched together
    effects.clear()
    leader.arrived("b", "b", 0.0, effects)
    assert effects == [(LAUNCH, "b"), (LAUNCH, "a")]
    assert leader.take("b")


def test_take_leaves_places_of_the_first_pass_to_those_who_arrive() -> None:
    follower, effects = launch_order(1, 2), []
    for message in ((TOLD, 0, "a"), (TOLD, 0, "b"), (FIXED, 0, 2)):
        follower.received(LEADER, message, 0.0, effects)
    assert follower.mode is Mode.FOLLOWING
    assert not follower.take("a")
    for key in "ab":
        follower.arrived(key, key, 0.0, effects)
    assert follower.take("a")
