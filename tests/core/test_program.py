from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core import program as programs
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.program import ABSENT, Lane, Program
from kfcomm.types import Verb
from tests.core import specs
from tests.core.specs import VERBS, Spec

CHAIN = GraphPair.of(Graph.from_parents([0, 0, 1]))  # 0 - 1 - 2
STAR = GraphPair.of(Graph.from_parents([0, 0, 0]))


def lanes(program: Program) -> list[Lane]:
    return list(program.lanes.values())


def test_all_reduce_shares_its_elements_out_among_the_pairs():
    first, second = lanes(programs.all_reduce(1, [CHAIN, STAR], 11, 4))
    assert (first.input_offset, first.result_offset, first.count, first.num_chunks, first.base) == (0, 0, 6, 2, 0)
    assert (second.input_offset, second.result_offset, second.count, second.num_chunks, second.base) == (6, 6, 5, 2, 2)
    assert (first.children, first.leaf_children, first.parent) == ((2,), (True,), 0)
    assert (first.source, first.targets) == (0, (2,))
    assert (second.children, second.parent, second.targets) == ((), 0, ())
    assert all(lane.up and lane.down and lane.keeps and not lane.gated for lane in (first, second))


def test_partial_results_are_told_from_inputs():
    (lane,) = lanes(programs.all_reduce(0, [CHAIN], 1, 1))
    assert (lane.children, lane.leaf_children, lane.parent, lane.source) == ((1,), (False,), ABSENT, ABSENT)


def test_reduce_keeps_its_result_at_the_root_and_acknowledges_it():
    root = programs.reduce(0, CHAIN, 5, 2)
    up, down = lanes(root)
    assert (up.up, up.down, up.keeps, up.num_chunks) == (True, False, True, 3)
    assert (down.up, down.down, down.count, down.gated, down.keeps) == (False, True, 0, True, False)
    assert (root.gate, root.num_slots) == (3, 4)
    leaf = programs.reduce(2, CHAIN, 5, 2)
    assert not any(lane.keeps or lane.gated for lane in lanes(leaf))
    assert leaf.gate == 0


def test_broadcast_waits_for_every_rank_to_agree():
    root = programs.broadcast(0, CHAIN, 5, 2)
    up, down = lanes(root)
    assert (up.up, up.count, up.keeps) == (True, 0, False)
    assert (down.down, down.keeps, down.gated, down.num_chunks) == (True, True, True, 3)
    assert root.gate == 1


def test_gather_and_scatter_take_paths_through_the_graph():
    middle = programs.gather(1, CHAIN, [1, 2, 3], 10)
    assert sorted(middle.lanes) == [1, 2, 3]
    assert (middle.lanes[1].source, middle.lanes[1].targets) == (ABSENT, (0,))
    assert (middle.lanes[2].source, middle.lanes[2].targets, middle.lanes[2].keeps) == (2, (0,), False)
    root = programs.gather(0, CHAIN, [1, 2, 3], 10)
    assert [lane.result_offset for lane in lanes(root)][:3] == [0, 1, 3]
    assert [lane.keeps for lane in lanes(root)] == [True, True, True, False]
    scattering = programs.scatter(0, CHAIN, [1, 0, 3], 10)
    assert [lane.input_offset for lane in lanes(scattering)] == [0, 0, 1, 1]
    assert [lane.gated for lane in lanes(scattering)] == [False, True, True, True]
    assert not programs.scatter(1, CHAIN, [1, 0, 3], 10).lanes[2].keeps


def test_all_to_all_goes_straight():
    program = programs.all_to_all(1, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 100)
    assert {number: (lane.source, lane.targets) for number, lane in program.lanes.items()} == {
        1: (0, ()),
        3: (ABSENT, (0,)),
        4: (ABSENT, ()),
        5: (ABSENT, (2,)),
        7: (2, ()),
    }
    assert [program.lanes[number].input_offset for number in (3, 4, 5)] == [0, 4, 9]
    assert [program.lanes[number].result_offset for number in (1, 4, 7)] == [0, 2, 7]


