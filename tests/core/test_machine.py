from __future__ import annotations

import itertools

import pytest

from kfcomm.core import program as programs
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.machine import DOWN, INPUT, PARTIAL, PAYLOAD, RESULT, UP, Do, Machine
from kfcomm.core.program import NOBODY

STAR = GraphPair.of(Graph.from_parents([0, 0, 0, 0]))
CHAIN = GraphPair.of(Graph.from_parents([0, 0, 1]))


class Bench:
    """A machine, started; effects without the machine itself, and with lane numbers for lanes."""

    def __init__(self, program):
        self.machine = Machine(program)
        self.lanes = program.lanes
        self.effects = []
        self.machine.start(self.effects)

    def arrive(self, payload, phase=UP, sender=1, lane=0, index=0):
        position = self.machine.accepts(self.lanes[lane], index, phase, sender)
        assert position != NOBODY
        return self.arrive_at(position, payload, phase, lane, index)

    def arrive_at(self, position, payload, phase=UP, lane=0, index=0):
        self.machine.arrived(self.lanes[lane], index, phase, position, payload, self.effects)
        return self.take()

    def sent(self, times=1):
        for _ in range(times):
            self.machine.was_read(self.effects)
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


def test_the_root_folds_its_children_finishes_and_sends_down():
    bench = root()
    assert bench.take() == []
    assert bench.arrive("a", sender=1) == [(Do.FOLD, 0, 0, "a", True)]
    assert bench.arrive("b", sender=2) == [(Do.FOLD, 0, 0, "b", False)]
    assert bench.arrive("c", sender=3) == [
        (Do.FOLD_LAST, 0, 0, "c", False),
        (Do.SEND, (1, 2, 3), 0, 0, DOWN, RESULT, None),
    ]
    assert bench.machine.remaining == 1
    assert bench.sent(3) == []


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


def test_a_leaf_sends_its_input_and_stores_the_result():
    bench = Bench(programs.all_reduce(3, [STAR], 6, 4))
    assert bench.take() == [(Do.SEND, (0,), 0, 0, UP, INPUT, None), (Do.SEND, (0,), 0, 1, UP, INPUT, None)]
    assert bench.arrive("r0", DOWN, 0) == [(Do.STORE, 0, 0, "r0")]
    assert bench.arrive("r1", DOWN, 0, index=1) == [(Do.STORE, 0, 1, "r1")]
    assert bench.sent() == []
    assert bench.sent() == [(Do.DONE,)]
    assert bench.machine.finished


def test_it_is_not_done_before_its_sends_are_nor_before_its_chunks():
    bench = Bench(programs.all_reduce(3, [STAR], 1, 4))
    assert bench.take() == [(Do.SEND, (0,), 0, 0, UP, INPUT, None)]
    assert bench.sent() == []
    assert bench.arrive("r", DOWN, 0)[-1] == (Do.DONE,)


def test_the_middle_of_a_chain_passes_partials_up_and_results_down():
    bench = Bench(programs.all_reduce(1, [CHAIN], 1, 1))
    assert bench.arrive("a", sender=2) == [
        (Do.FOLD_UP, 0, 0, "a", True),
        (Do.SEND, (0,), 0, 0, UP, PARTIAL, None),
    ]
    assert bench.arrive("r", DOWN, 0) == [(Do.STORE, 0, 0, "r"), (Do.SEND, (2,), 0, 0, DOWN, RESULT, None)]


def test_what_is_not_kept_is_passed_on_as_it_came():
    bench = Bench(programs.gather(1, CHAIN, [1, 1, 1], 4))
    assert bench.take() == [(Do.SEND, (0,), 1, 0, DOWN, INPUT, None)]
    assert bench.arrive("x", DOWN, 2, lane=2) == [(Do.SEND, (0,), 2, 0, DOWN, PAYLOAD, "x"), (Do.RELEASE, "x")]


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


