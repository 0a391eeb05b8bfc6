"""A strategy for one call: graphs of that call alone, whatever is in force, in every verb, beside ``set_strategy``."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from kfcomm.strategies import from_edges
from kfcomm.types import Layout
from tests.conformance import oracle
from tests.conformance.verb_table import VERBS, Row, inputs
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, turns, works, world

NAMES = ["ring", "star", "binary_tree", "clique", "direct", "auto"]
RULES = {"<=1KiB": "star", "else": "ring"}


def _built(spec: Any, comm: Any) -> Any:
    return comm.strategy if spec is None else strategies.build(spec, comm.layout)


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [7, 5000])
async def test_call_follows_its_own_graphs_and_the_next_one_those_in_force(length: int) -> None:
    """The bits of sums of random numbers tell the graphs. Each is used often enough to be cached."""
    xs = [oracle.data("float32", length, rank) for rank in range(5)]
    path = from_edges(5, [(3, 0), (0, 4), (4, 1), (1, 2)])
    async with world(5, strategy="star") as comms:
        for spec in [*NAMES, RULES, path, path.pairs[0], path.pairs[0].reduce, None] * 4:
            want = oracle.all_reduced("sum", xs, _built(spec, comms[0]), "x")
            results = await everywhere(comms, lambda c, spec=spec: c.all_reduce(xs[c.rank], "x", strategy=spec))
            assert all(same_bits(one, want) for one in results), spec
        assert {comm.strategy.name for comm in comms} == {"star"}


@pytest.mark.asyncio
async def test_messages_go_along_the_graph_of_the_call() -> None:
    chain = from_edges(4, [(0, 1), (1, 2), (2, 3)])
    async with world(4, strategy="star") as comms:
        await everywhere(comms, lambda c: c.all_reduce(np.ones(100_000), "x", strategy=chain))
        for comm in comms:
            peers = {one.rank for one in comm.statistics().peers if one.sent_nbytes > 100_000}
            assert peers == {rank for rank in (comm.rank - 1, comm.rank + 1) if 0 <= rank < 4}


@pytest.mark.asyncio
@pytest.mark.parametrize("given", ["direct", "ring"])
async def test_strategy_in_force_may_be_given_too(given: str) -> None:
    """Ranks compare graphs, whether they were set or given with the call."""
    async with world(3, strategy=given) as comms:
        for _ in range(4):
            results = await everywhere(
                comms, lambda c: c.all_reduce([1.0, c.rank], "x", strategy=given if c.rank else None)
            )
            assert [one.tolist() for one in results] == [[3, 3]] * 3


def _called(comm: Any, row: Row, name: str, strategy: Any) -> Any:
    size = comm.size
    given = row.give(inputs(size, 5, 0)[comm.rank], comm.rank, size)
    data = {} if row.parameter is None else {row.parameter: given}
    return getattr(comm, row.verb)(**data, **row.options, name=name, strategy=strategy)


@pytest.mark.asyncio
@pytest.mark.parametrize("row", [row for row in VERBS if row.verb != "all_to_all"], ids=lambda row: row.name)
async def test_ranks_that_disagree_hear_of_both_strategies(row: Row) -> None:
    """Of two, and of one and none; also under a name that has a cached plan, or a slot."""
    async with world(3, strategy="direct") as comms:
        for others, uses in ((None, 0), ("binary_tree", 0), (None, 4), ("binary_tree", 4)):
            name = f"{others} {uses}"
            for _ in range(uses):
                await everywhere(comms, lambda c, name=name, others=others: _called(c, row, name, others))
            outcomes = await ends(
                comms, lambda c, name=name, others=others: _called(c, row, name, "ring" if c.rank == 2 else others)
            )
            assert_kinds(outcomes, CollectiveMismatch)
            for one in outcomes:
                assert "strategy ring" in str(one)
                assert f"strategy {others or 'direct'}" in str(one)
        await works(comms)


@pytest.mark.asyncio
@pytest.mark.parametrize("row", VERBS, ids=lambda row: row.name)
async def test_strategy_that_cannot_be_fails_the_call_everywhere(row: Row) -> None:
    specs = {
        "rnig": "did you mean ring",
        from_edges(2, [(0, 1)]): "is for 2 ranks, not for 3",
        7: "a strategy is a name",
        "<=1KiB: star": "rules need an 'else'",
    }
    async with world(3) as comms:
        for number, (spec, why) in enumerate(specs.items()):
            outcomes = await ends(
                comms, lambda c, n=number, spec=spec: _called(c, row, f"x{n}", spec if c.rank == 1 else "ring")
            )
            assert_kinds(outcomes, CollectiveAborted, ConfigError, CollectiveAborted)
            assert all(why in str(one) for one in outcomes), outcomes
        await works(comms)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_reduce", "all_reduce_many"])
async def test_adasum_goes_along_the_graphs_too(verb: str) -> None:
    xs = [oracle.data("float32", 300, rank) for rank in range(3)]
    async with world(3) as comms:

        def call(comm: Any, **options: Any) -> Any:
            x = xs[comm.rank]
            return getattr(comm, verb)(x if verb == "all_reduce" else {"a": x}, "x", op="adasum", **options)

        want = (await everywhere(comms, call))[0]
        for got in await everywhere(comms, lambda c: call(c, strategy="binary_tree")):
            np.testing.assert_equal(got, want)
        outcomes = await ends(comms, lambda c: call(c, strategy="ring" if c.rank else "star"))
        assert_kinds(outcomes, CollectiveMismatch)
        outcomes = await ends(comms, lambda c: call(c, strategy=None if c.rank else "no such"))
        assert_kinds(outcomes, ConfigError, CollectiveAborted, CollectiveAborted)
        for got in await everywhere(comms, lambda c: call(c, strategy="star")):
            np.testing.assert_equal(got, want)


@pytest.mark.asyncio
async def test_shared_result_of_a_strategy() -> None:
    async with world(3, strategy="ring") as comms:
        for _ in range(3):
            got = await everywhere(comms, lambda c: c.all_reduce(np.ones(400_000), "x", shared=True, strategy="direct"))
            assert all((one == 3).all() and not one.flags.writeable for one in got)


@pytest.mark.asyncio
async def test_persistent_calls_keep_their_strategy() -> None:
    """Across changes of the one in force, to and fro."""
    xs = [oracle.data("float32", 5000, rank) for rank in range(4)]
    async with world(4, strategy="star") as comms:
        prepared = {
            spec: [comm.all_reduce_init(xs[comm.rank], f"x {spec}", strategy=spec) for comm in comms]
            for spec in ("ring", "direct")
        }
        for force in ("star", "clique", "star", "ring"):
            await everywhere(comms, lambda c, force=force: c.set_strategy(force))
            for _ in range(3):
                for spec, calls in prepared.items():
                    want = oracle.all_reduced("sum", xs, strategies.build(spec, comms[0].layout), f"x {spec}")
                    for got in await everywhere(comms, lambda c, calls=calls: calls[c.rank].start()):
                        assert same_bits(got, want), (force, spec)


@pytest.mark.asyncio
async def test_monitored_calls_are_recorded_under_their_own_strategy() -> None:
    async with world(3, strategy="star") as comms:
        for spec, times in (("ring", 2), (None, 3), ("binary_tree", 4)):
            for _ in range(times):
                await everywhere(comms, lambda c, s=spec: c.monitored_all_reduce(np.ones(9), "x", strategy=s))
        for comm in comms:
            assert {one.name: one.count for one in comm.statistics().strategies} == {
                "ring": 2, "star": 3, "binary_tree": 4,
            }  # fmt: skip


@pytest.mark.asyncio
async def test_groups_build_the_strategy_for_their_own_ranks() -> None:
    async with world(5) as comms:
        parts = await everywhere(comms, lambda c: c.split(c.rank % 2))

        def call(comm: Any) -> Any:
            return parts[comm.rank].all_reduce(np.full(3, comm.rank), "x", strategy="binary_tree")

        for _ in range(3):
            assert [one.tolist()[0] for one in await everywhere(comms, call)] == [6, 4, 6, 4, 6]
        await everywhere(comms, lambda c: parts[c.rank].close())


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(4))
async def test_random_programs_beside_changes_of_the_strategy(size: int, seed: int) -> None:
    """Random verbs of one step and two, with and without a strategy, in each rank's order, some while one is set."""
    program = _program(random.Random(seed * 10 + size), size)
    async with world(size, strategy="star") as comms:

        async def main(comm: Any) -> dict[str, Any]:
            local = random.Random(f"{seed} {comm.rank}")
            handles: dict[str, Any] = {}
            verdicts = []

            async def uses(name: str, calls: list[_Call]) -> None:
                """All but the last are awaited: that is in flight when the next strategy is set."""
                await turns(local.randrange(9))
                for use, call in enumerate(calls):
                    if use:
                        await handles[f"{name}#{use - 1}"]
                    handles[f"{name}#{use}"] = call(comm, name)

            for force, calls in program:
                verdicts.append(comm.set_strategy(force))
                await asyncio.gather(*(uses(name, calls[name]) for name in calls))
            results = dict(zip(handles, await asyncio.gather(*handles.values()), strict=True))
            await asyncio.gather(*verdicts)
            return results

        forces = {name: force for force, calls in program for name in calls}
        for rank, results in enumerate(await everywhere(comms, main)):
            for key, got in results.items():
                name, use = key.split("#")
                call = next(calls[name] for _, calls in program if name in calls)[int(use)]
                np.testing.assert_equal(got, call.expected(rank, name, forces[name]), key)


