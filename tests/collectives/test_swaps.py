"""set_strategy: the cut is each rank's own call; a swap that is refused changes nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.engine.link_table import PeerSender
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    PeerLost,
    SessionClosed,
)
from kfcomm.strategies import Strategy, from_edges
from kfcomm.types import Layout
from tests.conformance import oracle
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, turns, until, works, world

SHORT_S = 0.05


def _generation(comm: Any) -> int:
    return int(comm._group.plans.generation)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_all_strategies_one_after_the_other(size: int) -> None:
    """Each with the bits of its own graphs, from its own generation on."""
    xs = [oracle.data("float32", 5000, rank) for rank in range(size)]
    async with world(size, strategy="star") as comms:
        for number, name in enumerate(strategies.names()):
            await everywhere(comms, lambda comm, name=name: comm.set_strategy(name))
            assert {comm.strategy.name for comm in comms} == {name}
            assert {_generation(comm) for comm in comms} == {number + 1}
            want = oracle.all_reduced("sum", xs, strategies.build(name, comms[0].layout), "x")
            for got in await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "x")):
                assert same_bits(got, want), name


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 4])
async def test_under_load(size: int) -> None:
    """Posts before, between and after the cut, of one step and of two: each runs on the graphs of its own time."""
    xs = [oracle.data("float32", 40, rank) for rank in range(size)]
    steps = ["ring", "clique", "star", "binary_tree"]
    async with world(size, strategy="star") as comms:

        async def main(comm: Any) -> dict[str, Any]:
            local = random.Random(comm.rank)
            handles: dict[str, Any] = {}
            verdicts = []
            for place, name in enumerate(["star", *steps]):
                if place:
                    verdicts.append(comm.set_strategy(name))
                numbers = list(range(30))
                local.shuffle(numbers)
                for number in numbers:
                    key = f"{place}/{name}/{number}"
                    match number % 3:
                        case 0:
                            handles[key] = comm.all_gather(xs[comm.rank][: comm.rank], key, concat=True)
                        case _:
                            handles[key] = comm.all_reduce(xs[comm.rank], key)
                    if local.random() < 0.3:
                        await turns(local.randrange(6))
            results = dict(zip(handles, await asyncio.gather(*handles.values()), strict=True))
            await asyncio.gather(*verdicts)
            return results

        joined = np.concatenate([x[:rank] for rank, x in enumerate(xs)])
        for results in await everywhere(comms, main):
            for key, got in results.items():
                name, number = key.split("/")[1:]
                graphs = strategies.build(name, comms[0].layout)
                want = joined if int(number) % 3 == 0 else oracle.all_reduced("sum", xs, graphs, key)
                assert same_bits(got, want), key
        assert {_generation(comm) for comm in comms} == {len(steps)}


@pytest.mark.asyncio
async def test_two_steps_across_the_cut() -> None:
    """A call whose first step is before the cut ends on the old graphs, also where its second step comes after."""
    async with world(2, strategy="star") as comms:
        for waiting in (0, 1):
            first, second = comms[waiting], comms[1 - waiting]
            x = np.arange(3)
            mine = first.all_gather(x, "k", concat=True)
            cut = first.set_strategy("ring" if waiting else "clique")
            await turns()
            theirs = second.all_gather(x, "k", concat=True)
            assert (await theirs).tolist() == (await mine).tolist() == [0, 1, 2, 0, 1, 2]
            assert not cut.done()
            await asyncio.gather(cut, second.set_strategy("ring" if waiting else "clique"))


@pytest.mark.asyncio
async def test_a_verdict_that_comes_between_the_two_steps() -> None:
    """The graph is long, the agreement short: on some ranks the first step ends before it, on some after."""
    size = 14
    path = from_edges(size, [(rank, rank + 1) for rank in range(size - 1)])
    async with world(size, strategy=path) as comms:
        rows = []
        for comm in comms:
            joined, cut = comm.all_gather([comm.rank], "k", concat=True), comm.set_strategy("star")
            rows.append((joined, cut, comm.all_gather_object(comm.rank)))
        for joined, cut, ranks in rows:
            assert (await joined).tolist() == await ranks == list(range(size))
            await cut


@pytest.mark.asyncio
@pytest.mark.parametrize("are_known", [False, True])
async def test_posts_wait_for_the_verdict_and_can_be_cancelled(are_known: bool) -> None:
    async with world(3, strategy="star") as comms:
        for name in "ab" if are_known else "":
            await everywhere(comms, lambda comm, name=name: comm.all_reduce(np.ones(1), name))
        cuts = [comm.set_strategy("ring") for comm in comms[:2]]
        early = [comm.all_reduce(np.ones(1), "a") for comm in comms[:2]]
        gone = [comm.all_reduce(np.ones(1), "b") for comm in comms[:2]]
        twice = [comm.all_gather(np.ones(1), "c", concat=True) for comm in comms[:2]]
        await turns()
        assert not any(one.done() for one in (*cuts, *early))
        gone[0].cancel()
        twice[1].cancel()
        await turns()
        assert not gone[1].done()
        cuts.append(comms[2].set_strategy("ring"))
        await asyncio.gather(*cuts)
        early.append(comms[2].all_reduce(np.ones(1), "a"))
        gone.append(comms[2].all_reduce(np.ones(1), "b"))
        twice.append(comms[2].all_gather(np.ones(1), "c", concat=True))
        assert [one.tolist() for one in await asyncio.gather(*early)] == [[3.0]] * 3
        outcomes = await asyncio.gather(*gone, return_exceptions=True)
        assert_kinds(outcomes, asyncio.CancelledError, CollectiveAborted, CollectiveAborted)
        outcomes = await asyncio.gather(*twice, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, asyncio.CancelledError, CollectiveAborted)
        await works(comms, "b")
        await everywhere(comms, lambda comm: comm.all_gather(np.ones(comm.rank), "c", concat=True))


USED_AGAIN: dict[str, Any] = {
    "all_reduce": lambda comm, x, **more: comm.all_reduce(x, "all_reduce", op="max", **more),
    "reduce": lambda comm, x, **more: comm.reduce(x, 1, "reduce", **more),
    "broadcast": lambda comm, x, **more: comm.broadcast(x, 2, "broadcast", **more),
    "gather": lambda comm, x, **more: comm.gather(x, 0, "gather", **more),
    "all_gather": lambda comm, x, **more: comm.all_gather(x, "all_gather", **more),
    "reduce_scatter": lambda comm, x, **more: comm.reduce_scatter(x, "reduce_scatter", **more),
    "all_to_all": lambda comm, x, **more: comm.all_to_all(x, "all_to_all", **more),
    "barrier": lambda comm, _: comm.barrier("barrier"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", USED_AGAIN)
async def test_names_used_before_wait_for_the_verdict_too(verb: str) -> None:
    """To a new strategy, and to an earlier one; with ``out``, and with other arrays than before."""
    call = USED_AGAIN[verb]
    xs = [oracle.data("float32", 6, rank).reshape(3, 2) for rank in range(3)]
    async with world(3, strategy="star") as comms:
        want = await everywhere(comms, lambda comm: call(comm, xs[comm.rank]))
        for name in ("ring", "star", "ring"):
            cuts = [comm.set_strategy(name) for comm in comms]
            assert all(comm._group.waits for comm in comms)
            begun = [call(comm, xs[comm.rank]) for comm in comms]
            await asyncio.gather(*cuts)
            got = await asyncio.gather(*begun)
            assert all(one is two is None or np.allclose(one, two) for one, two in zip(got, want, strict=True))
            if verb == "barrier":
                continue
            outs = [np.empty_like(one) if one is not None else None for one in want]
            cuts = [comm.set_strategy("clique" if name == "ring" else "tree") for comm in comms]
            begun = [call(comm, xs[comm.rank], out=out) for comm, out in zip(comms, outs, strict=True)]
            with pytest.raises(ConfigError):
                call(comms[0], xs[0].astype(object))
            await asyncio.gather(*cuts)
            got = await asyncio.gather(*begun)
            assert all(one is two for one, two in zip(got, outs, strict=True))
            assert all(one is two is None or np.allclose(one, two) for one, two in zip(got, want, strict=True))
            refused = await ends(comms[1:], lambda comm: call(comm, xs[comm.rank]))
            assert_kinds(refused, CollectiveAborted, CollectiveAborted)


@pytest.mark.asyncio
async def test_a_close_ends_what_waits_for_a_verdict() -> None:
    async with world(2, strategy="star", aborted=True) as comms:
        await works(comms, "x")
        await everywhere(comms, lambda comm: comm.all_reduce(np.ones(2), "x"))
        cut = comms[0].set_strategy("ring")
        waits = comms[0].all_reduce(np.ones(2), "x")
        await comms[0].close()
        outcomes = await asyncio.gather(cut, waits, return_exceptions=True)
        assert all(isinstance(one, (CollectiveAborted, SessionClosed)) for one in outcomes), outcomes


@pytest.mark.asyncio
async def test_calls_refused_while_a_verdict_is_awaited_keep_their_place() -> None:
    async with world(2) as comms:
        cut = comms[0].set_strategy("ring")
        with pytest.raises(ConfigError):
            comms[0].all_reduce(np.array(["x"]))
        with pytest.raises(ConfigError):
            comms[0].all_gather(1.0, concat=True)
        after = comms[0].all_gather(np.ones(1), concat=True)
        await asyncio.gather(cut, comms[1].set_strategy("ring"))
        outcomes = await ends(
            comms[1:],
            lambda comm: asyncio.gather(comm.barrier(), comm.all_gather([1.0], concat=True), return_exceptions=True),
        )
        assert_kinds(outcomes[0], CollectiveAborted)
        results = await asyncio.gather(after, comms[1].all_gather(np.ones(1), concat=True))
        assert [one.tolist() for one in results] == [[1.0, 1.0]] * 2


@pytest.mark.asyncio
async def test_ranks_that_want_different_graphs() -> None:
    async with world(3, strategy="star") as comms:
        for odd in range(3):
            outcomes = await ends(
                comms, lambda comm, odd=odd: comm.set_strategy("ring" if comm.rank == odd else "clique")
            )
            assert_kinds(outcomes, CollectiveMismatch)
            assert all("ring" in str(one) and "clique" in str(one) for one in outcomes)
            assert {comm.strategy.name for comm in comms} == {"star"}
            assert {_generation(comm) for comm in comms} == {0}
            await works(comms, "k")
        await everywhere(comms, lambda comm: comm.set_strategy("ring"))
        await works(comms, "k")


@pytest.mark.asyncio
async def test_graphs_of_ones_own() -> None:
    edges = [(2, 0), (2, 3), (0, 1)]
    made = from_edges(4, edges)
    xs = [oracle.data("float32", 9, rank) for rank in range(4)]
    async with world(4) as comms:
        for spec in (
            made,
            Graph.from_edges(4, edges),
            GraphPair.of(Graph.from_edges(4, edges)),
            Strategy("mine", made.pairs),
        ):
            await everywhere(comms, lambda comm, spec=spec: comm.set_strategy(spec))
            assert comms[0].strategy.digest == made.digest
            for got in await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "x")):
                assert same_bits(got, oracle.folded("sum", made.pairs[0].reduce, xs))
        outcomes = await ends(comms, lambda comm: comm.set_strategy(from_edges(4, edges if comm.rank else edges[::-1])))
        assert_kinds(outcomes, CollectiveMismatch)
        sub = await everywhere(comms[:2], lambda comm: comm.group([0, 1]))
        assert sub[0].strategy.name == "auto"
        await works(comms)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("rign", "did you mean ring"),
        ("", "known are"),
        (Graph.from_parents([0, 0]), "for 2 ranks, not for 3"),
        (strategies.build("ring", Layout.even(4)), "for 4 ranks"),
        (3, "int"),
    ],
)
async def test_strategies_that_cannot_work(bad: Any, says: str) -> None:
    """The error is this rank's; the others hear of it, the old graphs stay, and the next swap works."""
    async with world(3, strategy="star") as comms:
        with pytest.raises(ConfigError, match=says):
            comms[0].set_strategy(bad)
        outcomes = await ends(comms[1:], lambda comm: comm.set_strategy("ring"))
        assert_kinds(outcomes, CollectiveAborted)
        assert "rank 0 refused" in str(outcomes[0])
        await works(comms)
        await everywhere(comms, lambda comm: comm.set_strategy("ring"))
        await works(comms)
        assert {_generation(comm) for comm in comms} == {2}


