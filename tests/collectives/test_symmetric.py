"""Arrays in symmetric memory: nothing is copied of them, and all else is as with others."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from kfcomm.transports.shm.heap import NOWHERE
from kfcomm.transports.shm.parted import PartedSlot, _release
from kfcomm.world.communicator import Communicator
from tests.conformance import oracle, worlds
from tests.conformance.oracle import CASES
from tests.conformance.worlds import assert_kinds, ends, everywhere, heard_of_the_end, same_bits, turns, world

LENGTH = 3001
WARM = 4
"""Uses until all ranks have a slot, and know of all others that they can read what is in place."""


@pytest.fixture(autouse=True)
def all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several windows."""
    monkeypatch.setattr("kfcomm.strategies.base.DIRECT_NBYTES", 0)
    monkeypatch.setattr("kfcomm.transports.shm.slots.WINDOW_NBYTES", 1024)
    monkeypatch.setattr("kfcomm.transports.shm.slots.MIN_PIECE_NBYTES", 0)


def moved(comm: Communicator, x: Any) -> Any:
    """The same in symmetric memory."""
    there = comm.empty(x.shape, x.dtype)
    there[...] = x
    return there


def slots_of(comms: Any, name: str) -> list[PartedSlot]:
    """In which the name is carried out, of all ranks; none where no memory is shared."""
    slots = [comm._group.compiled[name].series.slot for comm in comms]
    return [] if None in slots else slots


def is_shared() -> bool:
    return worlds.LINKS == "shm"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("which", "outs"), list(itertools.product(["none", "some", "all"], ["none", "new", "x", "mixed"]))
)
async def test_any_arrays_of_any_ranks(which: str, outs: str) -> None:
    async with world(3, strategy="direct") as comms:
        xs = [oracle.data("float32", LENGTH, rank) for rank in range(3)]
        want = oracle.all_reduced("sum", xs, comms[0].strategy, "x")
        for use in range(WARM + 4):
            given = [
                moved(comm, x) if which == "all" or (which == "some" and (comm.rank + use) % 2) else x.copy()
                for comm, x in zip(comms, xs, strict=True)
            ]
            into: list[Any] = [None] * 3
            for rank, comm in enumerate(comms):
                kind = ("new", "x", "none", "own")[(rank + use) % 4] if outs == "mixed" else outs
                made = {"none": None, "x": given[rank], "own": np.empty(LENGTH, np.float32)}
                into[rank] = made[kind] if kind in made else comm.empty(LENGTH)
            results = await everywhere(
                comms, lambda comm, given=given, into=into: comm.all_reduce(given[comm.rank], "x", out=into[comm.rank])
            )
            for rank in range(3):
                assert same_bits(results[rank], want), (use, rank)
                assert into[rank] is None or results[rank] is into[rank]
                assert into[rank] is given[rank] or same_bits(given[rank], xs[rank])
        if slots := slots_of(comms, "x"):
            assert not any(slot.is_dead for slot in slots)
            assert which != "all" or all(slot._is_in_place for slot in slots)
            assert which == "none" or outs != "new" or all(slot._is_result_in_place for slot in slots)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("which", ["none", "some", "all"])
@pytest.mark.parametrize("size", [2, 3])
async def test_other_verbs_with_any_arrays_of_any_ranks(size: int, which: str, verb: str) -> None:
    async with world(size, strategy="direct") as comms:
        xs = [oracle.data("float32", LENGTH, rank) for rank in range(size)]
        is_gather = verb == "all_gather"
        want = [np.stack(xs)] * size if is_gather else oracle.reduce_scattered("sum", xs, comms[0].strategy)
        for use in range(WARM + 4):
            given = [
                moved(comm, x) if which == "all" or (which == "some" and (comm.rank + use) % 2) else x.copy()
                for comm, x in zip(comms, xs, strict=True)
            ]
            into: list[Any] = [None] * size
            for rank, comm in enumerate(comms):
                if (rank + use) % 3 == 1:
                    into[rank] = np.empty_like(want[rank])
                elif (rank + use) % 3 == 2:
                    into[rank] = comm.empty(want[rank].shape, np.float32)
                if is_gather and use % 2 and into[rank] is not None:
                    into[rank][rank] = given[rank]
                    given[rank] = into[rank][rank]
            results = await everywhere(
                comms,
                lambda comm, given=given, into=into: getattr(comm, verb)(given[comm.rank], "x", out=into[comm.rank]),
            )
            for rank in range(size):
                assert same_bits(results[rank], want[rank]), (use, rank)
                assert into[rank] is None or results[rank] is into[rank]
                assert same_bits(given[rank], xs[rank])
        if slots := slots_of(comms, "x"):
            assert not any(slot.is_dead for slot in slots)
            assert all(slot._is_in_place for slot in slots)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("dtype", "op"), CASES)
