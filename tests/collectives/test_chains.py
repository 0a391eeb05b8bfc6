"""``all_reduce_many`` of large arrays, which travel as one chain, and its cached plans."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.collectives import units
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from kfcomm.strategies import Strategy
from kfcomm.world.communicator import Communicator
from tests.conformance import worlds
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, world

SIZE = 3
SIZES = {"b": 700, "a": 0, "c": 3, "d": 901, "e": 17, "f": 5, "g": 1200}
USES = 5
"""The first goes over links, and with it or the next one a slot is handed out."""


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of more than 64 bytes are large, and any number of bytes is long, of several windows or chunks."""
    for module in ("kfcomm.strategies.base", "kfcomm.collectives.units"):
        monkeypatch.setattr(f"{module}.DIRECT_NBYTES", 0)
    monkeypatch.setattr(units, "PACK_NBYTES", 64)
    monkeypatch.setattr("kfcomm.transports.shm.slots.WINDOW_NBYTES", 1024)
    monkeypatch.setattr("kfcomm.transports.shm.slots.MIN_PIECE_NBYTES", 0)
    monkeypatch.setattr("kfcomm.collectives.plans.CHUNK_NBYTES", 256)


def inputs(rank: int, dtype: Any = np.float32, use: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng([rank, use])
    return {name: generator.integers(1, 9, size).astype(dtype) for name, size in SIZES.items()}


def sums(dtype: Any = np.float32, use: int = 0) -> dict[str, Any]:
    return {name: sum(inputs(rank, dtype, use)[name] for rank in range(SIZE)).astype(dtype) for name in SIZES}


def assert_sums(results: list[Any], wanted: dict[str, Any]) -> None:
    for result in results:
        assert list(result) == list(wanted)
        assert all(same_bits(result[name], one) for name, one in wanted.items())


def keys(comm: Communicator) -> list[str]:
    """All keys in the tables of the router."""
    return [key.name for key in comm._session.engine.router.names]


def in_small_chunks(comm: Communicator) -> Strategy:
    """Two lanes and chunks of 40 bytes, which end anywhere in the arrays."""
    pairs = comm.strategy.select(1 << 30).pairs
    return Strategy("small", pairs[:1], chunk_nbytes=40)


@pytest.mark.asyncio
@pytest.mark.parametrize("outs", ["new", "in place", "mixed"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("strategy", ["auto", "ring", "small"])
async def test_sums_over_links_and_in_slots(strategy: str, dtype: str, outs: str) -> None:
    async with world(SIZE, strategy="auto" if strategy == "small" else strategy) as comms:
        if strategy == "small":
            await everywhere(comms, lambda comm: comm.set_strategy(in_small_chunks(comm)))
        for use in range(USES):
            given_ = [inputs(rank, dtype, use) for rank in range(SIZE)]
            made: list[Any] = [None] * SIZE
            for rank in range(SIZE):
                kind = ("new", "in place", "into")[(rank + use) % 3] if outs == "mixed" else outs
                made[rank] = {"new": None, "in place": given_[rank], "into": inputs(rank, dtype)}[kind]
            results = await everywhere(
                comms,
                lambda comm, xs=given_, outs=made: comm.all_reduce_many(xs[comm.rank], out=outs[comm.rank]),
            )
            assert_sums(results, sums(dtype, use))
            assert all(out is None or result is out for result, out in zip(results, made, strict=True))
        if worlds.LINKS == "shm" and strategy == "auto":
            assert all(compiled.series.slot is not None for comm in comms for compiled in comm._group.compiled.values())


@pytest.mark.asyncio
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(("float32", "int8", "float64")), st.integers(0, 300)), min_size=1, max_size=9),
    st.sampled_from(("auto", "ring", "binary_tree", "clique", "small")),
    st.sampled_from((None, "float16")),
)
async def test_any_arrays(forms: list[tuple[str, int]], strategy: str, wire: str | None) -> None:
    async with world(SIZE, strategy="auto" if strategy == "small" else strategy) as comms:
        if strategy == "small":
            await everywhere(comms, lambda comm: comm.set_strategy(in_small_chunks(comm)))

        def of(rank: int) -> dict[str, Any]:
            return {f"n{at}": np.full(size, rank + at % 3, dtype) for at, (dtype, size) in enumerate(forms)}

        is_wired = wire is not None and not any(dtype == "int8" for dtype, _ in forms)
        options = {"wire_dtype": wire} if is_wired else {}
        wanted = {name: sum(of(rank)[name] for rank in range(SIZE)).astype(x.dtype) for name, x in of(0).items()}
        for _ in range(3):
            assert_sums(await everywhere(comms, lambda comm: comm.all_reduce_many(of(comm.rank), **options)), wanted)
        lists = await everywhere(comms, lambda comm: comm.all_reduce(list(of(comm.rank).values()), "list", **options))
        assert_sums([dict(zip(wanted, result, strict=True)) for result in lists], wanted)