@pytest.mark.asyncio
async def test_a_swap_that_times_out_or_is_cancelled() -> None:
    async with world(3, strategy="star") as comms:
        outcomes = await ends(comms[:2], lambda comm: comm.set_strategy("ring", timeout=SHORT_S))
        assert_kinds(outcomes, CollectiveTimeout)
        assert outcomes[0].missing == (2,)
        assert_kinds(await ends(comms[2:], lambda comm: comm.set_strategy("ring")), CollectiveTimeout)
        await works(comms, "k")
        cuts = [comm.set_strategy("ring") for comm in comms[:2]]
        waiting = [comm.all_reduce(np.ones(1, np.int64), "k") for comm in comms[:2]]
        await turns()
        cuts[1].cancel()
        outcomes = await asyncio.gather(*cuts, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, asyncio.CancelledError)
        assert_kinds(await ends(comms[2:], lambda comm: comm.set_strategy("ring")), CollectiveAborted)
        waiting.append(comms[2].all_reduce(np.ones(1, np.int64), "k"))
        assert [one.tolist() for one in await asyncio.gather(*waiting)] == [[3]] * 3
        assert {_generation(comm) for comm in comms} == {0}


@pytest.mark.asyncio
async def test_ranks_that_took_a_verdict_differently_meet_again() -> None:
    """A rank aborts just when the others are done: they have other graphs now, until the next swap."""
    async with world(2, strategy="star") as comms:
        for count in range(1, 12):
            cuts = [comm.set_strategy("ring") for comm in comms]
            await turns(count)
            cuts[count % 2].cancel()
            await asyncio.gather(*cuts, return_exceptions=True)
            await everywhere(comms, lambda comm: comm.set_strategy("clique"))
            assert len({_generation(comm) for comm in comms}) == 1
            await works(comms, "k")


