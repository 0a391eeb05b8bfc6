"""Shapes, lists, layouts in memory and ``out``: what goes in and comes back, and what is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import plans
from kfcomm.errors import CollectiveAborted, ConfigError
from tests.conformance import oracle
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, works, world

SIZES = (1, 2, 3, 5)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (3, 0, 2), (4, 3), (2, 1, 3, 2), (130,))


@pytest.fixture(params=[False, True], ids=["whole", "chunked"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the usual size, and tiny ones."""
    if request.param:
        monkeypatch.setattr(plans, "CHUNK_NBYTES", 40)


def _xs(shape: tuple[int, ...], size: int, dtype: str = "int64") -> list[Any]:
    return [oracle.data(dtype, shape, rank) for rank in range(size)]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("chunks")
async def test_every_shape(size: int) -> None:
    async with world(size) as comms:
        for shape in SHAPES:
            xs = _xs(shape, size)
            total = np.asarray(sum(xs[1:], xs[0]))
            for rank, one in enumerate(await everywhere(comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank]))):
                assert same_bits(one, total), (rank, shape)
            gathered = await everywhere(comms, lambda comm, xs=xs: comm.all_gather(xs[comm.rank]))
            assert all(same_bits(one, np.stack(xs)) for one in gathered), shape
            sent = await everywhere(comms, lambda comm, xs=xs: comm.broadcast(xs[comm.rank], comm.size - 1))
            assert all(same_bits(one, xs[-1]) for one in sent), shape
            assert all(await everywhere(comms, lambda comm, xs=xs: comm.consensus(xs[0]))), shape


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", [(), (3,), (2, 0), (2, 2)])
@pytest.mark.usefixtures("chunks")
async def test_uneven_first_dimensions(size: int, row: tuple[int, ...]) -> None:
    """Concatenation and lists of arrays that differ in their first dimension, empty ones among them."""
    rows = [(3 * rank + 2) % 5 for rank in range(size)]
    xs = [oracle.data("float32", (rows[rank], *row), rank) for rank in range(size)]
    joined = np.concatenate(xs)
    async with world(size) as comms:
        results = await everywhere(comms, lambda comm: comm.all_gather(xs[comm.rank], "a", concat=True))
        assert all(same_bits(one, joined) for one in results)
        for root in range(size):
            results = await everywhere(comms, lambda comm, root=root: comm.gather(xs[comm.rank], root, concat=True))
            assert [one is None for one in results] == [rank != root for rank in range(size)]
            assert same_bits(results[root], joined)
            results = await everywhere(
                comms, lambda comm, root=root: comm.scatter(xs if comm.rank == root else None, root)
            )
            assert all(same_bits(got, want) for got, want in zip(results, xs, strict=True))
        table = [
            [oracle.data("float32", ((i + 2 * j) % 4, *row), 10 * i + j) for j in range(size)] for i in range(size)
        ]
        results = await everywhere(comms, lambda comm: comm.all_to_all(table[comm.rank]))
        for rank, got in enumerate(results):
            assert isinstance(got, list)
            assert all(same_bits(got[i], table[i][rank]) for i in range(size))


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("chunks")
async def test_uneven_reduce_scatter_and_scatter(size: int) -> None:
    async with world(size) as comms:
        for length in (0, 1, size - 1, size, size + 1, 3 * size + 2):
            xs = [oracle.data("int32", (length, 2), rank) for rank in range(size)]
            wanted = oracle.scattered(np.asarray(sum(xs[1:], xs[0])), size)
            results = await everywhere(comms, lambda comm, xs=xs: comm.reduce_scatter(xs[comm.rank]))
            assert all(same_bits(got, want) for got, want in zip(results, wanted, strict=True)), length
            results = await everywhere(comms, lambda comm, xs=xs: comm.scatter(xs[0] if comm.rank == 0 else None))
            assert all(same_bits(got, want) for got, want in zip(results, oracle.scattered(xs[0], size), strict=True))


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("chunks")
async def test_objects(size: int) -> None:
    values = [{"rank": rank, "list": [None, 1.5, "ü" * rank], 3: b"\0" * 200 * rank} for rank in range(size)]
    async with world(size) as comms:
        assert await everywhere(comms, lambda comm: comm.all_gather_object(values[comm.rank])) == [values] * size
        for root in range(size):
            got = await everywhere(comms, lambda comm, root=root: comm.broadcast_object(values[comm.rank], root))
            assert got == [values[root]] * size
            got = await everywhere(comms, lambda comm, root=root: comm.gather_object(values[comm.rank], root))
            assert got == [values if rank == root else None for rank in range(size)]
            got = await everywhere(
                comms, lambda comm, root=root: comm.scatter_object(values if comm.rank == root else None, root)
            )
            assert got == values


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "Fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "read-only": lambda x: _read_only(x.copy()),
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
}


