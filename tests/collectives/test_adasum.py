"""``op="adasum"`` over communicators, against a tree of pairs that is written out."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import numpy as np
import pytest

from kfcomm import Communicator
from kfcomm.collectives import kept
from kfcomm.collectives.adasum_arithmetic import FusedLayout
from kfcomm.errors import CollectiveError, CollectiveMismatch, ConfigError, EpochChanged, PeerLost
from kfcomm.testing import run_ranks, run_threads, sync_world
from tests.conformance.worlds import ends, turns, world
from tests.reduce.test_adasum import tree


def gradients_of(rank: int, dtype: Any) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    return {
        "a": rng.standard_normal((3, 5)).astype(dtype),
        "b": rng.standard_normal(1).astype(dtype),
        "c": rng.standard_normal(70_003).astype(dtype),
        "none": np.empty((0, 4), dtype),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("size", range(1, 9))
async def test_all_reduce_many_combines_each_tensor_by_itself(size: int) -> None:
    async with world(size) as comms:
        found = await run_ranks(
            comms, lambda comm: comm.all_reduce_many(gradients_of(comm.rank, np.float64), op="adasum")
        )
    given_ = [gradients_of(rank, np.float64) for rank in range(size)]
    for name in ("a", "b", "c"):
        expected = tree([one[name].ravel() for one in given_]).reshape(given_[0][name].shape)
        np.testing.assert_allclose(found[0][name], expected, rtol=1e-9, atol=1e-12)
        assert all(np.array_equal(one[name], found[0][name]) for one in found), "the same bits on all ranks"
    assert found[0]["none"].shape == (0, 4)


@pytest.mark.asyncio
async def test_never_on_a_fused_buffer() -> None:
    async with world(2) as comms:
        found = await asyncio.gather(
            comms[0].all_reduce([np.array([1.0, 2]), np.array([3.0, 4])], "g", op="adasum"),
            comms[1].all_reduce([np.array([4.0, 3]), np.array([-2.0, 1])], "g", op="adasum"),
        )
        assert np.concatenate(found[0]) == pytest.approx([3.2, 2.4, 0.72, 5.36], rel=1e-12)
        fused = await asyncio.gather(
            comms[0].all_reduce(np.array([1.0, 2, 3, 4]), "f", op="adasum"),
            comms[1].all_reduce(np.array([4.0, 3, -2, 1]), "f", op="adasum"),
        )
        assert fused[0] == pytest.approx([4.33, 4.33, 0.87, 4.33], abs=0.005)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_float_dtype_blocking_and_into_out(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)

    def main(comm: Any) -> Any:
        x = np.random.default_rng(comm.rank).standard_normal((4, 9)).astype(kind)
        out = np.empty_like(x)
        assert comm.all_reduce(x, "g", op="adasum", out=out) is out
        for _ in range(2):
            assert np.array_equal(comm.all_reduce_async(x, op="adasum").wait(), out)
        return x, out

    with sync_world(3) as comms:
        found = run_threads(comms, main)
    expected = tree([x.astype(np.float64).ravel() for x, _ in found]).reshape(4, 9)
    assert all(out.dtype == kind for _, out in found)
    eps = float(ml_dtypes.finfo(kind).eps)
    assert found[0][1].astype(np.float64) == pytest.approx(expected, rel=8 * eps, abs=8 * eps)


@pytest.mark.asyncio
async def test_mappings_with_out_and_a_name() -> None:
    async with world(2) as comms:
        outs = [{"x": np.empty(3), "y": np.empty(2)} for _ in comms]
        found = await asyncio.gather(
            *(
                comm.all_reduce_many({"y": np.ones(2), "x": np.ones(3)}, "many", op="adasum", out=out)
                for comm, out in zip(comms, outs, strict=True)
            )
        )
        assert found[1] is outs[1]
        assert outs[0]["x"] == pytest.approx([1.0, 1, 1])
        assert await comms[0].all_reduce_many({}, op="adasum") == {}


@pytest.mark.asyncio
async def test_unsupported_arrays_are_refused_on_all_ranks() -> None:
    async def main(comm: Communicator) -> None:
        for bad, word in (({"x": np.ones(3, np.int32)}, "adasum expects"), ({"wire_dtype": "float16"}, "wire_dtype")):
            x = bad.pop("x", np.ones(3)) if comm.rank == 0 else np.ones(3)
            with pytest.raises(ConfigError if comm.rank == 0 else CollectiveError, match=word):
                await comm.all_reduce(x, "g", op="adasum", **(bad if comm.rank == 0 else {}))
        assert (await comm.all_reduce(np.ones(3), "g", op="adasum")).tolist() == [1, 1, 1]

    async with world(2, aborted=True) as comms:
        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_cancelling_ends_it_on_every_rank_and_the_name_works_on() -> None:
    async with world(2, aborted=True) as comms:
        handle = comms[0].all_reduce(np.ones(3), "g", op="adasum")
        assert handle.cancel()
        with pytest.raises(CollectiveError, match="cancelled"):
            await comms[1].all_reduce(np.ones(3), "g", op="adasum")
        found = await asyncio.gather(*(comm.all_reduce(np.ones(3), "g", op="adasum") for comm in comms))
        assert found[1].tolist() == [1, 1, 1]


@pytest.mark.asyncio
async def test_persistent_calls_and_verbs_that_have_no_such_op() -> None:
    async def main(comm: Communicator) -> Any:
        prepared = comm.all_reduce_init(np.full(3, comm.rank + 1.0), name="g", op="adasum")
        for _ in range(2):
            found = await prepared.start()
        with pytest.raises(ConfigError, match="whole arrays"):
            comm.reduce(np.ones(3), 0, "r", op="adasum")
        return found

    async with world(2) as comms:
        assert [one.tolist() for one in await run_ranks(comms, main)] == [[1.5] * 3] * 2


@pytest.mark.asyncio
async def test_many_at_once_named_in_any_order_and_unnamed_around_a_change_of_strategy() -> None:
    async def main(comm: Communicator) -> list[Any]:
        shuffle = random.Random(comm.rank).shuffle
        before, after = list(range(10)), list(range(10, 20))
        shuffle(before)
        shuffle(after)
        handles: dict[int, Any] = {}

        def begin(numbers: list[int]) -> None:
            for number in numbers:
                x = np.full(number + 1, float(comm.rank + number + 1))
                handles[number] = comm.all_reduce(x, f"g{number}", op="adasum")

        begin(before)
        verdict = comm.set_strategy("ring")
        begin(after)
        unnamed = [comm.all_reduce(np.full(3, float(comm.rank + number + 1)), op="adasum") for number in range(5)]
        await verdict
        return [await handles[number] for number in range(20)] + [await one for one in unnamed]

    async with world(3) as comms:
        found = await run_ranks(comms, main)
    # of parallel gradients the mean of the means: of n + 1, n + 2 and n + 3 that is n + 2.25
    assert [float(one[0]) for one in found[0]] == pytest.approx([n + 2.25 for n in [*range(20), *range(5)]])
    assert all(np.array_equal(one, other) for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.asyncio
async def test_cancelling_while_a_strategy_is_being_agreed() -> None:
    async def main(comm: Communicator) -> str:
        verdict = comm.set_strategy("star")
        handle = comm.all_reduce(np.ones(3), "g", op="adasum")
        if comm.rank == 1:
            handle.cancel()
        await verdict
        with pytest.raises((CollectiveError, asyncio.CancelledError)) as caught:
            await handle
        assert (await comm.all_reduce(np.ones(3), "g", op="adasum")).tolist() == [1, 1, 1]
        return type(caught.value).__name__

    async with world(3, aborted=True) as comms:
        assert await run_ranks(comms, main) == ["CollectiveAborted", "CancelledError", "CollectiveAborted"]


@pytest.mark.asyncio
async def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    async with world(3, aborted=True) as comms:
        handles = [comms[rank].all_reduce(np.ones(3), "g", op="adasum") for rank in (0, 2)]
        comms.kill(1)
        for handle in handles:
            with pytest.raises(PeerLost):
                await handle


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", ["inf", "nan", "largest"])
def test_nonfinite_adasum_gives_no_warning(dtype: str, value: str) -> None:
    """Warnings are errors here: one would end the call."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    x = np.full(3000, ml_dtypes.finfo(kind).max if value == "largest" else float(value), kind)
    with sync_world(3) as comms:
        for found in run_threads(comms, lambda comm: comm.all_reduce(x, "g", op="adasum")):
            is_finite = value == "largest" and dtype != "float64"  # the products of the largest float64 overflow
            assert np.isnan(found.astype(float)).all() != is_finite


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_later_calls_give_the_bits_of_the_first(size: int) -> None:
    """The first goes by messages; where the ranks share memory the others do not."""

    async def main(comm: Communicator) -> list[Any]:
        found, sent = [], []
        for number in range(6):
            x = gradients_of(comm.rank + number // 3, np.float32)
            found.append(await comm.all_reduce_many(x, "g", op="adasum"))
            given_ = gradients_of(comm.rank + number // 3, np.float32)
            assert all(np.array_equal(x[name], given_[name]) for name in x), "what was given is not modified"
            sent.append(sum(peer.sent_nbytes for peer in comm.statistics().peers))
        assert (sent[-1] - sent[-2] < 30_000) == comm.shares_memory
        return found

    async with world(size) as comms:
        for found in await run_ranks(comms, main):
            for name in ("a", "b", "c", "none"):
                for first, later in ((0, 1), (0, 2), (3, 4), (3, 5)):
                    assert np.array_equal(found[first][name], found[later][name])
            assert not np.array_equal(found[0]["c"], found[3]["c"])


@pytest.mark.asyncio
async def test_results_in_place_and_results_kept_over_later_calls() -> None:
    async def main(comm: Communicator) -> Any:
        kept = [await comm.all_reduce(np.full(50_000, comm.rank + n + 1.0), op="adasum") for n in range(5)]
        x = [np.full(50_000, comm.rank + 1.0), np.full(3, comm.rank + 2.0)]
        found = await comm.all_reduce(x, "g", op="adasum", out=x)
        return kept, found, x

    async with world(2) as comms:
        for kept, found, x in await run_ranks(comms, main):
            assert [one.min() for one in kept] == [one.max() for one in kept] == [1.5, 2.5, 3.5, 4.5, 5.5]
            assert all(one is other for one, other in zip(found, x, strict=True))
            assert [one.mean() for one in x] == [1.5, 2.5]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(8))
async def test_random_tensors_equal_the_tree_however_they_are_cut(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4])
    shapes = {
        f"t{n}": draw.choice([(), (1,), (7,), (64, 3), (9000,), (20_001,), (150_001,)])
        for n in range(draw.randint(1, 12))
    }
    dtypes = {name: draw.choice([np.float16, np.float32, np.float64]) for name in shapes}

    def given_on(rank: int) -> dict[str, Any]:
        rng = np.random.default_rng((seed, rank))
        return {name: rng.standard_normal(shape).astype(dtypes[name]) for name, shape in shapes.items()}

    async def main(comm: Communicator) -> list[Any]:
        return [await comm.all_reduce_many(given_on(comm.rank), "g", op="adasum") for _ in range(3)]

    async with world(size) as comms:
        found = await run_ranks(comms, main)
    for name, shape in shapes.items():
        expected = tree([given_on(rank)[name].astype(np.float64).ravel() for rank in range(size)]).reshape(shape)
        eps = float(np.finfo(dtypes[name]).eps)
        for results in found:
            for one in results:
                assert one[name].dtype == dtypes[name]
                np.testing.assert_allclose(one[name].astype(np.float64), expected, rtol=2 * eps, atol=1e-9 + 2 * eps)
                assert np.array_equal(one[name], found[0][0][name])


