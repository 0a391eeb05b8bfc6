"""Lists of arrays, and mappings with ``out``: lists in, lists of the same kind out, in every verb that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.collectives import units
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, works, world

SIZE = 3
FORMS = st.lists(
    st.tuples(st.sampled_from(("float32", "int64", "bool")), st.lists(st.integers(0, 4), max_size=3)),
    min_size=1,
    max_size=8,
)
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "max"},
    "reduce": {"op": "max", "root": 1},
    "broadcast": {"root": 2},
    "gather": {"root": 1},
    "all_gather": {},
}


def _xs(rank: int) -> list[Any]:
    """Small ones of two dtypes, a number's worth of one, and one that travels by itself."""
    shapes = [((2, 3), "float32"), ((), "int64"), ((20_000,), "float32"), ((4,), "int64"), ((0, 2), "float32")]
    return [(np.arange(np.prod(shape)).reshape(shape) + rank).astype(dtype) for shape, dtype in shapes]


@pytest.mark.parametrize("verb", ONE_BY_ONE)
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.asyncio
async def test_a_list_gives_what_each_of_its_arrays_does(verb: str, kind: Callable[[Any], Any]) -> None:
    options = ONE_BY_ONE[verb]
    async with world(SIZE) as comms:
        before = [_xs(rank) for rank in range(SIZE)]
        singles = [
            await everywhere(comms, lambda comm, at=at: getattr(comm, verb)(before[comm.rank][at], **options))
            for at in range(5)
        ]
        for name in (None, "k", "k"):
            xs = [kind(_xs(rank)) for rank in range(SIZE)]
            results = await everywhere(
                comms, lambda comm, xs=xs, name=name: getattr(comm, verb)(xs[comm.rank], name=name, **options)
            )
            for rank, result in enumerate(results):
                if singles[0][rank] is None:
                    assert result is None
                    continue
                assert type(result) is kind
                assert all(same_bits(one, singles[at][rank]) for at, one in enumerate(result))
            assert all(same_bits(x, y) for rank in range(SIZE) for x, y in zip(xs[rank], before[rank], strict=True))
        await works(comms, "k")


@pytest.mark.parametrize("verb", ONE_BY_ONE)
@pytest.mark.asyncio
async def test_results_go_into_the_arrays_of_a_list(verb: str) -> None:
    options = ONE_BY_ONE[verb]
    async with world(SIZE) as comms:
        plain = await everywhere(comms, lambda comm: getattr(comm, verb)(_xs(comm.rank), **options))
        outs = [None if one is None else [np.empty(part.shape, part.dtype) for part in one] for one in plain]
        results = await everywhere(
            comms, lambda comm: getattr(comm, verb)(_xs(comm.rank), out=outs[comm.rank], **options)
        )
        for rank, result in enumerate(results):
            assert result is outs[rank]
            assert result is None or all(map(same_bits, result, plain[rank]))
        if verb in ("all_reduce", "broadcast"):
            xs = [[np.asarray(x) for x in _xs(rank)] for rank in range(SIZE)]
            results = await everywhere(
                comms, lambda comm: getattr(comm, verb)(xs[comm.rank], out=xs[comm.rank], **options)
            )
            assert results[0] is xs[0]
            assert all(map(same_bits, xs[0], plain[0]))


@pytest.mark.asyncio
@settings(max_examples=15)
@given(FORMS, st.sampled_from(sorted(ONE_BY_ONE)), st.booleans())
async def test_any_list(forms: list[Any], verb: str, all_large: bool) -> None:
    options = ONE_BY_ONE[verb]

    def xs(rank: int) -> list[Any]:
        generator = np.random.default_rng(rank)
        return [generator.integers(0, 2, shape).astype(dtype) for dtype, shape in forms]

    with pytest.MonkeyPatch.context() as patch:
        if all_large:
            patch.setattr(units, "PACK_NBYTES", -1)
        async with world(SIZE) as comms:
            results = await everywhere(comms, lambda comm: getattr(comm, verb)(xs(comm.rank), **options))
            for at in range(len(forms)):
                want = await everywhere(comms, lambda comm, at=at: getattr(comm, verb)(xs(comm.rank)[at], **options))
                assert all(
                    one is None if result is None else same_bits(result[at], one)
                    for result, one in zip(results, want, strict=True)
                )


