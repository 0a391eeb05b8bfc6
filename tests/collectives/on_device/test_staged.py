"""Collectives of device memory through the host: every verb, many at once, and whatever fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices.host import HostDevice
from kfcomm.collectives.on_device import staged
from kfcomm.collectives.on_device.segments import MAX_SEGMENTS
from kfcomm.engine import operation as operations
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, InternalError, PeerLost
from kfcomm.types import Op, Verb
from tests.collectives.on_device.staging import SEGMENT_NBYTES, Call, Pool, Rank, at_rest, ended, ranks_of
from tests.conformance.worlds import assert_kinds, everywhere, same_bits, settled, turns, until, works, world

PER_SEGMENT = SEGMENT_NBYTES // 4
SIZES = [0, 1, PER_SEGMENT, PER_SEGMENT + 1, 2 * PER_SEGMENT - 1, 2 * PER_SEGMENT, 11 * PER_SEGMENT + 3]


def data(rank: int, count: int, dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(rank).random(count) * 100).astype(dtype)


def posted(
    rank: Rank, verb: Verb, key: str, source: Any, target: Any, shape: Any = None, **options: Any
) -> tuple[Call, Any]:
    """A call with one part, and its target on the device."""
    x = rank.array(source)
    y = None if target is None else rank.array(target)
    return rank.call(verb, key, [x], [y], shape, **options).post(), y


# -------------------------------------------------------------------- verbs


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", SIZES)
async def test_all_reduce(size: int, count: int) -> None:
    async with world(size) as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(data(rank.rank, count), "k") for rank in ranks]
        await ended([call for call, _ in made])
        expected = await everywhere(comms, lambda comm: comm.all_reduce(data(comm.rank, count)))
        for rank, (call, target) in zip(ranks, made, strict=True):
            assert (call.num_enqueued, call.num_done) == (1, 1)
            assert np.allclose(rank.got(target), expected[0])
            assert same_bits(rank.got(target), ranks[0].got(made[0][1]))
        await at_rest(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("count", SIZES)
async def test_reduce(size: int, count: int) -> None:
    root = size - 1
    async with world(size) as comms:
        ranks = ranks_of(comms)
        made = [
            posted(rank, Verb.REDUCE, "k", data(rank.rank, count), np.zeros(count, np.float32) if rank.rank == root
            else None, op=Op.MAX, root=root)
            for rank in ranks
        ]  # fmt: skip
        await ended([call for call, _ in made])
        expected = np.max([data(rank, count) for rank in range(size)], axis=0)
        assert same_bits(ranks[root].got(made[root][1]), expected)
        assert all((call.num_enqueued, call.num_done) == (1, 1) for call, _ in made)
        await at_rest(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("num_pinned", [0, 1000])
async def test_broadcast(size: int, count: int, num_pinned: int) -> None:
    root = size // 2
    async with world(size) as comms:
        ranks = [Rank(comm, pool=Pool(num_pinned)) for comm in comms]
        made = [
            posted(rank, Verb.BROADCAST, "k", data(rank.rank, count), np.zeros(count, np.float32), root=root)
            for rank in ranks
        ]
        await ended([call for call, _ in made])
        assert all(same_bits(rank.got(y), data(root, count)) for rank, (_, y) in zip(ranks, made, strict=True))
        await at_rest(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 5, 3 * PER_SEGMENT])
async def test_verbs_that_go_whole(size: int, count: int) -> None:
    async with world(size) as comms:
        ranks = ranks_of(comms)
        inputs = np.stack([data(rank, count) for rank in range(size)])
        rows = np.stack([data(rank, count * size).reshape(size, count) for rank in range(size)])
        zeros = partial(np.zeros, dtype=np.float32)
        gathered = [posted(rank, Verb.ALL_GATHER, "a", inputs[rank.rank], zeros(count * size)) for rank in ranks]
        on_root = [
            posted(rank, Verb.GATHER, "g", inputs[rank.rank], None if rank.rank else zeros(count * size), root=0)
            for rank in ranks
        ]
        scattered = [
            posted(rank, Verb.REDUCE_SCATTER, "r", rows[rank.rank].reshape(-1), zeros(count), (size, count), op=Op.AVG)
            for rank in ranks
        ]
        exchanged = [
            posted(rank, Verb.ALL_TO_ALL, "t", rows[rank.rank].reshape(-1), zeros(count * size), (size, count))
            for rank in ranks
        ]
        await ended([call for made in (gathered, on_root, scattered, exchanged) for call, _ in made])
        assert same_bits(ranks[0].got(on_root[0][1]), inputs.reshape(-1))
        for rank in ranks:
            mine = rank.rank
            assert same_bits(rank.got(gathered[mine][1]), inputs.reshape(-1))
            assert np.allclose(rank.got(scattered[mine][1]), rows[:, mine].mean(axis=0, dtype=np.float32))
            assert same_bits(rank.got(exchanged[mine][1]), rows[:, mine].reshape(-1))
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_rows_that_cannot_be_shared_out_evenly() -> None:
    async with world(3) as comms:
        ranks = ranks_of(comms)
        x = np.arange(14, dtype=np.int64)
        made = [
            posted(rank, Verb.REDUCE_SCATTER, "k", x, np.zeros(2 * rows, np.int64), (7, 2), op=Op.SUM)
            for rank, rows in zip(ranks, (3, 2, 2), strict=True)
        ]
        await ended([call for call, _ in made])
        assert np.concatenate([r.got(y) for r, (_, y) in zip(ranks, made, strict=True)]).tolist() == [
            3 * i for i in range(14)
        ]
        await at_rest(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.complex128])
async def test_dtypes(dtype: Any) -> None:
    count = 3 * PER_SEGMENT + 1
    async with world(3) as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(np.full(count, rank.rank + 1, dtype), "k") for rank in ranks]
        await ended([call for call, _ in made])
        assert all(same_bits(rank.got(y), np.full(count, 6, dtype)) for rank, (_, y) in zip(ranks, made, strict=True))
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_in_place() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        xs = [rank.array(data(rank.rank, 5 * PER_SEGMENT)) for rank in ranks]
        calls = [rank.call(Verb.ALL_REDUCE, "k", [x], [x], op=Op.SUM).post() for rank, x in zip(ranks, xs, strict=True)]
        await ended(calls)
        expected = data(0, 5 * PER_SEGMENT) + data(1, 5 * PER_SEGMENT)
        assert all(same_bits(rank.got(x), expected) for rank, x in zip(ranks, xs, strict=True))
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_several_parts_go_as_one_vector() -> None:
    counts = [3, 0, PER_SEGMENT, 7, 2 * PER_SEGMENT]
    async with world(2) as comms:
        ranks = ranks_of(comms)
        calls, targets = [], []
        for rank in ranks:
            xs = [rank.array(np.full(count, index, np.float32)) for index, count in enumerate(counts)]
            ys = [rank.array(np.zeros(count, np.float32)) for count in counts]
            calls.append(rank.call(Verb.ALL_REDUCE, "k", xs, ys, (sum(counts),), op=Op.SUM).post())
            targets.append(ys)
        await ended(calls)
        for rank, ys in zip(ranks, targets, strict=True):
            for index, (count, y) in enumerate(zip(counts, ys, strict=True)):
                assert same_bits(rank.got(y), np.full(count, 2 * index, np.float32))
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_some_ranks_have_their_arrays_on_the_host() -> None:
    async with world(3) as comms:
        ranks = [Rank(comm, device=HostDevice() if comm.rank == 1 else None) for comm in comms]
        made = [rank.all_reduce(data(rank.rank, 5000), "k", memory="") for rank in ranks]
        await ended([call for call, _ in made])
        assert same_bits(ranks[1].got(made[1][1]), ranks[0].got(made[0][1]))
        await at_rest(ranks)


# -------------------------------------------------------------------- order, strategies, priorities


@pytest.mark.asyncio
async def test_segments_are_few_at_a_time_and_overlap() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        ranks[1].device.hold(ranks[1].stream)  # it is not ready
        made = [rank.all_reduce(data(rank.rank, 20 * PER_SEGMENT), "k") for rank in ranks]
        await turns()
        assert [rank.pool.num_out for rank in ranks] == [staged.WINDOW, staged.WINDOW]
        assert len(comms[0]._group.engine.in_flight()) == 1 + staged.WINDOW
        assert len(comms[1]._group.engine.in_flight()) == 1
        assert not made[0][0].result.done()
        await asyncio.to_thread(ranks[1].device.release, ranks[1].stream)
        await ended([call for call, _ in made])
        assert max(rank.pool.most for rank in ranks) == staged.WINDOW
        assert same_bits(ranks[0].got(made[0][1]), ranks[1].got(made[1][1]))
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_the_result_is_there_on_the_callers_stream_before_the_copies_are_done() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(data(rank.rank, 10), "k") for rank in ranks]
        await turns(1)
        for rank in ranks:
            rank.device.hold_copies()
        await asyncio.gather(*(call.result for call, _ in made))
        assert not any(call.ended.done() for call, _ in made)
        assert all(rank.pool.num_out == 1 for rank in ranks)
        for rank in ranks:
            rank.device.release_copies()
        await ended([call for call, _ in made])
        await at_rest(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_pinned", [0, 3])
async def test_many_at_once_in_opposite_orders_with_a_tiny_pool(num_pinned: int) -> None:
    keys = [f"k{number}" for number in range(150)]
    count = 6 * PER_SEGMENT + 5
    async with world(3) as comms:
        ranks = [Rank(comm, pool=Pool(num_pinned)) for comm in comms]
        made: dict[tuple[int, str], tuple[Call, Any]] = {}
        for rank in ranks:
            order = list(keys) if rank.rank == 0 else keys[::-1] if rank.rank == 1 else random.sample(keys, len(keys))
            for key in order:
                made[rank.rank, key] = rank.all_reduce(np.full(count, int(key[1:]) + rank.rank, np.int64), key)
        await ended([call for call, _ in made.values()])
        for (rank, key), (_, target) in made.items():
            assert (ranks[rank].got(target) == 3 * int(key[1:]) + 3).all()
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_waiting_for_one_stream_holds_up_no_other_stream() -> None:
    """Calls on two streams: one stream continues only when the call on the other is done, on all ranks."""
    async with world(2) as comms:
        ranks = ranks_of(comms, window=2)
        slow = [rank.device.stream() for rank in ranks]
        for rank, stream in zip(ranks, slow, strict=True):
            rank.device.hold(stream)
        held, going = [], []
        for rank, stream in zip(ranks, slow, strict=True):
            going.append(rank.all_reduce(data(0, 9 * PER_SEGMENT), "going"))
            rank.stream, usual = stream, rank.stream
            held.append(rank.all_reduce(data(0, 9 * PER_SEGMENT), "held"))
            rank.stream = usual
            going.append(rank.all_reduce(data(0, 9 * PER_SEGMENT), "going, too"))
        await ended([call for call, _ in going])
        assert not any(call.ended.done() for call, _ in held)
        for rank, stream in zip(ranks, slow, strict=True):
            rank.device.release(stream)
        await ended([call for call, _ in held])
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_a_later_call_on_the_same_stream_holds_up_no_earlier_one() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms, window=2)
        first = [rank.all_reduce(data(rank.rank, 9 * PER_SEGMENT), "first") for rank in ranks]
        for rank in ranks:
            rank.device.hold(rank.stream)
        second = [rank.all_reduce(data(rank.rank, 9 * PER_SEGMENT), "second") for rank in ranks]
        await asyncio.gather(*(call.result for call, _ in first))
        await ended([call for call, _ in first])
        for rank in ranks:
            rank.device.release(rank.stream)
        await ended([call for call, _ in second])
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_gates_of_streams_that_come_no_more_are_let_go() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        for _ in range(2 * staged.MAX_GATES):
            made = []
            for rank in ranks:
                rank.stream = rank.device.stream()
                made.append(rank.all_reduce(data(rank.rank, 5), "k")[0])
            await ended(made)
        assert all(len(rank.path._gates) == staged.MAX_GATES for rank in ranks)
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_calls_of_one_key_go_in_their_order() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        counts = [5 * PER_SEGMENT, 1, 0, 3 * PER_SEGMENT, 7]
        made = [[rank.all_reduce(np.full(n, i), "k") for i, n in enumerate(counts)] for rank in ranks]
        await ended([call for calls in made for call, _ in calls])
        for rank, calls in zip(ranks, made, strict=True):
            for index, (_, target) in enumerate(calls):
                assert (rank.got(target) == 2 * index).all()
        assert ranks[0].group.engine.router.num_uses(ranks[0].path.view.id, "k") == 4 * MAX_SEGMENTS + 1
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_the_strategy_changes_between_calls() -> None:
    async with world(3, strategy="star") as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(data(rank.rank, 5000), "k") for rank in ranks]
        swaps = [comm.set_strategy("ring") for comm in comms]
        await asyncio.gather(*swaps)
        made += [rank.all_reduce(data(rank.rank, 5000), "k") for rank in ranks]
        await ended([call for call, _ in made])
        expected = sum(data(rank, 5000) for rank in range(3))
        for rank, (_, target) in zip([*ranks, *ranks], made, strict=True):
            assert np.allclose(rank.got(target), expected)
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_ranks_whose_strategies_have_another_generation() -> None:
    """The head says nothing of strategies; the segments do."""
    async with world(2, strategy="star") as comms:
        ranks = ranks_of(comms)
        early = ranks[0].call(
            Verb.ALL_REDUCE, "k", [ranks[0].array(data(0, 9))], [ranks[0].array(data(0, 9))], op=Op.SUM
        )
        early.post()
        await asyncio.gather(*(comm.set_strategy("ring") for comm in comms))
        late, _ = ranks[1].all_reduce(data(1, 9), "k")
        assert_kinds(await ended([early, late]), CollectiveMismatch)
        assert "strategy star" in str(late.error)
        assert "strategy ring" in str(late.error)
        await at_rest(ranks)
        await works(comms)


@pytest.mark.asyncio
async def test_priorities_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    make = operations.Operation.__init__

    def noted(self: operations.Operation, *args: Any, **options: Any) -> None:
        if isinstance(self, operations.Operation) and options.get("priority"):
            seen.append(options["priority"])
        make(self, *args, **options)

    monkeypatch.setattr(operations.Operation, "__init__", noted)
    async with world(2) as comms:
        ranks = ranks_of(comms)
        await ended([rank.all_reduce(data(rank.rank, 3 * PER_SEGMENT), "k", priority=7)[0] for rank in ranks])
        assert seen == [7] * 6
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_results_are_the_same_bits_again() -> None:
    async with world(3) as comms:
        ranks = ranks_of(comms)
        results = []
        for _ in range(2):
            made = [rank.all_reduce(data(rank.rank, 9 * PER_SEGMENT + 7), "k") for rank in ranks]
            await ended([call for call, _ in made])
            results += [rank.got(target) for rank, (_, target) in zip(ranks, made, strict=True)]
        assert all(same_bits(result, results[0]) for result in results)
        await at_rest(ranks)


# -------------------------------------------------------------------- failures


async def usable(ranks: list[Rank], key: str = "k") -> None:
    """The key still works, and nothing is left of what failed."""
    made = [rank.all_reduce(np.ones(5 * PER_SEGMENT, np.float32), key) for rank in ranks]
    await ended([call for call, _ in made])
    for rank, (_, target) in zip(ranks, made, strict=True):
        assert (rank.got(target) == len(ranks)).all()
    await at_rest(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [10 * PER_SEGMENT, 1])
async def test_ranks_disagree_about_the_shape(count: int) -> None:
    async with world(3) as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(np.ones(count + (rank.rank == 2) * 3 * PER_SEGMENT, np.float32), "k") for rank in ranks]
        outcomes = await ended([call for call, _ in made])
        assert_kinds(outcomes, CollectiveMismatch)
        assert "shape" in str(outcomes[0])
        await usable(ranks)


@pytest.mark.asyncio
async def test_segments_alike_of_calls_that_differ() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        made = [
            posted(rank, Verb.ALL_REDUCE, "k", np.ones(10), np.ones(10), (10,) if rank.rank else (2, 5), op=Op.SUM)[0]
            for rank in ranks
        ]
        assert_kinds(await ended(made), CollectiveMismatch)
        await usable(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("pinned", [True, False])
async def test_cancelled_after_so_many_turns(turn: int, pinned: bool) -> None:
    async with world(3) as comms:
        ranks = [Rank(comm, pool=Pool(1 << 30 if pinned else 0)) for comm in comms]
        made = [rank.all_reduce(data(rank.rank, 40 * PER_SEGMENT), "k")[0] for rank in ranks]
        await turns(turn)
        made[1].cancel()
        assert_kinds(await ended(made), CollectiveAborted)
        await usable(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("held", ["caller", "copies"])
@pytest.mark.parametrize("pinned", [True, False])
async def test_cancelled_while_the_device_is_slow(held: str, pinned: bool) -> None:
    """Blocks go back when the copies are done, and not before."""
    async with world(2) as comms:
        ranks = [Rank(comm, pool=Pool(1 << 30 if pinned else 0)) for comm in comms]
        device = ranks[1].device
        if held == "caller":
            device.hold(ranks[1].stream)
        else:
            device.hold_copies()
        made = [rank.all_reduce(data(rank.rank, 9 * PER_SEGMENT), "k")[0] for rank in ranks]
        await turns()
        made[0].cancel()
        assert_kinds(await ended(made), CollectiveAborted)
        await turns()
        assert (ranks[0].pool.num_out, len(ranks[0].path)) == (0, 0)
        assert ranks[1].pool.num_out == staged.WINDOW
        assert len(ranks[1].path) == 1
        if held == "caller":
            device.release(ranks[1].stream)
        else:
            device.release_copies()
        await usable(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_one_of_several_calls_of_a_key_is_cancelled(which: int) -> None:
    """The others go on, whether they are before it or behind it."""
    async with world(2) as comms:
        ranks = ranks_of(comms)
        ranks[1].device.hold(ranks[1].stream)
        made = [[rank.all_reduce(np.full(9 * PER_SEGMENT, i), "k") for i in range(3)] for rank in ranks]
        await turns()
        made[0][which][0].cancel()
        assert_kinds(await ended([calls[which][0] for calls in made]), CollectiveAborted)
        ranks[1].device.release(ranks[1].stream)
        going = [(rank, i, calls[i]) for rank, calls in zip(ranks, made, strict=True) for i in range(3) if i != which]
        assert await ended([call for _, _, (call, _) in going]) == [None] * 4
        assert all((rank.got(target) == 2 * i).all() for rank, i, (_, target) in going)
        await usable(ranks)


@pytest.mark.asyncio
async def test_no_copy_begins_after_the_end() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        ranks[1].device.hold(ranks[1].stream)
        made = [rank.all_reduce(np.ones(9 * PER_SEGMENT), "k") for rank in ranks]
        await turns()
        made[0][0].cancel()
        ranks[1].device.release(ranks[1].stream)
        await ended([call for call, _ in made])
        await at_rest(ranks)
        assert all((rank.got(target) == 0).all() for rank, (_, target) in zip(ranks, made, strict=True))


@pytest.mark.asyncio
async def test_a_rank_that_never_calls_is_named_by_the_head() -> None:
    async with world(3) as comms:
        ranks = ranks_of(comms)
        made = [
            rank.call(Verb.ALL_REDUCE, "k", [rank.array(data(0, 5000))], [rank.array(data(0, 5000))], op=Op.SUM)
            for rank in ranks
        ]
        for call in made[:2]:
            call.post(timeout_s=0.05 if call is made[0] else None)
        outcomes = await ended(made[:2])
        assert_kinds(outcomes, CollectiveTimeout)
        assert outcomes[0].missing == (2,)
        assert_kinds(await ended([made[2].post()]), CollectiveTimeout)
        await usable(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("told", [True, False])
async def test_a_call_that_one_rank_refused(told: bool) -> None:
    """It begins on some ranks only; the numbers of the next agree all the same."""
    async with world(3) as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(data(rank.rank, 5000), "k")[0] for rank in ranks[:2]]
        if told:
            await turns()
        ranks[2].group.refuse("k", ValueError("no"))
        if told:
            ranks[2].path.never_began("k", ranks[2].group.last_seq("k"))
        assert_kinds(await ended(made), CollectiveAborted)
        if told:
            await settled(comms)
        await usable(ranks)


@pytest.mark.asyncio
async def test_a_use_that_begins_after_a_later_one() -> None:
    """It would take the number of another call."""
    async with world(2) as comms:
        ranks = ranks_of(comms)
        late = [
            rank.call(Verb.ALL_REDUCE, "k", [rank.array(data(0, 9))], [rank.array(data(0, 9))], op=Op.SUM)
            for rank in ranks
        ]
        for rank, call in zip(ranks, late, strict=True):
            begin, rank.path.begin = rank.path.begin, lambda _: None
            call.post()
            rank.path.begin = begin
        await ended([rank.all_reduce(data(rank.rank, 9), "k")[0] for rank in ranks])
        for rank, call in zip(ranks, late, strict=True):
            rank.path.begin(call)
        outcomes = await ended(late)
        assert_kinds(outcomes, InternalError)
        assert "began after a later one" in str(outcomes[0])
        await usable(ranks)


@pytest.mark.asyncio
async def test_a_lost_peer() -> None:
    async with world(3, quiet=False) as comms:
        ranks = ranks_of(comms)
        ranks[2].device.hold(ranks[2].stream)
        made = [rank.all_reduce(data(rank.rank, 9 * PER_SEGMENT), "k")[0] for rank in ranks]
        await turns()
        comms.kill(2)
        assert_kinds(await ended(made[:2]), PeerLost)
        await at_rest(ranks[:2])
        ranks[2].device.release(ranks[2].stream)


@pytest.mark.asyncio
async def test_the_host_has_no_memory() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        ranks[1].pool.fails = True
        made = [rank.all_reduce(data(rank.rank, 9 * PER_SEGMENT), "k")[0] for rank in ranks]
        outcomes = await ended(made)
        assert_kinds(outcomes, InternalError)
        assert "nothing left" in str(outcomes[0])
        ranks[1].pool.fails = False
        await usable(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["stream", "wait", "fetch", "put", "mark", "notify"])
@pytest.mark.parametrize("number", [0, 1, 4])
async def test_the_device_refuses(step: str, number: int) -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        made = [
            rank.call(Verb.ALL_REDUCE, "k", [rank.array(data(0, 5000))], [rank.array(data(0, 5000))], op=Op.SUM)
            for rank in ranks
        ]
        device = ranks[1].device
        usual, left = getattr(device, step), [number]

        def broken(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("the device refuses")
            return usual(*args, **options)

        setattr(device, step, broken)
        for call in made:
            call.post()
        outcomes = await ended(made)
        if left[0] < 0:
            assert_kinds(outcomes[1:], InternalError)
            assert "the device refuses" in str(outcomes[1])
            assert outcomes[0] is None or isinstance(outcomes[0], InternalError)  # the last step is after its end there
        setattr(device, step, usual)
        await usable(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", [Verb.ALL_REDUCE, Verb.BROADCAST])
@pytest.mark.parametrize("size", [1, 2])
async def test_a_stream_fails(verb: Verb, size: int) -> None:
    async with world(size) as comms:
        ranks = ranks_of(comms)
        last = ranks[-1]

        def fail() -> None:
            raise RuntimeError("a kernel failed")

        last.device.run(last.stream, fail)
        made = [
            posted(
                rank, verb, "k", data(0, 5000), data(0, 5000), op=Op.SUM if verb is Verb.ALL_REDUCE else None, root=0
            )
            for rank in ranks
        ]
        outcomes = await ended([call for call, _ in made])
        assert_kinds(outcomes, InternalError)
        assert "a kernel failed" in str(outcomes[0])
        await until(lambda: all(rank.is_at_rest for rank in ranks))


@pytest.mark.asyncio
async def test_giving_up_what_is_not_under_way() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        made = [rank.all_reduce(data(rank.rank, 50), "k")[0] for rank in ranks]
        await ended(made)
        for rank, call in zip(ranks, made, strict=True):
            rank.path.give_up(call)
            rank.path.close()
        await at_rest(ranks)


@pytest.mark.asyncio
async def test_closing_gives_up_what_is_under_way() -> None:
    async with world(2) as comms:
        ranks = ranks_of(comms)
        call, _ = ranks[0].all_reduce(data(0, 5000), "k")
        ranks[0].path.close()
        call.cancel()
        assert_kinds(await ended([call, ranks[1].all_reduce(data(1, 5000), "k")[0]]), CollectiveAborted)
        await at_rest(ranks)
        assert ranks[0].path.name == "staged"