@pytest.mark.asyncio
async def test_arrays_of_one_dtype_are_one_collective_where_messages_take_one_way() -> None:
    async with world(SIZE) as comms:
        await everywhere(comms, lambda comm: comm.all_reduce_many(inputs(comm.rank)))
        assert all(sum("\0many" in key for key in keys(comm)) == 1 for comm in comms)
    several = Strategy("several", comms[0].strategy.select(1 << 30).pairs, is_whole=True)
    async with world(SIZE, strategy=several) as comms:
        await everywhere(comms, lambda comm: comm.all_reduce_many(inputs(comm.rank)))
        large = sum(4 * size > units.PACK_NBYTES for size in SIZES.values())
        assert all(sum("\0many" in key for key in keys(comm)) == large + 1 for comm in comms)


# ---------------------------------------------------------------- cached plans


def _never(*args: Any, **options: Any) -> Any:
    raise AssertionError("this call goes the long way")


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [None, "step"])
async def test_a_call_like_the_one_before_goes_the_short_way(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(SIZE) as comms:

        def call(comm: Communicator, **options: Any) -> Any:
            return comm.all_reduce_many(inputs(comm.rank), name, **options)

        assert_sums(await everywhere(comms, call), sums())
        monkeypatch.setattr("kfcomm.collectives.batches.post_units", _never)
        for limits in ({}, {"timeout": 50}, {"timeout": timedelta(minutes=1), "priority": 3}, {}):
            assert_sums(await everywhere(comms, lambda comm, limits=limits: call(comm, **limits)), sums())
        if name is not None:
            results = await everywhere(
                comms, lambda comm: comm.all_reduce_many(dict(sorted(inputs(comm.rank).items())), name)
            )
            assert_sums(results, dict(sorted(sums().items())))


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another shape": lambda arrays: {**arrays, "d": np.ones(902, np.float32)},
    "another dtype": lambda arrays: {**arrays, "d": arrays["d"].astype(np.float64)},
    "one more": lambda arrays: {**arrays, "h": np.ones(9, np.float32)},
    "one less": lambda arrays: {name: x for name, x in arrays.items() if name != "d"},
    "another name": lambda arrays: {("x" if name == "d" else name): x for name, x in arrays.items()},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("odd", ODD)
async def test_other_arrays_on_one_rank_are_a_mismatch_on_all(odd: str) -> None:
    async with world(SIZE, aborted=True) as comms:  # a rank may have begun a unit that others have not
        for use in range(USES):
            if use in (1, 3):
                outcomes = await ends(
                    comms,
                    lambda comm: comm.all_reduce_many(
                        ODD[odd](inputs(comm.rank)) if comm.rank == 1 else inputs(comm.rank), "step"
                    ),
                )
                assert_kinds(outcomes, CollectiveMismatch)
            results = await everywhere(comms, lambda comm: comm.all_reduce_many(inputs(comm.rank), "step"))
            assert_sums(results, sums())


UNLIKE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lists": lambda arrays: {name: x.tolist() for name, x in arrays.items() if x.size} | {"a": np.zeros(0)},
    "strided": lambda arrays: {name: np.repeat(x, 2)[::2] for name, x in arrays.items()},
    "read-only": lambda arrays: {name: np.frombuffer(x.tobytes(), x.dtype) for name, x in arrays.items()},
    "a matrix": lambda arrays: {**arrays, "b": arrays["b"].reshape(7, 100)},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("unlike", UNLIKE)
async def test_any_kind_of_array_after_others(unlike: str) -> None:
    """The kinds are the rank's own affair, but for shapes and dtypes."""
    async with world(SIZE) as comms:
        for use in range(USES):
            make = UNLIKE[unlike] if use % 2 else dict
            dtype = np.float64 if unlike == "lists" else np.float32
            results = await everywhere(
                comms, lambda comm, make=make, dtype=dtype: comm.all_reduce_many(make(inputs(comm.rank, dtype)), "step")
            )
            for result in results:
                assert all(np.array_equal(np.ravel(result[name]), one) for name, one in sums(dtype).items())


@pytest.mark.asyncio
async def test_memory_for_results_is_checked_at_each_call() -> None:
    async with world(SIZE) as comms:
        for use in range(USES):
            given_ = [inputs(rank) for rank in range(SIZE)]
            results = await everywhere(
                comms, lambda comm, given_=given_: comm.all_reduce_many(given_[comm.rank], "x", out=given_[comm.rank])
            )
            assert_sums(results, sums())
            wrong: dict[str, Any] = inputs(0)
            if use % 2:
                wrong["d"] = np.zeros(7, np.float32)
            else:
                wrong["g"].flags.writeable = False
            outcomes = await ends(
                comms, lambda comm, wrong=wrong: comm.all_reduce_many(inputs(comm.rank), "x", out=wrong)
            )
            assert_kinds(outcomes, ConfigError)
            # Memory that overlaps the input, but is not it.
            room = [np.zeros(SIZES["g"] + 1, np.float32) for _ in comms]
            shifted = [{**inputs(rank), "g": room[rank][:-1]} for rank in range(SIZE)]
            for rank, one in enumerate(shifted):
                one["g"][:] = inputs(rank)["g"]
            outs = [{**inputs(0), "g": room[rank][1:]} for rank in range(SIZE)]
            results = await everywhere(
                comms,
                lambda comm, xs=shifted, outs=outs: comm.all_reduce_many(xs[comm.rank], "x", out=outs[comm.rank]),
            )
            assert_sums(results, sums())


@pytest.mark.asyncio
async def test_a_cancelled_call_leaves_all_ranks_in_step() -> None:
    async with world(SIZE, aborted=True) as comms:
        for use in range(2 * USES):
            calls = [comm.all_reduce_many(inputs(comm.rank), "step") for comm in comms[: 1 + use % SIZE]]
            calls[0].cancel()
            calls += [comm.all_reduce_many(inputs(comm.rank), "step") for comm in comms[1 + use % SIZE :]]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, (CollectiveAborted, asyncio.CancelledError, dict)) for one in outcomes)
            assert_sums(await everywhere(comms, lambda comm: comm.all_reduce_many(inputs(comm.rank), "step")), sums())