@pytest.mark.parametrize("shapes", [[(2, 2)] * 3, [(2,), (3, 4), ()], [(0,), (1,), (0, 5)]], ids=str)
@pytest.mark.asyncio
async def test_reduce_scatter_takes_an_array_for_each_rank(shapes: list[tuple[int, ...]]) -> None:
    async with world(SIZE) as comms:
        for _ in range(3):
            xs = [[np.full(shape, 10.0 * to + rank) for to, shape in enumerate(shapes)] for rank in range(SIZE)]
            results = await everywhere(comms, lambda comm, xs=xs: comm.reduce_scatter(xs[comm.rank], "k", op="sum"))
            for rank, result in enumerate(results):
                assert same_bits(result, np.full(shapes[rank], 30.0 * rank + 3))
            outs = [np.empty(shape) for shape in shapes]
            results = await everywhere(
                comms, lambda comm, xs=xs, outs=outs: comm.reduce_scatter(xs[comm.rank], out=outs[comm.rank])
            )
            assert all(map(lambda a, b: a is b, results, outs))
            assert outs[2].tolist() == np.full(shapes[2], 63.0).tolist()


@pytest.mark.asyncio
async def test_gather_into_a_list_with_an_array_for_each_rank() -> None:
    async with world(SIZE) as comms:
        xs = [np.arange(4.0).reshape(2, 2) + rank for rank in range(SIZE)]
        for concat in (False, True):
            outs = [[np.empty((2, 2)), np.empty((2, 2)).T, np.empty((4, 2))[::2]] for _ in range(SIZE)]
            results = await everywhere(
                comms,
                lambda comm, outs=outs, concat=concat: comm.all_gather(
                    xs[comm.rank], out=outs[comm.rank], concat=concat
                ),
            )
            assert all(result is out for result, out in zip(results, outs, strict=True))
            assert all(np.array_equal(one, x) for out in outs for one, x in zip(out, xs, strict=True))
        out = [np.empty((2, 2)) for _ in range(SIZE)]
        results = await everywhere(comms, lambda comm: comm.gather(xs[comm.rank], out=out if comm.rank == 0 else None))
        assert results[0] is out
        assert all(map(same_bits, out, xs))
        parts = [[np.full(1 + to, rank) for to in range(SIZE)] for rank in range(SIZE)]
        into = [[np.empty(1 + rank, int) for _ in range(SIZE)] for rank in range(SIZE)]
        results = await everywhere(comms, lambda comm: comm.all_to_all(parts[comm.rank], out=into[comm.rank]))
        assert all(result is one for result, one in zip(results, into, strict=True))
        assert [one.tolist() for one in into[1]] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.asyncio
async def test_all_reduce_many_has_a_name_and_an_out() -> None:
    big = np.ones(20_000)
    async with world(SIZE) as comms:
        outs = [{"b": np.empty(20_000), "a": np.empty(3, np.float32)} for _ in range(SIZE)]
        results = await everywhere(
            comms,
            lambda comm: comm.all_reduce_many({"a": np.ones(3, np.float32), "b": big}, "both", out=outs[comm.rank]),
        )
        for result, out in zip(results, outs, strict=True):
            assert result is out
            assert out["a"].tolist() == [3.0] * 3
            assert out["b"].tolist() == [3.0] * 20_000
        mine = [{"a": np.ones(3), "b": np.ones(20_000)} for _ in range(SIZE)]
        await everywhere(comms, lambda comm: comm.all_reduce_many(mine[comm.rank], out=mine[comm.rank]))
        assert {value for one in mine for x in one.values() for value in x.tolist()} == {3.0}
        for out in ({"a": big}, [big], {"a": np.ones(4), "b": big}):
            outcomes = await ends(
                comms,
                lambda comm, out=out: comm.all_reduce_many(
                    {"a": np.ones(3), "b": big}, "k", out=out if comm.rank == 0 else None
                ),
            )
            assert_kinds(outcomes, ConfigError, CollectiveAborted, CollectiveAborted)
            await everywhere(comms, lambda comm: comm.all_reduce_many({"a": np.ones(3), "b": big}, "k"))