@pytest.mark.asyncio
async def test_swaps_in_a_row_without_waiting() -> None:
    async with world(3) as comms:
        cuts = [comm.set_strategy(name) for comm in comms for name in ("ring", "star", "clique", "tree")]
        await asyncio.gather(*cuts)
        assert {comm.strategy.name for comm in comms} == {"tree"}
        assert {_generation(comm) for comm in comms} == {4}
        # One in the middle fails: those before and after it hold.
        rows = [
            [comm.set_strategy("ring"), comm.set_strategy("star" if comm.rank else "tree"), comm.set_strategy("clique")]
            for comm in comms
        ]
        for first, middle, last in rows:
            await first
            with pytest.raises(CollectiveMismatch):
                await middle
            await last
        assert {comm.strategy.name for comm in comms} == {"clique"}
        await works(comms)


@pytest.mark.asyncio
async def test_groups_swap_by_themselves() -> None:
    async with world(4, strategy="star") as comms:
        low = await everywhere(comms[:2], lambda comm: comm.group([0, 1], "low"))
        high = await everywhere(comms[2:], lambda comm: comm.group([2, 3], "high"))
        cuts = [comm.set_strategy("ring") for comm in comms] + [one.set_strategy("clique") for one in low]
        await asyncio.gather(*cuts)
        names = [{one.strategy.name for one in ranks} for ranks in (comms, low, high)]
        assert names == [{"ring"}, {"clique"}, {"star"}]
        later = await everywhere(comms, lambda comm: comm.group([0, 1, 2, 3], "later"))
        assert {one.strategy.name for one in later} == {"ring"}
        for ranks in (comms, low, high, later):
            await works(ranks, "k")