def _read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


@pytest.mark.asyncio
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.usefixtures("chunks")
async def test_input_of_any_layout_is_read_and_left_alone(layout: str, size: int) -> None:
    xs = [LAYOUTS[layout](oracle.data("float64", (6, 4), rank)) for rank in range(size)]
    plain = [np.array(x, dtype=np.float64) for x in xs]
    before = [np.asarray(x).tobytes() for x in xs]
    async with world(size, strategy="star") as comms:
        for got in await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "x")):
            assert same_bits(got, oracle.all_reduced("sum", plain, comms[0].strategy, "x"))
        for rank, got in enumerate(await everywhere(comms, lambda comm: comm.scatter(xs[comm.rank], 0))):
            assert same_bits(got, oracle.scattered(plain[0], size)[rank])
        got = await everywhere(comms, lambda comm: comm.all_gather(xs[comm.rank], concat=True))
        assert same_bits(got[0], np.concatenate(plain))
        await everywhere(comms, lambda comm: comm.reduce_scatter(xs[comm.rank]))
        await everywhere(comms, lambda comm: comm.broadcast(xs[comm.rank]))
    assert [np.asarray(x).tobytes() for x in xs] == before


SHAPED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "all_reduce": lambda comm, x, out: comm.all_reduce(x, out=out),
    "reduce": lambda comm, x, out: comm.reduce(x, comm.size - 1, out=out),
    "broadcast": lambda comm, x, out: comm.broadcast(x, comm.size - 1, out=out),
    "all_to_all": lambda comm, x, out: comm.all_to_all(x, out=out),
    "all_gather": lambda comm, x, out: comm.all_gather(x, out=out),
    "gather": lambda comm, x, out: comm.gather(x, comm.size - 1, out=out),
    "all_gather concat": lambda comm, x, out: comm.all_gather(x, concat=True, out=out),
    "gather concat": lambda comm, x, out: comm.gather(x, comm.size - 1, concat=True, out=out),
    "scatter": lambda comm, x, out: comm.scatter(x, comm.size - 1, out=out),
    "reduce_scatter": lambda comm, x, out: comm.reduce_scatter(x, out=out),
}


def _strided(like: Any) -> Any:
    return np.zeros((2 * like.shape[0], *like.shape[1:]), like.dtype)[::2]


OUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": np.zeros_like,
    "strided": _strided,
    "Fortran": lambda like: np.zeros(like.shape, like.dtype, order="F"),
    "swapped bytes": lambda like: np.zeros(like.shape, like.dtype.newbyteorder()),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SHAPED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("chunks")
async def test_out_of_any_layout(verb: str, size: int) -> None:
    xs = _xs((2 * size, 3), size)
    async with world(size) as comms:
        plain = await everywhere(comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], None))
        for make in OUTS.values():
            outs = [None if want is None else make(want) for want in plain]
            got = await everywhere(comms, lambda comm, outs=outs: SHAPED[verb](comm, xs[comm.rank], outs[comm.rank]))
            assert all(a is b for a, b in zip(got, outs, strict=True)), "the caller's own out comes back"
            for a, b in zip(got, plain, strict=True):
                assert a is b is None or np.array_equal(a, b)


RESHAPED: dict[str, Callable[[Any], Any]] = {
    "axes joined": lambda like: np.zeros(like.size, like.dtype),
    "axes joined, strided": lambda like: np.zeros(2 * like.size, like.dtype)[::2],
    "axes of length 1": lambda like: np.zeros((1, *like.shape, 1), like.dtype),
    "an axis split": lambda like: np.zeros((*like.shape[:-1], 2, 3), like.dtype),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SHAPED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("chunks")
async def test_out_may_join_or_split_axes(verb: str, size: int) -> None:
    xs = _xs((size, 6), size)
    async with world(size) as comms:
        plain = await everywhere(comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], None))
        for make in RESHAPED.values():
            for _ in range(2):  # the second use of a name is compiled
                outs = [None if want is None else make(want) for want in plain]
                got = await everywhere(
                    comms, lambda comm, outs=outs: SHAPED[verb](comm, xs[comm.rank], outs[comm.rank])
                )
                assert all(a is b for a, b in zip(got, outs, strict=True)), "the caller's own out comes back"
                for a, b in zip(got, plain, strict=True):
                    assert a is b is None or np.array_equal(a.reshape(-1), b.reshape(-1))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SHAPED)