class _Call:
    """A call of a random program."""

    def __init__(self, verb: str, spec: Any, length: int, size: int) -> None:
        self.verb, self.spec, self.length, self.size = verb, spec, length, size
        self.xs = [oracle.data("float32", length, rank + length) for rank in range(size)]

    def __call__(self, comm: Any, name: str) -> Any:
        x = self.xs[comm.rank]
        match self.verb:
            case "concat":
                return comm.all_gather(x[: comm.rank], name, concat=True, strategy=self.spec)
            case "many":
                return comm.all_reduce_many({"a": x, "b": x[:3]}, name, strategy=self.spec)
            case "list":
                return comm.broadcast([x, x[:2]], 1, name, strategy=self.spec)
            case "scatter":
                return comm.scatter(x, 1, name, strategy=self.spec)
            case _:
                return comm.all_reduce(x, name, strategy=self.spec)

    def expected(self, rank: int, name: str, force: str) -> Any:
        graphs = strategies.build(self.spec or force, _layout(self.size))
        match self.verb:
            case "concat":
                return np.concatenate([x[:at] for at, x in enumerate(self.xs)])
            case "many":
                packed = [np.concatenate([x, x[:3]]) for x in self.xs]
                both = oracle.all_reduced("sum", packed, graphs, f"{name}\0many")
                return {"a": both[: self.length], "b": both[self.length :]}
            case "list":
                return [self.xs[1], self.xs[1][:2]]
            case "scatter":
                return oracle.scattered(self.xs[1], self.size)[rank]
            case _:
                return oracle.all_reduced("sum", self.xs, graphs, name)


def _layout(size: int) -> Any:
    return Layout((0,) * size)


def _program(drawn: random.Random, size: int) -> list[tuple[str, dict[str, list[_Call]]]]:
    """The strategies set one after the other, and the calls by name that are made under each."""
    verbs = ["all_reduce", "all_reduce", "concat", "many", "list", "scatter"]
    found: list[tuple[str, dict[str, list[_Call]]]] = []
    for place in range(5):
        calls: dict[str, list[_Call]] = {}
        for number in range(8):
            verb, length = drawn.choice(verbs), drawn.choice([5, 40, 6000])
            if verb == "many" and length == 6000:
                length = 40
            repeated = drawn.choice([1, 4])
            specs = [drawn.choice([None, *NAMES]) for _ in range(repeated)]
            calls[f"{place}/{number}"] = [_Call(verb, spec, length, size) for spec in specs]
        found.append((drawn.choice(NAMES), calls))
    return found