async def test_scattered_bits_of_all_dtypes_and_ops(dtype: str, op: str, size: int) -> None:
    async with world(size, strategy="direct") as comms:
        xs = [oracle.data(dtype, 601, rank) for rank in range(size)]
        want = oracle.reduce_scattered(op, xs, comms[0].strategy)
        for _ in range(WARM + 1):
            results = await everywhere(comms, lambda comm: comm.reduce_scatter(xs[comm.rank], "x", op=op))
            assert all(same_bits(result, one) for result, one in zip(results, want, strict=True))


@pytest.mark.asyncio
async def test_parts_of_any_size() -> None:
    """Also parts that are empty, and contributions."""
    async with world(3, strategy="direct") as comms:
        lengths = (0, 700, 31)
        given = [[oracle.data("int64", length, rank) for length in lengths] for rank in range(3)]
        for _ in range(WARM + 1):
            parts = await everywhere(comms, lambda comm: comm.reduce_scatter(given[comm.rank], "parts"))
            for rank in range(3):
                assert same_bits(parts[rank], sum(one[rank] for one in given))
            rows = [given[rank][rank] for rank in range(3)]
            found = await everywhere(comms, lambda comm, rows=rows: comm.all_gather(rows[comm.rank], concat=True))
            assert all(same_bits(result, np.concatenate(rows)) for result in found)


@pytest.mark.asyncio
@pytest.mark.parametrize(("dtype", "op"), CASES)
async def test_all_dtypes_and_ops(dtype: str, op: str) -> None:
    async with world(4, strategy="direct") as comms:
        xs = [oracle.data(dtype, 601, rank) for rank in range(4)]
        want = oracle.all_reduced(op, xs, comms[0].strategy, "x")
        for use in range(WARM + 3):
            given = [moved(comm, x) for comm, x in zip(comms, xs, strict=True)]
            into = [given[rank] if use % 3 == 1 else comms[rank].empty(601, dtype) for rank in range(4)]
            results = await everywhere(
                comms,
                lambda comm, given=given, into=into: comm.all_reduce(given[comm.rank], "x", op=op, out=into[comm.rank]),
            )
            assert all(same_bits(result, want) for result in results), use


@pytest.mark.asyncio
@pytest.mark.parametrize("members", [[0, 2], [3, 1, 0], [2, 1]])
async def test_groups_of_any_members(members: list[int]) -> None:
    async with world(4, strategy="direct") as comms:
        groups = await asyncio.gather(*(comms[rank].group(members, name="g") for rank in members))
        xs = [oracle.data("float32", LENGTH, rank) for rank in members]
        want = oracle.all_reduced("sum", xs, groups[0].strategy, "x")
        given = [moved(group, x) for group, x in zip(groups, xs, strict=True)]
        into = [group.empty(LENGTH) for group in groups]
        for _ in range(WARM + 2):
            results = await asyncio.gather(
                *(group.all_reduce(given[group.rank], "x", out=into[group.rank]) for group in groups)
            )
            assert all(same_bits(result, want) for result in results)


@pytest.mark.asyncio
async def test_no_rank_completes_before_its_result_was_read() -> None:
    """Each rank writes over what it gave, and over its result, as soon as it has that."""
    async with world(3, strategy="direct") as comms:
        given, into = [comm.empty(LENGTH) for comm in comms], [comm.empty(LENGTH) for comm in comms]

        async def rank(comm: Communicator) -> None:
            x, out = given[comm.rank], into[comm.rank]
            for use in range(40):
                x[:] = use + comm.rank
                await comm.all_reduce(x, "x", out=out)
                assert (out == 3 * use + 3).all()
                out[:] = x[:] = -1
                if (use + comm.rank) % 3 == 0:
                    await asyncio.sleep(0)

        await asyncio.gather(*(rank(comm) for comm in comms))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
async def test_no_rank_completes_before_what_it_gave_was_read(verb: str) -> None:
    async with world(3, strategy="direct") as comms:
        given = [comm.empty((3, LENGTH)) for comm in comms]

        async def rank(comm: Communicator) -> None:
            x = given[comm.rank]
            for use in range(40):
                x[:] = use + comm.rank
                found = await getattr(comm, verb)(x, "x")
                for other in range(3):
                    assert verb == "reduce_scatter" or (found[other] == use + other).all()
                assert verb == "all_gather" or (found == 3 * use + 3).all()
                x[:] = -1
                if (use + comm.rank) % 3 == 0:
                    await asyncio.sleep(0)

        await asyncio.gather(*(rank(comm) for comm in comms))