@pytest.mark.asyncio
async def test_mismatch_after_calls_that_fit() -> None:
    async def main(comm: Communicator) -> None:
        for size in (5, 40_000):
            for _ in range(3):
                await comm.all_reduce(np.ones(size), "g", op="adasum")
            with pytest.raises(CollectiveMismatch, match=r"'g' differs .*shape.*: rank \d has all_reduce of float64"):
                await comm.all_reduce(np.ones(size + (comm.rank == 1)), "g", op="adasum")
        assert (await comm.all_reduce(np.ones(3), "g", op="adasum")).tolist() == [1, 1, 1]

    async with world(3, aborted=True) as comms:
        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_mismatch_names_the_call_of_the_program_and_what_differs() -> None:
    def made(comm: Communicator, kind: str, dtype: str) -> Any:
        x, many = np.ones(9, dtype), {"a": np.ones(2), "b": np.ones((3, 2), dtype)}
        if kind == "single":
            return comm.all_reduce(x, "g", op="adasum")
        if kind == "list":
            return comm.all_reduce([np.ones(2), x], "g", op="adasum")
        return comm.all_reduce_many(many, name="g", op="adasum")

    async def main(comm: Communicator) -> list[str]:
        said = []
        for before in (0, 3):
            for kind in ("single", "list", "mapping"):
                for _ in range(before):
                    await made(comm, kind, "float32")
                with pytest.raises(CollectiveMismatch) as caught:
                    await made(comm, kind, "float32" if comm.rank else "float64")
                said.append(str(caught.value))
        with pytest.raises(CollectiveMismatch) as caught:
            await comm.all_reduce(np.ones(3), "g", op="adasum" if comm.rank else "sum")
        return [*said, str(caught.value)]

    async with world(2, aborted=True) as comms:
        for found in await run_ranks(comms, main):
            assert not any("uint8" in text or "all_to_all" in text or "all_gather" in text for text in found)
            for single, listed, mapping in (found[:3], found[3:6]):
                assert "'g' differs between ranks (dtype): " in single
                assert "all_reduce of float64 (9,), op adasum" in single
                assert "all_reduce of float32 (9,), op adasum" in single
                assert "'x[1]' is float" in listed
                assert all(f"float{bits} (9,) on rank {rank}" in listed for rank, bits in enumerate((64, 32)))
                assert all(f"float{bits} (3, 2) on rank {rank}" in mapping for rank, bits in enumerate((64, 32)))
            assert all(f"all_reduce of float64 (3,), op {op}" in found[-1] for op in ("sum", "adasum"))