@pytest.mark.asyncio
async def test_a_peer_is_lost_or_leaves_during_a_swap() -> None:
    async with world(3, aborted=True) as comms:
        cuts = [comm.set_strategy("ring") for comm in comms[:2]]
        later = [comm.all_reduce(np.ones(1), "k") for comm in comms[:2]]
        await turns()
        comms.kill(2)
        assert_kinds(await asyncio.gather(*cuts, *later, return_exceptions=True), PeerLost)
    async with world(2, aborted=True) as comms:
        cut = comms[0].set_strategy("ring")
        later = [comms[0].all_reduce(np.ones(1), "k"), comms[0].all_gather(np.ones(1), "c", concat=True)]
        closing = asyncio.ensure_future(comms[0].close())
        outcomes = await asyncio.gather(cut, *later, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, SessionClosed, SessionClosed)
        await until(closing.done)


@pytest.mark.asyncio
@pytest.mark.parametrize("charged", [0, 1])
@pytest.mark.parametrize("generation", [0, 1])
async def test_withdrawn_chunks_return_their_credit(generation: int, charged: int) -> None:
    """A chunk's header holds both in one number: its generation and whether it was charged."""
    async with world(2, strategy="star", aborted=True) as comms:
        for _ in range(generation):
            await everywhere(comms, lambda comm: comm.set_strategy("ring"))
        await works(comms, "x")
        engine = comms[0]._session.engine
        state = engine.links.by_peer[1].state
        handle = comms[0].all_reduce(np.ones(2), "k")
        await turns()
        (operation,) = engine.router.live
        (lane,) = list(operation.program.lanes.values())[:1]
        queued = (0, operation.key.id, operation.seq, 0, lane.number, 0, 0, 2 * generation + charged)
        before = state.window.nbytes, state.window.headers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PeerSender, "withdraw", lambda *_: [queued])
            handle.cancel()
        nbytes = operation.nbytes_sent(lane.number, 0, 0)
        assert (state.window.nbytes, state.window.headers) == (before[0] + nbytes * charged, before[1] + charged)
        state.window.give(-nbytes * charged, -charged)