async def fail(comms: Sequence[Communicator], who: int, given: list[Any], call: Callable[[Communicator], Any]) -> None:
    """Cancel a call on one rank, which writes over its array, before another rank makes it: it fails on all."""
    late = comms[(who + 1) % 3]
    early = [comm for comm in comms if comm is not late]
    handles = [call(comm) for comm in early]
    await turns(5)
    handles[early.index(comms[who])].cancel()
    given[who][:] = 1000
    if slots := slots_of(comms, "x"):
        assert slots[who].is_dead
        assert slots[late.rank].posted()[who] < 0
    await heard_of_the_end(late)
    outcomes = await asyncio.gather(*handles, call(late), return_exceptions=True)
    assert_kinds([one for one in outcomes if not isinstance(one, asyncio.CancelledError)], CollectiveAborted)
    given[who][:] = 1


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_after_a_failure_no_rank_reads_what_was_in_place(who: int) -> None:
    async with world(3, strategy="direct") as comms:
        given, into = [comm.empty(LENGTH) for comm in comms], [comm.empty(LENGTH) for comm in comms]
        for x in given:
            x[:] = 1
        for _ in range(WARM):
            await everywhere(comms, lambda comm: comm.all_reduce(given[comm.rank], "x", out=into[comm.rank]))
        await fail(comms, who, given, lambda comm: comm.all_reduce(given[comm.rank], "x", out=into[comm.rank]))
        for result in await everywhere(comms, lambda comm: comm.all_reduce(given[comm.rank], "x")):
            assert (result == 3).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_after_a_failure_no_rank_reads_what_was_given(who: int, verb: str) -> None:
    async with world(3, strategy="direct") as comms:
        given = [comm.empty((3, LENGTH)) for comm in comms]

        def call(comm: Communicator) -> Any:
            return getattr(comm, verb)(given[comm.rank], "x")

        for x in given:
            x[:] = 1
        for _ in range(WARM):
            await everywhere(comms, call)
        await fail(comms, who, given, call)
        for result in await everywhere(comms, call):
            assert (result == (1 if verb == "all_gather" else 3)).all()


@pytest.mark.asyncio
async def test_unlike_calls_are_still_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.core.deadlines.QUIET_AFTER_S", 0.01)
    async with world(3, strategy="direct") as comms:
        given = [comm.empty(LENGTH) for comm in comms]
        for x in given:
            x[:] = 1
        for _ in range(WARM):
            await everywhere(comms, lambda comm: comm.all_reduce(given[comm.rank], "x"))
        outcomes = await ends(
            comms, lambda comm: comm.all_reduce(given[comm.rank][: LENGTH - (comm.rank == 1)], "x", timeout=60.0)
        )
        assert_kinds(outcomes, CollectiveMismatch)


@pytest.mark.asyncio
async def test_places_named_by_a_peer_are_checked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2, strategy="direct") as comms:
        given = [comm.empty(LENGTH) for comm in comms]
        for x in given:
            x[:] = 1
        for _ in range(WARM):
            await everywhere(comms, lambda comm: comm.all_reduce(given[comm.rank], "x"))
        slots = slots_of(comms, "x")
        if slots:
            with monkeypatch.context() as patched:
                patched.setattr(slots[1].memory.heaps, "place_of", lambda x: 1 << 60)
                outcomes = await ends(comms, lambda comm: comm.all_reduce(given[comm.rank], "x"))
            assert any("an array of" in str(one) for one in outcomes)
            assert "could not carry out" in caplog.text
            caplog.clear()
            for result in await everywhere(comms, lambda comm: comm.all_reduce(given[comm.rank], "x")):
                assert (result == 2).all()