def test_what_is_done_elsewhere_is_done_when_that_is_said():
    machine, effects = Machine(programs.elsewhere(0, 3)), []
    machine.start(effects)
    assert not machine.awaits(1)
    assert not effects
    machine.done_elsewhere(effects)
    assert [effect[0] for effect in effects] == [Do.DONE]


def test_chunks_without_payload_are_neither_folded_nor_kept():
    bench = Bench(programs.barrier(1, CHAIN))
    assert bench.arrive("", sender=2) == [(Do.RELEASE, ""), (Do.SEND, (0,), 0, 0, UP, PARTIAL, None)]
    assert bench.arrive("", DOWN, 0) == [(Do.SEND, (2,), 0, 0, DOWN, PAYLOAD, ""), (Do.RELEASE, "")]
    assert bench.sent(2) == [(Do.DONE,)]


def test_what_does_not_belong_is_refused():
    machine = (bench := root()).machine
    lane = bench.lanes[0]
    assert machine.accepts(lane, 0, UP, 0) == NOBODY  # no child of itself
    assert machine.accepts(lane, 0, UP, 9) == NOBODY
    assert machine.accepts(lane, 2, UP, 1) == NOBODY  # there are two chunks
    assert machine.accepts(lane, 0, DOWN, 1) == NOBODY  # the root is told nothing
    assert machine.accepts(lane, 0, 7, 1) == NOBODY
    assert machine.accepts(lane, 1, UP, 3) == 2
    bench.arrive("c", sender=3)
    assert machine.accepts(lane, 0, UP, 3) == NOBODY  # held
    bench.arrive("a", sender=1)
    assert machine.accepts(lane, 0, UP, 1) == NOBODY  # folded
    bench.arrive("b", sender=2)
    assert [machine.accepts(lane, 0, UP, sender) for sender in (1, 2, 3)] == [NOBODY] * 3


def test_a_result_comes_once_and_after_the_contributions():
    bench = Bench(programs.all_reduce(1, [CHAIN], 1, 1))
    lane = bench.lanes[0]
    assert bench.machine.accepts(lane, 0, DOWN, 0) == NOBODY
    bench.arrive("a", sender=2)
    assert bench.machine.accepts(lane, 0, 2, 0) == NOBODY  # no such phase
    assert bench.machine.accepts(lane, 0, DOWN, 2) == NOBODY
    bench.arrive("r", DOWN, 0)
    assert bench.machine.accepts(lane, 0, DOWN, 0) == NOBODY
    assert bench.machine.accepts(Bench(programs.reduce(1, CHAIN, 1, 1)).lanes[0], 0, DOWN, 0) == NOBODY


def test_of_a_chunk_that_came_on_two_links_the_second_does_nothing():
    bench = root()
    assert bench.arrive_at(2, "c") == [(Do.HOLD, "c")]
    assert bench.arrive_at(2, "again") == [(Do.RELEASE, "again")]
    bench.arrive_at(0, "a")
    assert bench.arrive_at(0, "again") == [(Do.RELEASE, "again")]
    leaf = Bench(programs.all_reduce(3, [STAR], 1, 4))
    leaf.take()
    assert leaf.arrive_at(0, "r", DOWN) == [(Do.STORE, 0, 0, "r")]
    assert leaf.arrive_at(0, "again", DOWN) == [(Do.RELEASE, "again")]
    assert leaf.sent() == [(Do.DONE,)]


def test_held_payloads_can_be_taken_back():
    bench = root()
    assert bench.machine.take_held() == []
    bench.arrive("c", sender=3)
    bench.arrive("b", sender=2, index=1)
    assert bench.machine.take_held() == ["c", "b"]
    assert bench.machine.take_held() == []


def test_who_still_has_to_send_is_awaited():
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
    assert bench.machine.accepts(bench.lanes[0], 0, UP, 1) == NOBODY
    assert bench.sent(size - 1) == [(Do.DONE,)]