@pytest.mark.asyncio
async def test_a_cancelled_call_can_be_made_again_at_once() -> None:
    async with world(SIZE, aborted=True) as comms:
        for use in range(USES):

            async def call(comm: Communicator, use: int = use) -> Any:
                handle = comm.all_reduce_many(inputs(comm.rank), "step")
                if comm.rank == use % SIZE:
                    handle.cancel()
                with contextlib.suppress(CollectiveAborted, asyncio.CancelledError):
                    await handle
                return await comm.all_reduce_many(inputs(comm.rank), "step")

            assert_sums(await everywhere(comms, call), sums())


# ---------------------------------------------------------------- results in the memory of other inputs


@pytest.mark.asyncio
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(("auto", "ring", "binary_tree", "small")),
)
async def test_results_may_go_where_other_inputs_are(forms: list[tuple[int, int]], random: Any, strategy: str) -> None:
    """Inputs anywhere in one buffer, and results one after the other in some order, as arrays are moved by a call."""
    order = list(range(len(forms)))
    random.shuffle(order)
    into: dict[str, slice] = {}
    end = 20
    for at in order:
        into[f"x{at}"] = slice(end, end + forms[at][0])
        end += forms[at][0]
    sources = {f"x{at}": slice(begin, begin + size) for at, (size, begin) in enumerate(forms)}
    async with world(SIZE, strategy="auto" if strategy == "small" else strategy) as comms:
        if strategy == "small":
            await everywhere(comms, lambda comm: comm.set_strategy(in_small_chunks(comm)))
        for use in range(USES):
            buffers = [np.arange(600, dtype=np.float32) + 1000 * rank for rank in range(SIZE)]
            total = np.sum(buffers, axis=0)
            wanted = {name: total[where] for name, where in sources.items()}
            xs = [{name: one[where] for name, where in sources.items()} for one in buffers]
            outs = [{name: one[into[name]] for name in sources} for one in buffers]
            if use % 2:
                results = await everywhere(
                    comms,
                    lambda comm, xs=xs, outs=outs: comm.all_reduce(
                        list(xs[comm.rank].values()), "list", out=list(outs[comm.rank].values())
                    ),
                )
                results = [dict(zip(sources, result, strict=True)) for result in results]
            else:
                results = await everywhere(
                    comms, lambda comm, xs=xs, outs=outs: comm.all_reduce_many(xs[comm.rank], out=outs[comm.rank])
                )
            assert_sums(results, wanted)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["broadcast", "all_gather", "reduce"])
async def test_results_of_other_verbs_may_go_where_other_inputs_are(verb: str) -> None:
    async with world(SIZE) as comms:
        for _ in range(USES):
            buffers = [np.arange(3000, dtype=np.float32) + 10_000 * rank for rank in range(SIZE)]
            xs = [[one[:300], one[300:600], one[600:900]] for one in buffers]
            wanted = await everywhere(comms, lambda comm, xs=xs: getattr(comm, verb)([x.copy() for x in xs[comm.rank]]))
            length = 300 * (SIZE if verb == "all_gather" else 1)
            outs = [[one[at : at + length] for at in (300, 300 + length, 2100)] for one in buffers]
            shaped = [[x.reshape(SIZE, -1) if verb == "all_gather" else x for x in some] for some in outs]
            await everywhere(
                comms, lambda comm, xs=xs, outs=shaped: getattr(comm, verb)(xs[comm.rank], out=outs[comm.rank])
            )
            for comm in comms:
                if wanted[comm.rank] is not None:
                    assert all(same_bits(*pair) for pair in zip(shaped[comm.rank], wanted[comm.rank], strict=True))