@pytest.mark.asyncio
@pytest.mark.parametrize(("stopped", "way"), [("_fold_next", "x"), ("_copy_next", "x"), ("_copy_next", "out")])
async def test_error_names_a_rank_that_stops_midway(stopped: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have posted it, and it goes no further, since one of them does not."""
    async with world(3, strategy="direct") as comms:
        given = [comm.empty(LENGTH) if way == "out" else np.empty(LENGTH, np.float32) for comm in comms]
        into = [comm.empty(LENGTH) for comm in comms]
        for x in given:
            x[:] = 1

        def call(comm: Communicator, **options: Any) -> Any:
            return comm.all_reduce(given[comm.rank], "x", out=into[comm.rank] if way == "out" else None, **options)

        for _ in range(WARM):
            await everywhere(comms, call)
        if not slots_of(comms, "x"):
            return
        original = getattr(PartedSlot, stopped)

        def step(self: PartedSlot, out: Any) -> bool:
            done: bool = not (self._rank == 1 and self._folded > 1) and original(self, out)
            return done

        with monkeypatch.context() as patched:
            patched.setattr(PartedSlot, stopped, step)
            outcomes = await ends(comms, lambda comm: call(comm, timeout=0.2))
        assert any("under way, it waits for ranks [1]" in str(one) for one in outcomes), outcomes
        for result in await everywhere(comms, call):
            assert (result == 3).all()


@pytest.mark.asyncio
async def test_it_is_an_array_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2) as comms:
        comm = comms[0]
        assert comm.shares_memory == is_shared()
        for shape, dtype in ((5, "float32"), ((2, 3), np.int64), ((), "complex128"), ((0, 4), bool), ([3], "f2")):
            x = comm.empty(shape, dtype)
            assert x.shape == np.empty(shape).shape
            assert x.dtype == np.dtype(dtype)
            assert x.flags.c_contiguous
            assert x.flags.writeable
            x[...] = 1
            assert np.from_dlpack(x).sum() == x.size
        assert comm.empty(3).dtype == np.float32
        small = comm.empty(100)
        part, place = small[10:], comm._session.network
        del small, place
        gc.collect()
        part[:] = 2
        assert part.sum() == 180
        if is_shared():
            heap = comm._session.network._links._ranks[0].heaps
            assert heap.place_of(part) != NOWHERE
            assert not caplog.records
        else:
            assert [record.levelno for record in caplog.records] == [logging.WARNING]  # once
            caplog.clear()
        del x, part


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        (-1, "float32", "negative"),
        ((2, -3), "float32", "negative"),
        ("3", "float32", "as shape, got '3'"),
        ((1.5,), "float32", "shape"),
        (3, "nonsense", "'nonsense'"),
        (3, "O", "not supported"),
        (3, "datetime64[s]", "not supported"),
        (3, object(), "is unknown"),
        (2**70, np.int8, "more than 2"),
        ((2**70, 0), np.int8, "more than 2"),
        (2**61, np.float64, "more than 2"),
    ],
)
async def test_bad_shapes_and_dtypes(shape: Any, dtype: Any, said: str) -> None:
    async with world(2) as comms:
        with pytest.raises(ConfigError, match=said):
            comms[0].empty(shape, dtype)


@pytest.mark.asyncio
async def test_alone_it_is_ordinary_memory(caplog: pytest.LogCaptureFixture) -> None:
    async with world(1) as comms:
        assert not comms[0].shares_memory
        assert comms[0].empty((2, 2)).shape == (2, 2)
    assert not caplog.records


@pytest.mark.asyncio
async def test_arrays_outlive_their_communicator() -> None:
    async with world(2) as comms:
        x = comms[0].empty(1000)
        x[:] = 7
    assert (x == 7).all()
    del x
    gc.collect()


# ---------------------------------------------------------------- one result for all ranks


async def shared_uses(comms: Any, xs: list[Any], uses: int, **options: Any) -> list[list[Any]]:
    """The results of several uses, of all ranks each."""
    return [
        await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "s", shared=True, **options))
        for _ in range(uses)
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("symmetric", [False, True])
async def test_all_ranks_see_one_result(symmetric: bool) -> None:
    async with world(3, strategy="direct") as comms:
        xs = [oracle.data("float32", LENGTH, rank) for rank in range(3)]
        want = oracle.all_reduced("sum", xs, comms[0].strategy, "s")
        given = [moved(comm, x) for comm, x in zip(comms, xs, strict=True)] if symmetric else xs
        uses = await shared_uses(comms, given, WARM + 3)
        for results in uses:
            for result in results:
                assert type(result) is np.ndarray
                assert not result.flags.writeable
                assert same_bits(result, want)
        assert all(same_bits(one, other) for one, other in zip(given, xs, strict=True))
        if is_shared():
            heap = comms[0]._session.network._links._ranks[0].heaps
            own = uses[-1][0]
            assert heap.place_of(own) != NOWHERE
            writable = heap._own._mapping
            at = heap.place_of(own)
            writable[at : at + 4] = np.float32(-5).tobytes()
            assert [result[0] for result in uses[-1]] == [-5] * 3
            assert uses[-2][0][0] != -5
        del uses


@pytest.mark.asyncio
async def test_a_shared_result_is_freed_with_its_last_view_on_any_rank() -> None:
    async with world(3, strategy="direct") as comms:
        xs = [np.full(LENGTH, rank, np.float32) for rank in range(3)]
        for results in await shared_uses(comms, xs, WARM + 4):
            assert (results[0] == 3).all()
        if not is_shared():
            return
        heaps = comms[0]._session.network._links._ranks[0].heaps

        async def num_held() -> int:
            await turns(2)  # asyncio holds what was awaited last
            gc.collect()
            heaps.settle()
            held: int = heaps._own.num_arrays
            return held

        del results
        assert await num_held() == 0
        (last,) = await shared_uses(comms, xs, 1)
        part = last[2][10:20]
        del last
        for _ in range(3):
            await shared_uses(comms, xs, 2)
            assert await num_held() == 1
            assert (part == 3).all()
        del part
        assert await num_held() == 0


@pytest.mark.asyncio
async def test_shared_bytes_are_counted() -> None:
    async with world(2, strategy="direct") as comms:
        before = comms[1].statistics()
        assert (before.slots, before.slots_nbytes, before.symmetric_nbytes) == (0, 0, 0)
        given = [comm.empty(LENGTH) for comm in comms]
        for name in ("x", "y"):
            for _ in range(WARM):
                await everywhere(comms, lambda comm, name=name: comm.all_reduce(given[comm.rank], name))
        now = comms[1].statistics()
        assert now.slots == 2 * is_shared()
        assert now.slots_nbytes == 2 * 2 * (1024 + 512) * is_shared()
        assert now.symmetric_nbytes == 12288 * is_shared()
        assert type(now).from_json(now.as_json()) == now
        given.clear()
        assert comms[1].statistics().symmetric_nbytes == 0


def test_a_forked_child_gives_nothing_back() -> None:
    words = memoryview(bytearray(16)).cast("q")
    _release(words, 1, 5, os.getpid() + 1)
    assert words.tolist() == [0, 0]
    _release(words, 1, 5, os.getpid())
    assert words.tolist() == [0, 5]


@pytest.mark.asyncio
async def test_too_many_results_in_use_are_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.transports.shm.heap.MAX_LOANS", 4)
    async with world(2, strategy="direct") as comms:
        xs = [np.full(LENGTH, 1, np.float32)] * 2
        uses = await shared_uses(comms, xs, WARM + 9)
        assert all((result == 2).all() and not result.flags.writeable for use in uses for result in use)
        if is_shared():
            assert comms[0]._session.network._links._ranks[0].heaps._own.num_arrays <= 4
        del uses


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["list", "number", "int64", "short"])
async def test_shared_result_is_numpys_for_any_input(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "short":
        monkeypatch.setattr("kfcomm.strategies.base.DIRECT_NBYTES", 1 << 30)
    given = {"list": [1, 2, 3], "number": 4, "int64": np.arange(12).reshape(3, 4), "short": np.arange(4.0)}[kind]
    async with world(2, strategy="direct") as comms:
        for _ in range(WARM + 1):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(given, "s", shared=True)):
                assert type(result) is np.ndarray
                assert not result.flags.writeable
                assert np.array_equal(result, 2 * np.asarray(given))


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_after_a_failure_results_are_ordinary_ones(who: int) -> None:
    async with world(3, strategy="direct") as comms:
        xs = [np.full(LENGTH, 1, np.float32)] * 3
        await shared_uses(comms, xs, WARM)
        late = comms[(who + 1) % 3]
        early = [comm for comm in comms if comm is not late]
        handles = [comm.all_reduce(xs[0], "s", shared=True) for comm in early]
        await turns(5)
        handles[early.index(comms[who])].cancel()
        await heard_of_the_end(late)
        outcomes = await asyncio.gather(*handles, late.all_reduce(xs[0], "s", shared=True), return_exceptions=True)
        assert_kinds([one for one in outcomes if not isinstance(one, asyncio.CancelledError)], CollectiveAborted)
        for results in await shared_uses(comms, xs, 3):
            assert all((result == 3).all() and not result.flags.writeable for result in results)


@pytest.mark.asyncio
async def test_a_shared_result_has_no_out() -> None:
    async with world(2, strategy="direct") as comms:
        x = np.ones(LENGTH, np.float32)
        outcomes = []
        with pytest.raises(ConfigError, match="expected shared or out"):
            comms[0].all_reduce(x, "x", shared=True, out=x)
        outcomes = await ends(comms[1:], lambda comm: comm.all_reduce(x, "x", shared=True))
        assert_kinds(outcomes, CollectiveAborted)
