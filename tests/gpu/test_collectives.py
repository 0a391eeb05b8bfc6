"""The public interface on a real GPU, in a world of one, which NCCL serves: every verb, kind of array and stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm import sync
from kfcomm.errors import ConfigError, KfcommError
from tests.conformance.worlds import turns
from tests.gpu.arrays import Gate, Hog, copy, library, like, new_stream, on_device

pytestmark = pytest.mark.gpu

BIG = 16 << 20
"""Elements: 64 MiB of float32."""
DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int32", "uint32", "int64", "uint64"]
WITHOUT_NCCL = ["bool", "int16", "uint16", "complex64", "complex128"]
"""NCCL has no such elements; what it cannot reduce takes another way."""


@pytest.fixture(scope="module", autouse=True)
def nccl() -> None:
    if not import_module("cupy.cuda.nccl").available:
        pytest.skip("CuPy finds no NCCL")


@asynccontextmanager
async def alone(**settings: Any) -> AsyncIterator[Any]:
    async with kfcomm.init(device="cuda", **settings) as comm:
        assert comm.size == 1
        yield comm


def values(dtype: Any = "float32", count: int = 12) -> Any:
    return (np.arange(count).reshape(-1, 2) % 2 if dtype == "bool" else np.arange(count).reshape(-1, 2)).astype(dtype)


@pytest.mark.asyncio
async def test_the_route_is_nccl() -> None:
    async with alone() as comm:
        assert comm.route.route == "backend"
    async with alone(transport="nccl") as comm:
        assert comm.route.route == "backend"


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [*DTYPES, *WITHOUT_NCCL])
async def test_every_verb_gives_arrays_on_the_device(dtype: str) -> None:
    cupy = library("cupy")
    x = on_device(values(dtype))
    op = "or" if dtype == "bool" else "sum"
    async with alone() as comm:
        expected: dict[str, tuple[Any, dict[str, Any]]] = {
            "all_reduce": (values(dtype), {"op": op}),
            "reduce": (values(dtype), {"op": op}),
            "broadcast": (values(dtype), {}),
            "all_gather": (values(dtype)[None], {}),
            "gather": (values(dtype)[None], {}),
            "reduce_scatter": (values(dtype), {"op": op}),
            "scatter": (values(dtype), {}),
            "all_to_all": (values(dtype), {}),
        }
        for verb, (wanted, options) in expected.items():
            y = await getattr(comm, verb)(x, **options)
            assert isinstance(y, cupy.ndarray), verb
            assert y.dtype == x.dtype
            assert y.data.ptr != x.data.ptr  # inputs are the caller's
            np.testing.assert_array_equal(y.get(), wanted, verb)
        many = await comm.all_reduce_many({"a": x, "b": x[:3]}, op=op)
        np.testing.assert_array_equal(many["a"].get(), values(dtype))
        np.testing.assert_array_equal(many["b"].get(), values(dtype)[:3])
        await comm.synchronize()
    np.testing.assert_array_equal(x.get(), values(dtype))


@pytest.mark.asyncio
async def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    try:
        x = on_device(values().astype(ml_dtypes.bfloat16))
    except (TypeError, ValueError) as error:
        pytest.skip(f"this CuPy has no bfloat16: {error}")
    async with alone() as comm:
        y = await comm.all_reduce(x)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y.get().astype(np.float32), values())


@pytest.mark.asyncio
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
async def test_every_op(op: str) -> None:
    async with alone() as comm:
        np.testing.assert_array_equal((await comm.all_reduce(on_device(values()), op=op)).get(), values())


@pytest.mark.asyncio
async def test_results_go_where_they_are_asked_for() -> None:
    async with alone() as comm:
        x = on_device(values())
        out = like(x)
        assert await comm.all_reduce(x, out=out) is out
        np.testing.assert_array_equal(out.get(), values())
        before = x.data.ptr
        assert await comm.all_reduce(x, out=x) is x
        assert x.data.ptr == before
        np.testing.assert_array_equal(x.get(), values())
        # memory that is not contiguous is packed, and written back
        wide = on_device(np.zeros((6, 4), np.float32))
        part = wide[:, ::2]
        assert await comm.all_reduce(x, out=part) is part
        np.testing.assert_array_equal(wide.get()[:, ::2], values())
        assert not wide.get()[:, 1::2].any()
        np.testing.assert_array_equal((await comm.all_reduce(x.T)).get(), values().T)


@pytest.mark.asyncio
async def test_arrays_of_no_elements_and_of_no_dimension() -> None:
    async with alone() as comm:
        assert (await comm.all_reduce(on_device(np.zeros((0, 3), np.float32)))).shape == (0, 3)
        y = await comm.all_reduce(on_device(np.float32(7)))
        assert (y.shape, float(y.get())) == ((), 7.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("given", ["stream=", "current"])
async def test_the_result_is_ready_on_the_callers_stream_and_the_host_has_not_waited(given: str) -> None:
    right, wrong = on_device(np.arange(BIG, dtype=np.float32)), on_device(np.zeros(BIG, np.float32))
    async with alone() as comm:
        out = like(right)
        await comm.all_reduce(wrong, "warm", out=out)  # the first makes what the others use
        await comm.synchronize()
        stream = new_stream()
        gate = Gate(stream)
        copy(right, wrong, stream)  # what the caller's own kernel would do: the input is right behind the gate only
        if given == "current":
            with stream:
                handle = comm.all_reduce(wrong, "x", out=out)
        else:
            handle = comm.all_reduce(wrong, "x", out=out, stream=stream)
        assert await handle is out
        assert not gate.is_open
        gate.open()
        # read on the stream, with nothing else in between
        np.testing.assert_array_equal(out.get(stream=stream), np.arange(BIG, dtype=np.float32))
        await comm.synchronize()


@pytest.mark.asyncio
async def test_synchronize_waits_for_the_device() -> None:
    async with alone() as comm:
        x, stream = on_device(values()), new_stream()
        await comm.all_reduce(x, "warm")
        await comm.synchronize()
        gate = Gate(stream)
        await comm.all_reduce(x, "x", stream=stream)
        assert not stream.done
        waiting = asyncio.ensure_future(comm.synchronize())
        await turns()
        assert not waiting.done()
        gate.open()
        await waiting


@pytest.mark.asyncio
async def test_hundreds_of_names_at_once_in_any_order() -> None:
    async with alone() as comm:
        xs = {f"x/{number}": on_device(np.full(1 + 37 * number, number, np.float32)) for number in range(214)}
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(list(xs)).tolist()
            handles = {name: comm.all_reduce(xs[name], name) for name in order}
            results = {name: await handle for name, handle in handles.items()}
            for name, x in xs.items():
                np.testing.assert_array_equal(results[name].get(), x.get())


@pytest.mark.asyncio
async def test_torch_tensors() -> None:
    if find_spec("torch") is None or not library("torch").cuda.is_available():
        pytest.skip("no torch with CUDA here")
    torch = library("torch")
    async with alone() as comm:
        x = torch.arange(12, dtype=torch.float32, device="cuda").reshape(6, 2)
        y = await comm.all_reduce(x, "x")
        assert isinstance(y, torch.Tensor)
        assert y.is_cuda
        assert torch.equal(y, x)
        assert await comm.all_reduce(x, "x", out=x) is x
        half = torch.ones(5, dtype=torch.bfloat16, device="cuda")
        z = await comm.all_reduce(half, "half")
        assert z.dtype == torch.bfloat16
        assert torch.equal(z, half)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            w = await comm.all_reduce(x * 2, "stream")
            assert torch.equal(w, x * 2)  # on the same stream
        many = await comm.all_reduce_many({"a": x, "b": x[:1]}, op="avg")
        assert torch.equal(many["b"], x[:1])
        torch.cuda.synchronize()


@pytest.mark.asyncio
async def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("no JAX with CUDA here")
    async with alone() as comm:
        x = jax.numpy.arange(12, dtype=jax.numpy.float32).reshape(6, 2)
        y = await comm.all_reduce(x, "x")
        assert isinstance(y, jax.Array)
        assert y.devices() == x.devices()
        np.testing.assert_array_equal(np.asarray(y), values())
        np.testing.assert_array_equal(np.asarray(await comm.all_gather(x)), values()[None])


def test_the_blocking_interface() -> None:
    cupy = library("cupy")
    x = on_device(values())
    with sync.init(device="cuda") as comm:
        y = comm.all_reduce(x, "x")
        assert isinstance(y, cupy.ndarray)
        np.testing.assert_array_equal(y.get(), values())
        stream = new_stream()
        with stream:  # that of this thread, although another one does the work
            out = like(x)
            handle = comm.all_reduce_async(x, "y", out=out)
            assert handle.wait() is out
        np.testing.assert_array_equal(out.get(stream=stream), values())
        comm.synchronize()


@pytest.mark.asyncio
async def test_a_device_without_memory_left_fails_one_collective_and_the_next_works() -> None:
    async with alone() as comm:
        x = on_device(np.arange(4 * BIG, dtype=np.float32))  # 256 MiB
        small = on_device(values())
        await comm.all_reduce(small, "small")
        with Hog(left_nbytes=64 << 20):
            with pytest.raises((KfcommError, MemoryError)):
                await comm.all_reduce(x, "x")
            np.testing.assert_array_equal((await comm.all_reduce(small, "small")).get(), values())
        y = await comm.all_reduce(x, "x")
        np.testing.assert_array_equal(y.get(), np.arange(4 * BIG, dtype=np.float32))


@pytest.mark.asyncio
async def test_host_only_verbs_refuse_device_arrays() -> None:
    x = on_device(values())
    async with alone() as comm:
        with pytest.raises(ConfigError):
            await comm.all_reduce(x, "x", out=np.empty(values().shape, np.float32))
        np.testing.assert_array_equal((await comm.all_reduce(x, "x")).get(), values())
    async with kfcomm.init(device="none") as comm:
        with pytest.raises(ConfigError):
            await comm.all_reduce(x, "x")
        np.testing.assert_array_equal(await comm.all_reduce(values(), "x"), values())