X = np.ones(3)


@pytest.mark.asyncio
async def test_more_arrays_than_a_signature_lists_are_told_apart_all_the_same() -> None:
    async with world(SIZE) as comms:
        arrays = {f"{'n' * 100}/{number}": np.ones(2) for number in range(400)}
        other = dict(arrays) | {f"{'n' * 100}/7": np.ones(3)}
        results = await everywhere(comms, lambda comm: comm.all_reduce_many(arrays))
        assert all(x.tolist() == [3.0, 3.0] for x in results[0].values())
        outcomes = await ends(comms, lambda comm: comm.all_reduce_many(other if comm.rank == 2 else arrays))
        assert_kinds(outcomes, CollectiveMismatch)
        assert all("all_reduce of a list of 400" in str(one) for one in outcomes)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x: c.all_reduce([X, x], "k"),
        lambda c, x: c.reduce_scatter([X, X, x], "k"),
        lambda c, x: c.all_gather([X, x], "k"),
    ],
)
@pytest.mark.asyncio
async def test_a_list_with_something_else_in_it_fails_everywhere(call: Callable[[Any, Any], Any]) -> None:
    async with world(SIZE) as comms:
        for bad in ("text", None, [X], {}):
            outcomes = await ends(comms, lambda comm, bad=bad: call(comm, bad if comm.rank == 0 else X))
            assert_kinds(outcomes, ConfigError, CollectiveAborted, CollectiveAborted)
            await works(comms, "k")


@pytest.mark.asyncio
async def test_unsupported_uses_of_lists_are_refused() -> None:
    async with world(SIZE) as comms:
        for call in (
            lambda c: c.all_reduce([X], "k", shared=True),
            lambda c: c.all_gather([X], "k", concat=True),
            lambda c: c.all_reduce([[X], [X]], "k"),
            lambda c: c.reduce_scatter([X, X], "k"),
            lambda c: c.all_reduce([X], "k", out=[]),
            lambda c: c.all_reduce([X], "k", out=X),
            lambda c: c.all_reduce(X, "k", out=[X]),
            lambda c: c.all_gather(X, "k", out=[X]),
            lambda c: c.monitored_all_reduce([X], "k"),
        ):
            assert_kinds(await ends(comms, call), ConfigError)
            await works(comms, "k")
        for call in (
            lambda c: c.send([X, X], 1),
            lambda c: c.save("w", [X]),
            lambda c: c.all_reduce_many([X]),
            lambda c: c.all_reduce_many({"a": [X]}),
        ):
            with pytest.raises(ConfigError):
                call(comms[0])


@pytest.mark.asyncio
async def test_nested_lists_of_numbers_are_arrays() -> None:
    async with world(SIZE) as comms:
        for x in ([1.0, 2.0], [[1, 2], [3, 4]], (np.float32(1), 2), []):
            results = await everywhere(comms, lambda comm, x=x: comm.all_reduce(x))
            assert all(same_bits(one, np.asarray(x) * SIZE) for one in results)


@pytest.mark.asyncio
async def test_a_list_that_is_cancelled_ends_everywhere() -> None:
    async with world(SIZE) as comms:
        handles = [comm.all_reduce([X, np.ones(20_000)], "k") for comm in comms[:2]]
        assert handles[0].cancel()
        outcomes = [
            *await ends(comms[1:2], lambda comm: handles[1]),
            *await ends(comms[2:], lambda c: c.all_reduce([X, np.ones(20_000)], "k")),
        ]
        assert_kinds(outcomes, CollectiveAborted)
        await works(comms, "k")
