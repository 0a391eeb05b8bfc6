from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core import program as programs
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.machine import DOWN, INPUT, UP, Do, Machine
from kfcomm.core.recorder import EffectRecorder
from tests.core import specs

STAR = GraphPair.of(Graph.from_parents([0, 0, 0, 0]))
CHAIN = GraphPair.of(Graph.from_parents([0, 0, 1]))


class Bench:
    """A machine, started; effects without the machine itself, and with lane numbers for lanes."""

    def __init__(self, program):
        self.effects = []
        driver = EffectRecorder(self.effects)
        self.machine = Machine(program, driver)
        self.lanes = program.lanes
        self.routes = program.routes
        driver.begin(self.machine)

    def accepts(self, phase, sender, lane=0, index=0):
        route = self.routes.get((lane, phase, sender))
        return route is not None and self.machine.accepts(route, index)

    def arrive(self, payload, phase=UP, sender=1, lane=0, index=0):
        assert self.accepts(phase, sender, lane, index)
        return self.arrive_unasked(payload, phase, sender, lane, index)

    def arrive_unasked(self, payload, phase=UP, sender=1, lane=0, index=0):
        self.machine.arrived(self.routes[lane, phase, sender], index, payload)
        return self.take()

    def sent(self, times=1):
        for _ in range(times):
            self.machine.was_read()
        return self.take()

    def take(self):
        assert all(effect[1] is self.machine for effect in self.effects)
        taken = [
            (effect[0], *(part.number if part in self.lanes.values() else part for part in effect[2:]))
            for effect in self.effects
        ]
        self.effects.clear()
        return taken


def root():
    return Bench(programs.all_reduce(0, [STAR], 6, 4))


def test_children_are_folded_in_order_whatever_the_order_in_which_they_arrive():
    for order in itertools.permutations((1, 2, 3)):
        bench = root()
        effects = [effect for sender in order for effect in bench.arrive(f"from {sender}", sender=sender)]
        folds = [effect for effect in effects if effect[0] in (Do.FOLD, Do.FOLD_UP, Do.FOLD_LAST)]
        assert folds == [
            (Do.FOLD, 0, 0, "from 1", True),
            (Do.FOLD, 0, 0, "from 2", False),
            (Do.FOLD_LAST, 0, 0, "from 3", False),
        ]
        for place, effect in enumerate(effects):
            if effect[0] == Do.HOLD:
                assert effect[1] in [one[3] for one in effects[place:] if one in folds]
        assert all(effect[0] != Do.RELEASE for effect in effects)  # a fold is the last to read its payload
        assert bench.machine.take_held() == []