@pytest.mark.asyncio
@pytest.mark.parametrize("turns_before", range(0, 40, 3))
async def test_a_rank_lost_at_any_step_is_an_error_or_a_whole_result(turns_before: int) -> None:
    async with world(3, aborted=True) as comms:
        x = np.arange(30_000.0)
        for _ in range(2):
            await asyncio.gather(*(comm.all_reduce(x, "g", op="adasum") for comm in comms))
        handles = [comm.all_reduce(x, "g", op="adasum") for comm in comms]
        await turns(turns_before)
        comms.kill(1)
        for found in await asyncio.gather(handles[0], handles[2], return_exceptions=True):
            if isinstance(found, BaseException):
                assert isinstance(found, PeerLost), found
            else:
                np.testing.assert_allclose(found, x, rtol=1e-15)
        await asyncio.gather(handles[1], return_exceptions=True)


def _used_nbytes(comms: Any) -> list[int]:
    """Bytes of symmetric memory that each rank has in use, once what is unreachable is gone."""
    gc.collect()
    return [comm._group.heaps.used_nbytes for comm in comms]


@pytest.mark.asyncio
async def test_each_name_keeps_one_buffer_that_its_next_use_frees() -> None:
    def call(name: str | None) -> Any:
        return lambda comm: comm.all_reduce(np.full(50_000, comm.rank + 1.0), name, op="adasum")

    async with world(2) as comms:
        if not comms[0].shares_memory:
            pytest.skip("of memory that ranks share")
        for _ in range(2):  # the first goes by messages
            await run_ranks(comms, call("a"))
        one = _used_nbytes(comms)
        for _ in range(5):
            await run_ranks(comms, call("a"))
        assert _used_nbytes(comms) == one
        for _ in range(5):
            await run_ranks(comms, call("b"))
            await run_ranks(comms, call(None))
        assert _used_nbytes(comms) == [2 * each for each in one]
        group = await run_ranks(comms, lambda comm: comm.group([0, 1]))
        for _ in range(3):
            await run_ranks(comms, lambda comm: call("a")(group[comm.rank]))
        await run_ranks(comms, lambda comm: group[comm.rank].close())
        group.clear()
        assert _used_nbytes(comms) == [2 * each for each in one]


