"""The verbs on torch tensors: results are tensors, inputs are left alone, ``out`` is written in place."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns, works, world

torch = pytest.importorskip("torch", reason="torch is not installed")

SIZE = 3
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64]


def _xs(dtype: Any, shape: tuple[int, ...] = (6, 2)) -> list[Any]:
    return [(torch.arange(12).reshape(shape) + rank).to(dtype) for rank in range(SIZE)]


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_verb_gives_tensors(dtype: Any) -> None:
    xs = _xs(dtype)
    before = [x.clone() for x in xs]
    total = xs[0] + xs[1] + xs[2]
    async with world(SIZE) as comms:
        expected: dict[str, list[Any]] = {
            "all_reduce": [total] * SIZE,
            "reduce": [total, None, None],
            "broadcast": [xs[0]] * SIZE,
            "gather": [torch.stack(xs), None, None],
            "all_gather": [torch.stack(xs)] * SIZE,
            "reduce_scatter": list(total.split(2)),
            "all_to_all": [torch.cat([x[2 * rank : 2 * rank + 2] for x in xs]) for rank in range(SIZE)],
        }
        for verb, wanted in expected.items():
            got = await everywhere(comms, lambda comm, verb=verb: getattr(comm, verb)(xs[comm.rank]))
            for one, want in zip(got, wanted, strict=True):
                if want is None:
                    assert one is None
                else:
                    assert isinstance(one, torch.Tensor)
                    assert one.dtype == dtype
                    assert torch.equal(one, want), verb
        for verb in ("gather", "all_gather"):
            got = await everywhere(
                comms, lambda comm, verb=verb: getattr(comm, verb)(xs[comm.rank][: comm.rank], concat=True)
            )
            assert torch.equal(got[0], torch.cat([x[:rank] for rank, x in enumerate(xs)]))
        got = await everywhere(comms, lambda comm: comm.scatter(xs[comm.rank]))
        assert isinstance(got[0], torch.Tensor)
        assert np.asarray(got[1].astype(np.complex128)).tolist() == xs[0][2:4].to(torch.complex128).tolist()
        got = await everywhere(comms, lambda comm: comm.all_to_all([xs[comm.rank][:rank] for rank in range(SIZE)]))
        assert all(isinstance(one, torch.Tensor) for parts in got for one in parts)
        assert all(await everywhere(comms, lambda comm: comm.consensus(xs[0])))
        many = await everywhere(comms, lambda comm: comm.all_reduce_many({"w": xs[comm.rank]}))
        assert torch.equal(many[1]["w"], total)
    assert all(torch.equal(x, y) for x, y in zip(xs, before, strict=True))


@pytest.mark.asyncio
async def test_out_in_place_and_of_any_layout() -> None:
    async with world(SIZE) as comms:
        xs = _xs(torch.float32)
        total = xs[0] + xs[1] + xs[2]
        outs = [torch.zeros(6, 2), torch.zeros(2, 6).T, torch.zeros(12, 2)[::2]]
        got = await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], out=outs[comm.rank]))
        assert all(one is out and torch.equal(out, total) for one, out in zip(got, outs, strict=True))
        got = await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], out=xs[comm.rank]))
        assert all(one is x and torch.equal(x, total) for one, x in zip(got, xs, strict=True))
        mixed = await everywhere(comms, lambda comm: comm.all_reduce(xs[0] if comm.rank else xs[0].numpy()))
        assert [type(one) for one in mixed] == [np.ndarray, torch.Tensor, torch.Tensor]


WRITES: dict[str, Any] = {
    "all_reduce": lambda comm, x, out: comm.all_reduce(x, out=out),
    "all_reduce_many": lambda comm, x, out: comm.all_reduce_many({"x": x}, out={"x": out}),
    "list": lambda comm, x, out: comm.all_reduce([x, x], out=[out, torch.empty(6, 2)]),
    "broadcast": lambda comm, x, out: comm.broadcast(x, out=out),
    "gathered": lambda comm, x, out: comm.all_gather(x, out=[out, torch.empty(6, 2), torch.empty(6, 2)]),
    "scatter": lambda comm, x, out: comm.scatter([x] * SIZE, out=out),
    "all_to_all": lambda comm, x, out: comm.all_to_all([x] * SIZE, out=[out, torch.empty(6, 2), torch.empty(6, 2)]),
}


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize("place", ["contiguous", "strided", "view"])
@pytest.mark.asyncio
async def test_autograd_notices_what_is_written_in_place(verb: str, place: str) -> None:
    async with world(SIZE) as comms:
        weights = [torch.ones(6, 2, requires_grad=True) for _ in comms]
        memory = [torch.ones(12, 2) for _ in comms]
        outs = [one[::2] if place == "strided" else one[:6] for one in memory]
        if place == "contiguous":
            outs = [torch.ones(6, 2) for _ in comms]
        losses = [(weight * out).sum() for weight, out in zip(weights, outs, strict=True)]
        before = [out._version for out in outs]
        await everywhere(comms, lambda comm: WRITES[verb](comm, _xs(torch.float32)[comm.rank], outs[comm.rank]))
        assert all(out._version > version for out, version in zip(outs, before, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()
        parameter = torch.nn.Parameter(torch.ones(6, 2))
        with torch.inference_mode():
            counted_by_nobody = torch.ones(6, 2)
        for out in (parameter, counted_by_nobody):
            results = await everywhere(
                comms, lambda comm, out=out: comm.broadcast(_xs(torch.float32)[0], out=out if comm.rank == 1 else None)
            )
            assert results[1] is out
            assert torch.equal(out, _xs(torch.float32)[0])


@pytest.mark.asyncio
async def test_a_message_that_is_received_in_place_is_noticed_too() -> None:
    async with world(2) as comms:
        weight, out = torch.ones(6, 2, requires_grad=True), torch.ones(6, 2)
        loss = (weight * out).sum()
        sent = comms[0].send(_xs(torch.float32)[0], 1)
        await comms[1].recv(0, out=out)
        await sent
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.asyncio
async def test_gradients_stay_out_of_it() -> None:
    async with world(2) as comms:
        layer = torch.nn.Linear(3, 2)
        layer(torch.ones(1, 3)).sum().backward()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        many = await everywhere(comms, lambda comm: comm.all_reduce_many(grads, op="avg"))
        assert all(torch.equal(many[0][name], grads[name]) for name in grads)
        got = await everywhere(comms, lambda comm: comm.broadcast(layer.weight))
        assert not got[0].requires_grad
        assert torch.equal(got[1], layer.weight)


@pytest.mark.asyncio
async def test_messages_queues_and_blobs() -> None:
    async with world(2) as comms:
        x = torch.arange(6).reshape(2, 3).T
        sent = comms[0].send(x, 1)
        assert (await comms[1].recv(0)).tolist() == x.tolist()
        await sent
        out = torch.zeros(3, 2, dtype=torch.int64)
        sent = comms[0].send(x, 1)
        assert await comms[1].recv(0, out=out) is out
        assert torch.equal(out, x)
        await sent
        ways = [comm.queue("q", 0, 1) for comm in comms]
        await ways[0].put(x.to(torch.bfloat16))
        x += 1
        assert (await ways[1].get()).astype(int).tolist() == (x - 1).tolist()
        comms[0].save("w", x)
        assert (await comms[1].request("w", 0)).tolist() == x.tolist()


@pytest.mark.asyncio
async def test_recv_gives_the_kind_of_like() -> None:
    like = torch.empty(0)
    async with world(2) as comms:
        x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        sent = comms[0].send(x, 1)
        got = await comms[1].recv(0, like=like)
        assert torch.equal(got, x)
        await sent
        parts = await everywhere(comms, lambda comm: comm.scatter(x if comm.rank == 0 else None, like=like))
        assert torch.equal(parts[1], x[1:])
        ways = [comm.queue("q", 0, 1) for comm in comms]
        await ways[0].put(x)
        assert torch.equal(await ways[1].get(like=like), x)
        out = torch.zeros(2, 3, dtype=torch.bfloat16)
        await ways[0].put(x)
        assert await ways[1].get(out=out) is out
        assert torch.equal(out, x)
        for comm in comms:
            comms[0].save("w", x)
            assert torch.equal(await comm.request("w", 0, like=like), x)


@pytest.mark.asyncio
async def test_ops_and_dtypes_are_given_as_torch_has_them() -> None:
    ops = torch.distributed.ReduceOp
    async with world(SIZE) as comms:
        xs = _xs(torch.float32)
        total = xs[0] + xs[1] + xs[2]
        for op, want in ((ops.SUM, total), (ops.AVG, total / SIZE), (ops.MAX, xs[2]), (torch.minimum, xs[0])):
            for _ in range(3):
                got = await everywhere(comms, lambda comm, op=op: comm.all_reduce(xs[comm.rank], "x", op=op))
                assert all(torch.equal(one, want) for one in got)
        got = await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], wire_dtype=torch.bfloat16))
        assert all(torch.equal(one, total) for one in got)
        assert comms[0].empty(3, torch.bfloat16).dtype.name == "bfloat16"
        assert comms[0].empty(3, torch.int32).dtype == np.int32
        outcomes = await ends(comms, lambda comm: comm.all_reduce(xs[comm.rank], op=ops.PREMUL_SUM))
        assert_kinds(outcomes, ConfigError)


@pytest.mark.asyncio
async def test_unsupported_tensors_are_refused() -> None:
    async with world(2) as comms:
        for bad in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).to(torch.float8_e4m3fn)):
            outcomes = await ends(comms, lambda comm, bad=bad: comm.all_reduce(torch.ones(2) if comm.rank else bad))
            assert_kinds(outcomes, ConfigError, CollectiveAborted)
        outcomes = await ends(
            comms, lambda comm: comm.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float16)[comm.rank]))
        )
        assert_kinds(outcomes, CollectiveMismatch)
        handle = comms[0].all_reduce(torch.ones(2))
        await turns()
        handle.cancel()
        assert_kinds(
            await asyncio.gather(comms[1].all_reduce(torch.ones(2)), return_exceptions=True), CollectiveAborted
        )
        await works(comms)


@pytest.mark.asyncio
async def test_persistent_collectives_take_what_the_tensors_hold() -> None:
    async with world(SIZE) as comms:
        xs, out = _xs(torch.float32), torch.zeros(6, 2)
        plain = [comm.all_reduce_init(xs[comm.rank], "x") for comm in comms]
        into = [comm.all_reduce_init(xs[comm.rank], "y", out=out if comm.rank == 0 else None) for comm in comms]
        for _ in range(3):
            for x in xs:
                x += 1
            for prepared in (plain, into):
                results = await everywhere(comms, lambda comm, each=prepared: each[comm.rank].start())
                assert all(torch.equal(one, xs[0] + xs[1] + xs[2]) for one in results)
            assert into[0].result() is out
