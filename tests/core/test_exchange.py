"""Exchanges in steps: machines of all ranks whose messages arrive in any order."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kfcomm.core.exchange import Exchange, dissemination, halving_doubling
from kfcomm.core.graph import Graph
from kfcomm.core.machine import Do, Machine, Source
from kfcomm.core.program import Lane, Program
from kfcomm.core.recorder import EffectRecorder
from kfcomm.core.signature import split

Folded = tuple[int, ...]
"""An element, as the ranks whose contributions it holds, in the order in which they were folded."""


class Ranks:
    """All ranks of one collective; the memory of each, and the messages between them."""

    def __init__(self, programs: list[Program], count: int, result_count: int) -> None:
        self.programs = programs
        self.recorders = [EffectRecorder([]) for _ in programs]
        self.machines = [Machine(program, one) for program, one in zip(programs, self.recorders, strict=True)]
        self.partial: list[list[Any]] = [[None] * count for _ in programs]
        self.result: list[list[Any]] = [[None] * result_count for _ in programs]
        self.under_way: list[tuple[int, int, int, int, int, list[Folded]]] = []
        self.num_messages = 0
        self.num_done = [0] * len(programs)

    def run(self, chance: Random) -> None:
        for rank in chance.sample(range(len(self.programs)), len(self.programs)):
            self.recorders[rank].begin(self.machines[rank])
            self.perform(rank)
        while self.under_way:
            sender, rank, lane, phase, index, payload = self.under_way.pop(chance.randrange(len(self.under_way)))
            machine, route = self.machines[rank], self.programs[rank].routes[lane, phase, sender]
            assert machine.awaits(sender)
            assert machine.accepts(route, index)
            machine.arrived(route, index, payload)
            assert not machine.accepts(route, index)
            self.perform(rank)
        assert self.num_done == [1] * len(self.programs)

    def perform(self, rank: int) -> None:
        effects, self.recorders[rank].effects = self.recorders[rank].effects, []
        for tag, _, *fields in effects:
            if tag == Do.SEND:
                (to,), lane, index, phase, source, _ = fields
                payload = self.read(rank, lane, index, source)
                assert None not in payload
                self.under_way.append((rank, to, lane.number, phase, index, payload))
                self.num_messages += 1
                self.machines[rank].was_read()
            elif tag == Do.DONE:
                self.num_done[rank] += 1
            elif tag not in (Do.HOLD, Do.RELEASE):
                self.change(rank, tag, *fields)
        if effects:
            self.perform(rank)

    def change(self, rank: int, tag: int, lane: Lane, index: int, payload: Any = None, first: bool = False) -> None:
        is_input = tag in (Do.COPY, Do.BEGIN) or first
        own = self.read(rank, lane, index, Source.INPUT if is_input else Source.PARTIAL)
        if tag in (Do.FOLD, Do.FOLD_LAST):
            made = [a + b for a, b in zip(own, payload, strict=True)]
        else:
            made = payload if tag == Do.STORE else own
        array, offset = self.where(rank, lane, index, Source.PARTIAL if tag in (Do.FOLD, Do.BEGIN) else Source.RESULT)
        array[offset : offset + len(made)] = made

    def read(self, rank: int, lane: Lane, index: int, source: int) -> list[Any]:
        chunk = self.programs[rank].chunk_elements
        number = min(chunk, lane.count - index * chunk)
        if source == Source.INPUT:
            return [(rank,)] * number
        array, offset = self.where(rank, lane, index, source)
        return array[offset : offset + number]

    def where(self, rank: int, lane: Lane, index: int, source: int) -> tuple[list[Any], int]:
        start = index * self.programs[rank].chunk_elements
        if source == Source.PARTIAL:
            return self.partial[rank], lane.input_offset + start
        return self.result[rank], lane.result_offset + start


def exchanges(size: int, chance: Random) -> list[Exchange]:
    """With every division into two radices, and ranks in any order."""
    radices = [(size,), *((a, size // a) for a in range(1, size) if size % a == 0)]
    return [Exchange(tuple(chance.sample(range(size), size)), one) for one in radices]


def folded(graph: Graph, rank: int) -> Folded:
    return sum((folded(graph, child) for child in graph.children[rank]), (rank,))


@pytest.mark.parametrize("size", [*range(2, 18), 21, 24, 31, 32])
def test_every_rank_ends_with_the_fold_of_all_in_the_order_of_the_graphs(size: int) -> None:
    chance = Random(size)
    for exchange in exchanges(size, chance):
        count = chance.choice([0, 1, size - 1, size, 3 * size + 1])
        chunk = chance.choice([1, 2, 7, 1000])
        ranks = Ranks([halving_doubling(rank, exchange, count, chunk) for rank in range(size)], count, count)
        ranks.run(chance)
        graphs = exchange.graphs()
        assert [pair.root for pair in graphs] == list(exchange.order)
        wanted = [folded(graphs[place].reduce, rank) for place, rank in enumerate(exchange.order)]
        parts = [part for part, (_, number) in zip(wanted, split(count, size), strict=True) for _ in range(number)]
        assert ranks.result == [parts] * size


@pytest.mark.parametrize("size", range(2, 40))
def test_messages_of_a_rank_are_twice_the_logarithm(size: int) -> None:
    for exchange in exchanges(size, Random(size)):
        programs = [halving_doubling(rank, exchange, 10 * size, 1000) for rank in range(size)]
        steps = 2 * exchange.num_rounds
        sent = [sum(len(step.sends) for step in program.steps) for program in programs]
        # In a group whose size is no power of two, blocks may pass the end of the buffer.
        spare = 2 * sum(radix & (radix - 1) > 0 for radix in exchange.radices)
        assert steps <= min(sent)
        assert max(sent) <= (1.5 if spare else 1) * steps
        assert sum(sent) / size <= steps + spare
        moved = [sum(send.lane.count for step in program.steps for send in step.sends) for program in programs]
        assert max(moved) <= 2 * 10 * (size - 1)


@pytest.mark.parametrize("size", range(2, 24))
def test_dissemination_gathers_all_contributions_in_turn(size: int) -> None:
    chance = Random(size)
    for count in (0, 1, 3):
        chunk = chance.choice([1, 1000])
        programs = [dissemination(rank, size, count, chunk) for rank in range(size)]
        assert {len(program.steps) for program in programs} == {(size - 1).bit_length()}
        ranks = Ranks(programs, count, size * count)
        ranks.run(chance)
        for rank, result in enumerate(ranks.result):
            assert result == [((rank + turn) % size,) for turn in range(size) for _ in range(count)]


def test_a_chunk_is_taken_once() -> None:
    programs = [halving_doubling(rank, Exchange((0, 1, 2, 3), (4,)), 8, 1000) for rank in range(4)]
    machine = Machine(programs[0], EffectRecorder([]))
    recorder = machine.driver
    assert isinstance(recorder, EffectRecorder)
    recorder.begin(machine)
    later = next(route for route in programs[0].routes.values() if route.step == 2)
    assert machine.take(later, 0, "early")
    assert not machine.take(later, 0, "again")
    assert machine.take_held() == ["early"]


def test_the_last_contribution_may_complete_an_exchange() -> None:
    """It was missing in the first step, all others were held, and nothing is left to send."""
    program = halving_doubling(0, Exchange((0, 1, 2, 3), (2, 2)), 8, 1000)
    first, *later = program.steps
    program = replace(program, steps=(first, *(replace(step, sends=()) for step in later)))
    ranks = Ranks([program], 8, 8)
    (machine,), (recorder,) = ranks.machines, ranks.recorders
    recorder.begin(machine)
    for _ in first.sends:
        machine.was_read()
    for step in reversed(program.steps):
        assert not any(effect[0] == Do.DONE for effect in recorder.effects)
        for route in step.arrivals:
            for index in range(route.lane.num_chunks):
                machine.arrived(route, index, "chunk")
    assert recorder.effects[-1][0] == Do.DONE


@pytest.mark.parametrize(
    ("order", "radices"), [((0, 1, 1), (3,)), ((0, 1, 2), (2,)), ((0, 1, 2, 3), (2, 3)), ((1, 2), (2,))]
)
def test_exchanges_that_do_not_fit_are_refused(order: tuple[int, ...], radices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit each other"):
        Exchange(order, radices)