async def test_out_with_other_rows_is_refused_each_time(verb: str) -> None:
    size = 3
    xs = _xs((2 * size, 5), size)
    async with world(size) as comms:
        plain = await everywhere(comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], None))
        outs = [None if want is None else np.zeros(want.shape[::-1], want.dtype) for want in plain]
        for _ in range(2):
            outcomes = await ends(comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], outs[comm.rank]))
            assert_kinds(outcomes, *(CollectiveAborted if out is None else ConfigError for out in outs))
        await works(comms)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "broadcast", "all_to_all"])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("chunks")
async def test_out_may_be_the_input_or_overlap_it(verb: str, size: int, shift: int) -> None:
    rows = 2 * size
    async with world(size) as comms:
        buffers = [oracle.data("int64", (rows + shift, 3), rank) for rank in range(size)]
        before = [one.copy() for one in buffers]
        plain = await everywhere(comms, lambda comm: SHAPED[verb](comm, before[comm.rank][:rows], None))
        await everywhere(comms, lambda comm: SHAPED[verb](comm, buffers[comm.rank][:rows], buffers[comm.rank][shift:]))
        for rank, want in enumerate(plain):
            if want is None:
                assert same_bits(buffers[rank], before[rank])
            else:
                assert same_bits(buffers[rank][shift:], want)
                assert same_bits(buffers[rank][:shift], before[rank][:shift])


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_gather", "gather", "scatter", "reduce_scatter", "all_gather concat"])
@pytest.mark.usefixtures("chunks")
async def test_out_of_another_shape_may_overlap_the_input(verb: str) -> None:
    size = 3
    async with world(size) as comms:
        buffers = [oracle.data("int64", (40, 2), rank) for rank in range(size)]
        before = [one.copy() for one in buffers]
        plain = await everywhere(comms, lambda comm: SHAPED[verb](comm, before[comm.rank][2:8], None))
        shapes = [None if want is None else want.shape for want in plain]

        def call(comm: Any) -> Any:
            shape = shapes[comm.rank]
            out = None
            if shape is not None:
                out = buffers[comm.rank].reshape(-1)[: int(np.prod(shape))].reshape(shape)
            return SHAPED[verb](comm, buffers[comm.rank][2:8], out)

        got = await everywhere(comms, call)
        assert all(a is b is None or same_bits(a, b) for a, b in zip(got, plain, strict=True))


BAD_OUTS: dict[str, Callable[[Any], Any]] = {
    "read-only": lambda like: _read_only(np.zeros_like(like)),
    "another size": lambda like: np.zeros(like.size + 1, like.dtype),
    "another dtype": lambda like: np.zeros(like.shape, np.float32),
    "broadcast": lambda like: np.broadcast_to(np.zeros(1, like.dtype), like.shape),
    "bytes": lambda like: b"\0" * like.nbytes,
    "not an array": lambda like: object(),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", BAD_OUTS)
@pytest.mark.parametrize("verb", SHAPED)
async def test_an_out_that_cannot_work(verb: str, bad: str) -> None:
    """The caller gets ConfigError, the others CollectiveAborted, whichever comes first; then all goes on."""
    size = 3
    xs = _xs((2 * size, 3), size)
    async with world(size) as comms:
        plain = await everywhere(comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], None))
        out = BAD_OUTS[bad](plain[-1])
        outcomes = await ends(
            comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], out if comm.rank == size - 1 else None)
        )
        assert_kinds(outcomes, CollectiveAborted, CollectiveAborted, ConfigError)
        again = await everywhere(comms, lambda comm: SHAPED[verb](comm, xs[comm.rank], None))
        assert all(a is b is None or same_bits(a, b) for a, b in zip(again, plain, strict=True))
        await works(comms)