def test_send_is_acknowledged():
    sender, receiver = programs.send(0, 7, 3), programs.send(1, 7, 3)
    assert (sender.lanes[0].targets, sender.lanes[1].source) == ((1,), 1)
    assert (receiver.lanes[0].keeps, receiver.lanes[1].gated, receiver.gate) == (True, True, 3)


def test_barrier_carries_nothing():
    (lane,) = lanes(programs.barrier(1, CHAIN))
    assert (lane.count, lane.num_chunks, lane.keeps) == (0, 1, False)


@pytest.mark.parametrize(("size", "neighbours"), [(1, set()), (2, {1}), (5, {1, 4})])
def test_elsewhere_has_neighbours_and_no_lanes(size, neighbours):
    program = programs.elsewhere(0, size)
    assert not program.lanes
    assert program.num_slots == 1
    assert program.neighbours == neighbours


def test_as_many_pairs_as_parts():
    program = programs.all_reduce(0, [STAR, CHAIN, STAR], 2, 4)
    assert [lane.count for lane in lanes(program)] == [1, 1, 0]
    assert [lane.keeps for lane in lanes(program)] == [True, True, False]


def test_shares_say_how_much_each_pair_carries():
    program = programs.all_reduce(0, [STAR, CHAIN, STAR], 10, 4, shares=(2, 1, 7))
    assert [(lane.input_offset, lane.count) for lane in lanes(program)] == [(0, 2), (2, 1), (3, 7)]


@settings(max_examples=60)
@given(size=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_the_programs_of_all_ranks_fit_together(size, seed):
    rnd = random.Random(seed)
    verb = rnd.choice([verb for verb in VERBS if verb is not Verb.SEND or size == 2])
    spec: Spec = specs.of_verb(rnd, verb, "key", tuple(range(size)), specs.pairs(rnd, size), 20)
    all_of_them = [spec.program(rank) for rank in range(size)]
    for rank, program in enumerate(all_of_them):
        assert rank not in program.neighbours
        assert program.num_slots == sum(lane.num_chunks for lane in lanes(program))
        assert [lane.base for lane in lanes(program)] == _running([lane.num_chunks for lane in lanes(program)])
        assert all(lane.num_chunks == max(1, -(-lane.count // program.chunk_elements)) for lane in lanes(program))
        for number, lane in program.lanes.items():
            assert lane.number == number
            others = {other: all_of_them[other].lanes[number] for other in program.neighbours & _ends(lane)}
            assert all(other.count == lane.count for other in others.values())
            assert all(others[child].parent == rank for child in lane.children)
            assert all(others[target].source == rank for target in lane.targets)
            assert lane.parent == ABSENT or rank in others[lane.parent].children
            assert lane.source == ABSENT or rank in others[lane.source].targets
        assert all(rank in all_of_them[other].neighbours for other in program.neighbours)
    reached = {0}
    while (more := reached.union(*(all_of_them[rank].neighbours for rank in reached))) != reached:
        reached = more
    assert len(reached) == size  # so announcements reach from any rank to any other


@pytest.mark.parametrize("verb", VERBS)
def test_the_result_is_covered_once(verb):
    rnd = random.Random(str(verb))
    size = 2 if verb is Verb.SEND else 5
    spec = specs.of_verb(rnd, verb, "key", tuple(range(size)), specs.pairs(rnd, size), 20)
    for rank in range(size):
        kept = [lane for lane in lanes(spec.program(rank)) if lane.keeps]
        places = [place for lane in kept for place in range(lane.result_offset, lane.result_offset + lane.count)]
        assert sorted(places) == list(range(spec.result_count(rank)))


def _ends(lane: Lane) -> set[int]:
    return {*lane.children, lane.parent, lane.source, *lane.targets} - {ABSENT}


def _running(lengths: list[int]) -> list[int]:
    return [sum(lengths[:place]) for place in range(len(lengths))]