def test_each_result_lets_the_chunk_follow_that_is_one_window_later():
    program = programs.windowed(programs.all_reduce(2, [STAR], 20, 4), 2)
    bench = Bench(program)
    sends = [(Do.SEND, (0,), 0, index, UP, INPUT, None) for index in range(5)]
    assert bench.take() == sends[:2]
    assert bench.arrive("a", DOWN, 0, index=1) == [sends[3], (Do.STORE, 0, 1, "a")]
    assert bench.arrive("b", DOWN, 0, index=0) == [sends[2], (Do.STORE, 0, 0, "b")]
    assert bench.arrive("c", DOWN, 0, index=2) == [sends[4], (Do.STORE, 0, 2, "c")]
    assert bench.arrive("d", DOWN, 0, index=3) == [(Do.STORE, 0, 3, "d")]
    assert bench.arrive("e", DOWN, 0, index=4) == [(Do.STORE, 0, 4, "e")]
    assert bench.sent(5) == [(Do.DONE,)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_only_leaves_have_windows(rank):
    whole = programs.all_reduce(rank, [CHAIN], 20, 4)
    assert programs.windowed(whole, 0) == programs.windowed(whole, 5) == whole
    assert [lane.window for lane in programs.windowed(whole, 2).lanes.values()] == [2 if rank == 2 else 0]


def test_gated_lanes_begin_when_all_others_are_complete():
    bench = Bench(programs.scatter(0, STAR, [1, 1, 1, 0], 4))
    assert bench.take() == []
    assert bench.arrive("", sender=1) == [(Do.RELEASE, "")]
    assert bench.arrive("", sender=2) == [(Do.RELEASE, "")]
    assert bench.arrive("", sender=3) == [
        (Do.RELEASE, ""),
        (Do.COPY, 1, 0),
        *((Do.SEND, (target,), target + 1, 0, DOWN, INPUT, None) for target in (1, 2, 3)),
    ]
    assert bench.sent(3) == [(Do.DONE,)]


@pytest.mark.parametrize(
    ("program", "effects"),
    [
        (programs.all_reduce(0, [GraphPair.of(Graph.from_parents([0]))], 2, 4), [(Do.FINISH, 0, 0)]),
        (programs.reduce(0, GraphPair.of(Graph.from_parents([0])), 2, 4), [(Do.FINISH, 0, 0)]),
        (programs.broadcast(0, GraphPair.of(Graph.from_parents([0])), 2, 4), [(Do.COPY, 1, 0)]),
        (programs.barrier(0, GraphPair.of(Graph.from_parents([0]))), []),
    ],
)
def test_alone_it_is_done_at_once(program, effects):
    assert Bench(program).take() == [*effects, (Do.DONE,)]


def test_done_elsewhere_completes_program_without_lanes():
    effects = []
    machine = Machine(programs.elsewhere(0, 3), driver := EffectRecorder(effects))
    driver.begin(machine)
    assert not machine.awaits(1)
    assert not effects
    machine.done_elsewhere()
    assert [effect[0] for effect in effects] == [Do.DONE]


def test_invalid_chunk_is_refused():
    bench = root()
    assert not bench.accepts(UP, 0)  # no child of itself
    assert not bench.accepts(UP, 9)
    assert not bench.accepts(UP, 1, lane=1)  # there is one lane
    assert not bench.accepts(UP, 1, index=2)  # there are two chunks
    assert not bench.accepts(UP, 1, index=-1)
    assert not bench.accepts(DOWN, 1)  # the root is told nothing
    assert not bench.accepts(7, 1)
    assert bench.accepts(UP, 3, index=1)
    bench.arrive("c", sender=3)
    assert not bench.accepts(UP, 3)  # held
    assert bench.accepts(UP, 2)
    bench.arrive("a", sender=1)
    assert not bench.accepts(UP, 1)  # folded
    bench.arrive("b", sender=2)
    assert [bench.accepts(UP, sender) for sender in (1, 2, 3)] == [False] * 3


def test_a_result_comes_once_and_after_the_contributions():
    bench = Bench(programs.all_reduce(1, [CHAIN], 1, 1))
    assert not bench.accepts(DOWN, 0)
    bench.arrive("a", sender=2)
    assert not bench.accepts(2, 0)  # no such phase
    assert not bench.accepts(DOWN, 2)
    assert bench.accepts(DOWN, 0)
    bench.arrive("r", DOWN, 0)
    assert not bench.accepts(DOWN, 0)
    assert not Bench(programs.reduce(1, CHAIN, 1, 1)).accepts(DOWN, 0)


def test_of_a_chunk_that_came_on_two_links_the_second_does_nothing():
    bench = root()
    assert bench.arrive("c", sender=3) == [(Do.HOLD, "c")]
    assert bench.arrive_unasked("again", sender=3) == [(Do.RELEASE, "again")]
    bench.arrive("a", sender=1)
    assert bench.arrive_unasked("again", sender=1) == [(Do.RELEASE, "again")]
    assert bench.machine.take_held() == ["c"]
    leaf = Bench(programs.all_reduce(3, [STAR], 1, 4))
    leaf.take()
    assert leaf.arrive("r", DOWN, 0) == [(Do.STORE, 0, 0, "r")]
    assert leaf.arrive_unasked("again", DOWN, 0) == [(Do.RELEASE, "again")]
    assert leaf.sent() == [(Do.DONE,)]


def test_awaits_sender_with_missing_chunk():
    bench = root()  # of 6 elements in chunks of 4
    assert [bench.machine.awaits(rank) for rank in range(4)] == [False, True, True, True]
    bench.arrive("b", sender=2)
    assert bench.machine.awaits(2)
    bench.arrive("b", sender=2, index=1)
    assert [bench.machine.awaits(rank) for rank in range(4)] == [False, True, False, True]
    middle = Bench(programs.all_reduce(1, [CHAIN], 1, 1))
    assert [middle.machine.awaits(rank) for rank in range(3)] == [True, False, True]
    middle.arrive("c", sender=2)
    assert [middle.machine.awaits(rank) for rank in range(3)] == [True, False, False]
    middle.arrive("r", DOWN, 0)
    assert not any(middle.machine.awaits(rank) for rank in range(3))


@pytest.mark.parametrize("size", [255, 256, 300])
def test_a_root_may_have_more_children_than_a_byte_can_count(size):
    star = GraphPair.of(Graph.from_parents([0] * size))
    bench = Bench(programs.all_reduce(0, [star], 1, 1))
    effects = [effect for sender in range(1, size) for effect in bench.arrive(sender, sender=sender)]
    assert [effect[0] for effect in effects] == [Do.FOLD] * (size - 2) + [Do.FOLD_LAST] + [Do.SEND]
    assert not bench.accepts(UP, 1)
    assert bench.sent(size - 1) == [(Do.DONE,)]


# ---------------------------------------------------------------- the short way


class Twins:
    """Two machines of one program: ``short`` is given a chunk by ``take`` first, ``long`` never.

    ``here`` is what has come: for each chunk of the program, the positions; that after the children's is the result.
    What may come, and what is next, is worked out from it alone. ``said`` are the effects, the same of both.
    """

    def __init__(self, program):
        self.program = program
        self.short, self.long = [Machine(program, EffectRecorder([])) for _ in range(2)]
        self.here = [set() for _ in range(program.num_slots)]
        self.said = []
        self.both(lambda machine: machine.driver.begin(machine))

    def both(self, do):
        """One event for both."""
        said = []
        for machine in (self.short, self.long):
            do(machine)
            assert all(effect[1] is machine for effect in machine.driver.effects)
            said.append([(effect[0], *effect[2:]) for effect in machine.driver.effects])
            machine.driver.effects.clear()
        assert said[0] == said[1]
        self.said += said[0]

    def arrive(self, route, index, payload):
        """A chunk comes, whether or not it may; whether it may."""
        here, position = self.here[route.lane.base + index], route.position
        is_next = position not in here and set(range(position)) <= here
        is_allowed = is_next or (route.phase == UP and position not in here)
        for machine in (self.short, self.long):
            assert machine.accepts(route, index) == is_allowed

        def come(machine):
            if machine is self.short:
                before = self.state(machine)
                assert machine.take(route, index, payload) == is_allowed
                if not is_allowed:
                    assert (machine.driver.effects, self.state(machine)) == ([], before)
            elif is_allowed:
                machine.arrived(route, index, payload)

        self.both(come)
        if is_allowed:
            here.add(position)
        return is_allowed

    @staticmethod
    def state(machine):
        """State of a machine."""
        known = dict(vars(machine))
        return known | {"_folded": bytes(known["_folded"]), "_held": dict(known.get("_held") or {})}

    def was_read(self, times):
        """Payloads are no longer read."""
        for _ in range(times):
            self.both(Machine.was_read)


@settings(max_examples=150)
@given(size=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_take_matches_arrived_and_refuses_repeats(size, seed):
    rnd = random.Random(seed)
    spec = specs.spec(rnd, "key", tuple(range(size)))
    twins = Twins(spec.program(rnd.randrange(size)))
    bag = [(route, index) for route in twins.program.routes.values() for index in range(route.lane.num_chunks)]
    everything = list(bag)
    while bag:
        route, index = rnd.choice(everything if rnd.random() < 0.2 else bag)  # once more, or one that is missing
        if twins.arrive(route, index, object()):
            bag.remove((route, index))
        if twins.short.sends and rnd.random() < 0.5:
            twins.was_read(rnd.randint(1, twins.short.sends))
    if twins.short.sends:
        twins.was_read(twins.short.sends)
    assert [effect[0] for effect in twins.said].count(Do.DONE) == 1
    assert twins.said[-1] == (Do.DONE,)
    ends = [effect for effect in twins.said if effect[0] in (Do.FOLD, Do.FOLD_UP, Do.FOLD_LAST, Do.STORE, Do.RELEASE)]
    assert len(ends) == len(everything)  # each payload is folded, stored or released, and once