@pytest.mark.asyncio
async def test_buffers_of_names_that_are_used_once_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_NBYTES", 2_000_000)
    async with world(2) as comms:
        if not comms[0].shares_memory:
            pytest.skip("of memory that ranks share")
        for number in range(20):
            results = await run_ranks(
                comms, lambda comm, n=number: comm.all_reduce(np.full(50_000, comm.rank + 1.0), f"{n}", op="adasum")
            )
            assert [one.mean() for one in results] == [1.5, 1.5]
        assert max(_used_nbytes(comms)) < 2_600_000


@pytest.mark.asyncio
async def test_rank_that_reads_after_a_peer_has_left_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was given up by the others may be about to read what is theirs again."""
    async with world(2) as comms:
        if not comms[0].shares_memory:
            pytest.skip("of memory that ranks share")
        for _ in range(2):
            await run_ranks(comms, lambda comm: comm.all_reduce(np.ones(5000), "a", op="adasum"))
        read, left = FusedLayout.results, iter([None, comms[1]])

        def results(layout: FusedLayout, parts: Any) -> Any:
            comm = next(left)
            if comm is not None:
                comm._group.kept.withdraw()
            return read(layout, parts)

        monkeypatch.setattr(FusedLayout, "results", results)
        outcomes = await ends(comms, lambda comm: comm.all_reduce(np.ones(5000), "a", op="adasum"))
        whole = [one for one in outcomes if not isinstance(one, Exception)]
        (failed,) = [one for one in outcomes if isinstance(one, Exception)]
        assert isinstance(failed, EpochChanged)
        assert "rank 1 has left before its part of the result was read" in str(failed)
        assert whole[0].tolist() == [1] * 5000
        monkeypatch.setattr(FusedLayout, "results", read)
        for _ in range(3):
            await run_ranks(comms, lambda comm: comm.all_reduce(np.ones(5000), "a", op="adasum"))