BAD_CALLS: dict[str, Callable[[Any], Any]] = {
    "all_to_all of rows that do not share out": lambda comm: comm.all_to_all(np.zeros(4)),
    "all_to_all of a list of the wrong length": lambda comm: comm.all_to_all([np.zeros(1)] * 2),
    "all_to_all of a list with an out": lambda comm: comm.all_to_all([np.zeros(1)] * 3, out=np.zeros(3)),
    "all_to_all of a list of unlike arrays": lambda comm: comm.all_to_all([np.zeros(1), np.zeros(1, int), np.zeros(1)]),
    "reduce_scatter of a number": lambda comm: comm.reduce_scatter(np.array(1.0)),
    "all_gather concat of a number": lambda comm: comm.all_gather(1.0, concat=True),
    "scatter of a number": lambda comm: comm.scatter(1.0, comm.rank),
    "scatter of nothing": lambda comm: comm.scatter(None, comm.rank),
    "scatter of a list of the wrong length": lambda comm: comm.scatter([np.zeros(1)], comm.rank),
    "scatter of unlike arrays": lambda comm: comm.scatter([np.zeros(1), np.zeros((1, 2)), np.zeros(1)], comm.rank),
    "scatter_object without values": lambda comm: comm.scatter_object(None, comm.rank),
    "a root out of range": lambda comm: comm.broadcast(np.zeros(2), 3),
    "a root below zero": lambda comm: comm.reduce(np.zeros(2), -1),
    "a root of type str": lambda comm: comm.gather(np.zeros(2), "0"),
    "an unknown op": lambda comm: comm.all_reduce(np.zeros(2), op="median"),
    "an op of type list": lambda comm: comm.reduce(np.zeros(2), op=[np.add]),
    "an object array": lambda comm: comm.all_reduce(np.array([None, {}])),
    "a string": lambda comm: comm.all_gather("abc"),
    "a date": lambda comm: comm.broadcast(np.zeros(2, "M8[s]")),
    "a structured array": lambda comm: comm.all_reduce(np.zeros(2, "i4,f4")),
    "a ragged list": lambda comm: comm.all_reduce([[1], [2, 3]]),
    "long double": lambda comm: comm.all_reduce(np.zeros(2, np.longdouble)),
    "an object that msgpack cannot carry": lambda comm: comm.all_gather_object({1, 2}),
    "a function": lambda comm: comm.consensus(print),
    "a negative timeout": lambda comm: comm.all_reduce(np.zeros(2), timeout=-1.0),
    "a timeout of NaN": lambda comm: comm.all_reduce(np.zeros(2), timeout=float("nan")),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", BAD_CALLS)
async def test_calls_that_cannot_work(bad: str) -> None:
    size = 3
    async with world(size) as comms:
        for bad_rank in (0, 2):
            outcomes = await ends(
                comms, lambda comm, at=bad_rank: BAD_CALLS[bad](comm) if comm.rank == at else comm.barrier()
            )
            assert_kinds(outcomes, *(ConfigError if rank == bad_rank else CollectiveAborted for rank in range(size)))
            assert "rank" in str(outcomes[1])
        await works(comms)
        await asyncio.gather(*(comm.all_gather(np.zeros(comm.rank), concat=True) for comm in comms))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["", "a\0b", 3, b"x", "n" * 1025, "\ud800", "ü" * 600])
async def test_names_that_cannot_travel(name: Any) -> None:
    async with world(2) as comms:
        for call in (
            lambda: comms[0].all_reduce(np.zeros(1), name),
            lambda: comms[0].gather(np.zeros(1), name=name, concat=True),
            lambda: comms[0].barrier(name),
            lambda: comms[0].consensus(np.zeros(1), name),
            lambda: comms[0].broadcast_object(1, name=name),
        ):
            with pytest.raises(ConfigError, match="name"):
                call()
        await works(comms, "n" * 1024)
        await works(comms, "ü")


@pytest.mark.asyncio
async def test_ranks_given_as_numpy_integers() -> None:
    """A root is often computed with NumPy; it is as good as an int, on every rank in its own way."""
    async with world(3) as comms:
        root = [np.int64(1), 1, np.uint8(1)]
        x = np.arange(3)
        for verb in ("reduce", "broadcast", "gather", "scatter"):
            await everywhere(comms, lambda comm, verb=verb: getattr(comm, verb)(x, root[comm.rank]))
        await everywhere(comms, lambda comm: comm.gather(x, root[comm.rank], concat=True))
        await everywhere(comms, lambda comm: comm.gather_object(1, root[comm.rank]))
        sent = comms[0].send(x, np.int64(1), np.int32(4))
        assert (await comms[1].recv(np.int64(0), 4)).tolist() == [0, 1, 2]
        await sent


@pytest.mark.asyncio
async def test_arrays_of_as_many_dimensions_as_there_can_be() -> None:
    async with world(2) as comms:
        x = np.arange(4).reshape((4,) + (1,) * 63)
        got = await everywhere(comms, lambda comm: comm.all_gather(x, concat=True))
        assert got[1].shape == (8,) + (1,) * 63
        assert same_bits((await everywhere(comms, lambda comm: comm.all_reduce(x)))[0], 2 * x)


@pytest.mark.asyncio
async def test_an_out_that_cannot_be_written_to_any_more() -> None:
    """An error while the result is converted is raised on that rank only."""
    async with world(2) as comms:
        out = np.zeros((4, 2))[:, 0]
        handles = [comm.all_reduce(np.ones(4), out=out if comm.rank == 0 else None) for comm in comms]
        out.flags.writeable = False
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, ValueError, np.ndarray)
        await works(comms)
