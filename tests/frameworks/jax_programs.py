"""What each rank does and checks, for `test_jax_collectives`: eager on threads, compiled in processes of their own.

Computations with ordered callbacks follow each other on a device, whichever thread of a process has begun them: so
ranks that are threads of one process cannot have compiled collectives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import kfcomm.jax
import kfcomm.sync


def tree_of(rank: int) -> dict[str, Any]:
    return {
        "w": jnp.arange(6.0).reshape(2, 3) + rank,
        "more": {f"{place}": jnp.full(2, place + rank, jnp.float32) for place in range(12)},
        "many": [jnp.full(4, rank, jnp.int32), (jnp.full((), 2.0 * rank, jnp.bfloat16),)],
        "none": None,
    }


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def trees(comm: Any, wrap: Callable[[Any], Any]) -> None:
    given = [tree_of(rank) for rank in range(comm.size)]
    mine = given[comm.rank]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *given)
    same(wrap(lambda x: kfcomm.jax.all_reduce(x, comm))(mine), total)
    same(wrap(lambda x: kfcomm.jax.all_reduce(x, comm, op="max", name="most"))(mine), given[-1])
    same(wrap(lambda x: kfcomm.jax.broadcast(x, comm, 1))(mine), given[1])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)
    same(wrap(lambda x: kfcomm.jax.all_gather(x, comm))(mine), stacked)


def gradients(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """Of sum over ranks r of loss_r(all_reduce(x)), by x of each rank; and the gradients of that."""
    xs = jnp.stack([jnp.array([1.0, 2.0]) + rank for rank in range(comm.size)])
    for op in ("sum", "avg"):

        def loss(x: Any, op: str = op) -> Any:
            tree = {"x": x, "n": jnp.arange(2)} if op == "sum" else {"x": x}  # integers have no average
            return (comm.rank + 1) * (kfcomm.jax.all_reduce(tree, comm, name=op, op=op)["x"] ** 2).sum()

        def whole(xs: Any, op: str = op) -> Any:
            found = xs.sum(axis=0) / (comm.size if op == "avg" else 1)
            return sum((rank + 1) * (found**2).sum() for rank in range(comm.size))

        first = jax.grad(loss)
        second = jax.grad(lambda x, first=first: first(x).sum())
        twice = jax.grad(lambda xs, whole=whole: jax.grad(whole)(xs).sum())(xs)
        np.testing.assert_allclose(wrap(first)(xs[comm.rank]), jax.grad(whole)(xs)[comm.rank], rtol=1e-6)
        np.testing.assert_allclose(wrap(second)(xs[comm.rank]), twice[comm.rank], rtol=1e-6)


def other_gradients(comm: Any, wrap: Callable[[Any], Any]) -> None:
    xs = jnp.arange(2.0 * comm.size).reshape(comm.size, 2)
    scale, weight = comm.rank + 1.0, comm.size * (comm.size + 1) / 2
    sent = jax.grad(lambda x: scale * (kfcomm.jax.broadcast(x, comm, 1) ** 3).sum())
    gathered = jax.grad(lambda x: scale * (kfcomm.jax.all_gather(x, comm) ** 3).sum())
    of_all = jax.grad(lambda x: weight * (x**3).sum())(xs)
    wanted = of_all[1] if comm.rank == 1 else jnp.zeros(2)
    np.testing.assert_allclose(wrap(sent)(xs[comm.rank]), wanted, rtol=1e-6)
    np.testing.assert_allclose(wrap(gathered)(xs[comm.rank]), of_all[comm.rank], rtol=1e-6)


def many(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """More independent ones than XLA has threads, large and small: begun in one order on all ranks."""

    def work(xs: list[Any]) -> list[Any]:
        found = [kfcomm.jax.all_reduce(jnp.sin(x), comm, name=f"x{place}") for place, x in enumerate(xs)]
        return [jnp.cos(one) + place for place, one in enumerate(found)]

    xs = [jnp.full(20_000 if place % 3 else 3, place + comm.rank, jnp.float32) for place in range(16)]
    compiled = wrap(work)
    for _ in range(5):
        found = compiled(xs)
    wanted = [np.cos(sum(np.sin(place + rank) for rank in range(comm.size))) + place for place in range(16)]
    np.testing.assert_allclose([float(one[0]) for one in found], wanted, rtol=1e-4, atol=1e-5)


def loops(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """Loops and branches that are compiled."""

    def work(x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, _: (kfcomm.jax.all_reduce(x, comm, op="avg") + 1, None), x, None, length=4)
        return jax.lax.cond(x[0] > 0, lambda x: kfcomm.jax.all_reduce(x, comm, name="more"), lambda x: x, x)

    mean = (comm.size - 1) / 2
    assert wrap(work)(jnp.full(2, comm.rank, jnp.float32)).tolist() == [comm.size * (mean + 4)] * 2


def errors(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """What JAX has compiled fails with an error of JAX's."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="error calling callback"):
        jax.block_until_ready(wrap(lambda x: kfcomm.jax.all_reduce(x, comm))(jnp.ones(2 + comm.rank)))


PROGRAMS = {one.__name__: one for one in (trees, gradients, other_gradients, many, loops, errors)}

if __name__ == "__main__":
    with kfcomm.sync.init() as world:
        for chosen in sys.argv[1:]:
            PROGRAMS[chosen](world, jax.jit)
            print(chosen)
