"""The verbs on JAX arrays: results are JAX arrays; ``out`` cannot be one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, ConfigError
from tests.conformance.worlds import assert_kinds, ends, everywhere, works, world

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

SIZE = 3
DTYPES = ["float32", "float16", "bfloat16", "int32", "uint8", "bool", "complex64"]


def _xs(dtype: str) -> list[Any]:
    return [(jnp.arange(12).reshape(6, 2) + rank).astype(dtype) for rank in range(SIZE)]


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", DTYPES)
async def test_every_verb_gives_jax_arrays(dtype: str) -> None:
    xs = _xs(dtype)
    plain = [np.asarray(x) for x in xs]
    op, total = ("or", plain[0] | plain[1] | plain[2]) if dtype == "bool" else ("sum", sum(plain[1:], plain[0]))
    async with world(SIZE) as comms:
        expected: dict[str, tuple[dict[str, Any], list[Any]]] = {
            "all_reduce": ({"op": op}, [total] * SIZE),
            "reduce": ({"op": op}, [total, None, None]),
            "broadcast": ({}, [plain[0]] * SIZE),
            "gather": ({}, [np.stack(plain), None, None]),
            "all_gather": ({}, [np.stack(plain)] * SIZE),
            "reduce_scatter": ({"op": op}, [total[2 * rank : 2 * rank + 2] for rank in range(SIZE)]),
            "all_to_all": ({}, [np.concatenate([x[2 * r : 2 * r + 2] for x in plain]) for r in range(SIZE)]),
        }
        for verb, (options, wanted) in expected.items():
            got = await everywhere(
                comms, lambda comm, verb=verb, options=options: getattr(comm, verb)(xs[comm.rank], **options)
            )
            for one, want in zip(got, wanted, strict=True):
                if want is None:
                    assert one is None
                else:
                    assert isinstance(one, jax.Array)
                    assert one.dtype == xs[0].dtype
                    np.testing.assert_array_equal(np.asarray(one), want, err_msg=verb)
        got = await everywhere(comms, lambda comm: comm.all_gather(xs[comm.rank][: comm.rank], concat=True))
        np.testing.assert_array_equal(np.asarray(got[2]), np.concatenate([x[:r] for r, x in enumerate(plain)]))
        got = await everywhere(comms, lambda comm: comm.scatter(xs[0] if comm.rank == 0 else None))
        assert [isinstance(one, jax.Array) for one in got] == [True, False, False]
        np.testing.assert_array_equal(got[2], plain[0][4:])
        assert all(await everywhere(comms, lambda comm: comm.consensus(xs[1])))


@pytest.mark.asyncio
async def test_a_tree_of_gradients() -> None:
    async with world(2) as comms:
        grads = jax.grad(lambda p: (p["w"] @ jnp.ones(2)).sum() + p["b"].sum())(
            {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
        )
        many = await everywhere(comms, lambda comm: comm.all_reduce_many(grads))
        assert all(isinstance(one, jax.Array) for one in many[0].values())
        np.testing.assert_array_equal(np.asarray(many[1]["b"]), np.full(3, 2.0))


@pytest.mark.asyncio
async def test_messages() -> None:
    async with world(2) as comms:
        x = jnp.arange(6.0)
        sent = comms[0].send(x, 1)
        np.testing.assert_array_equal(await comms[1].recv(0), np.asarray(x))
        await sent


@pytest.mark.asyncio
async def test_unsupported_arrays_are_refused() -> None:
    async with world(2) as comms:
        x = jnp.ones(3)
        outcomes = await ends(comms, lambda comm: comm.all_reduce(x, out=x if comm.rank else None))
        assert_kinds(outcomes, CollectiveAborted, ConfigError)
        with pytest.raises(ConfigError, match="inside"):
            jax.jit(lambda y: comms[0].all_reduce(y))(x)
        assert_kinds(await ends(comms[1:], lambda comm: comm.all_reduce(x)), CollectiveAborted)
        await works(comms)
