"""Collectives of pytrees: eager, compiled, and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kfcomm.jax
import kfcomm.sync
from kfcomm import testing
from kfcomm.errors import ConfigError, KfcommError

jax = pytest.importorskip("jax")
jnp = jax.numpy

SIZE = 3
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda call: call, "jit": jax.jit}


def each(main: Callable[[Any], Any], size: int = SIZE) -> list[Any]:
    with testing.sync_world(size) as comms:
        return testing.run_threads(comms, main)


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


@pytest.mark.parametrize("way", WAYS)
def test_trees(way: str) -> None:
    trees = [tree_of(rank) for rank in range(SIZE)]
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def rank(comm: Any) -> tuple[Any, ...]:
        mine, wrap = trees[comm.rank], WAYS[way]
        return (
            wrap(lambda x: kfcomm.jax.all_reduce(x, comm))(mine),
            wrap(lambda x: kfcomm.jax.all_reduce(x, comm, op="max", name="most"))(mine),
            wrap(lambda x: kfcomm.jax.broadcast(x, comm, 1))(mine),
            wrap(lambda x: kfcomm.jax.all_gather(x, comm))(mine),
        )

    for reduced, most, sent, gathered in each(rank):
        same(reduced, total)
        same(most, trees[-1])
        same(sent, trees[1])
        same(gathered, stacked)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_at_all(way: str) -> None:
    with kfcomm.sync.init() as comm:
        assert WAYS[way](lambda x: kfcomm.jax.all_reduce(x, comm))({"a": []}) == {"a": []}
        assert comm.statistics().keys == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_gradient_of_an_all_reduce_is_an_all_reduce(op: str, way: str) -> None:
    """Of sum over ranks r of loss_r(all_reduce(x)), by x of each rank."""

    def rank(comm: Any) -> tuple[Any, Any]:
        def loss(x: Any) -> Any:
            tree = {"x": x, "n": jnp.arange(2)} if op == "sum" else {"x": x}  # integers have no average
            return (comm.rank + 1) * (kfcomm.jax.all_reduce(tree, comm, op=op)["x"] ** 2).sum()

        first = WAYS[way](jax.grad(loss))
        second = WAYS[way](jax.grad(lambda x: first(x).sum()))
        x = jnp.array([1.0, 2.0]) + comm.rank
        return first(x), second(x)

    def whole(xs: Any) -> Any:
        found = xs.sum(axis=0) / (SIZE if op == "avg" else 1)
        return sum((rank + 1) * (found**2).sum() for rank in range(SIZE))

    xs = jnp.stack([jnp.array([1.0, 2.0]) + rank for rank in range(SIZE)])
    wanted = jax.grad(whole)(xs)
    twice = jax.grad(lambda xs: jax.grad(whole)(xs).sum())(xs)
    for mine, (first, second) in zip(wanted, each(rank), strict=True):
        np.testing.assert_allclose(first, mine, rtol=1e-6)
        np.testing.assert_allclose(second, twice[0], rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_other_verbs(way: str) -> None:
    xs = jnp.arange(6.0).reshape(SIZE, 2)

    def rank(comm: Any) -> tuple[Any, Any]:
        scale = comm.rank + 1.0
        sent = jax.grad(lambda x: scale * (kfcomm.jax.broadcast(x, comm, 1) ** 3).sum())
        gathered = jax.grad(lambda x: scale * (kfcomm.jax.all_gather(x, comm) ** 3).sum())
        return WAYS[way](sent)(xs[comm.rank]), WAYS[way](gathered)(xs[comm.rank])

    of_root = jax.grad(lambda x: 6.0 * (x**3).sum())(xs[1])
    of_all = jax.grad(lambda x: 6.0 * (x**3).sum())(xs)
    for number, (sent, gathered) in enumerate(each(rank)):
        np.testing.assert_allclose(sent, of_root if number == 1 else jnp.zeros(2), rtol=1e-6)
        np.testing.assert_allclose(gathered, of_all[number], rtol=1e-6)


def test_many_independent_collectives_in_one_function() -> None:
    """More than XLA has threads, large and small: begun in one order on all ranks, so nobody waits for ever."""

    def rank(comm: Any) -> Any:
        def work(xs: list[Any]) -> list[Any]:
            found = [kfcomm.jax.all_reduce(jnp.sin(x), comm, name=f"x{place}") for place, x in enumerate(xs)]
            return [jnp.cos(one) + place for place, one in enumerate(found)]

        xs = [jnp.full(20_000 if place % 3 else 3, place + comm.rank, jnp.float32) for place in range(16)]
        compiled = jax.jit(work)
        for _ in range(5):
            found = compiled(xs)
        return [float(one[0]) for one in found]

    wanted = [np.cos(sum(np.sin(place + rank) for rank in range(SIZE))) + place for place in range(16)]
    for found in each(rank):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_in_loops_and_branches_that_are_compiled() -> None:
    def rank(comm: Any) -> Any:
        @jax.jit
        def work(x: Any) -> Any:
            x, _ = jax.lax.scan(lambda x, _: (kfcomm.jax.all_reduce(x, comm, op="avg") + 1, None), x, None, length=4)
            return jax.lax.cond(x[0] > 0, lambda x: kfcomm.jax.all_reduce(x, comm, name="more"), lambda x: x, x)

        return work(jnp.full(2, comm.rank, jnp.float32))

    assert [found.tolist() for found in each(rank)] == [[15.0, 15.0]] * SIZE


def test_what_cannot_work() -> None:
    with kfcomm.sync.init() as comm:
        with pytest.raises(ConfigError, match=r"need a communicator of kfcomm.sync, not a Communicator"):
            kfcomm.jax.all_reduce(jnp.ones(2), comm._inner)
        with pytest.raises(ConfigError, match="has a gradient if its op is sum or avg, not max"):
            jax.grad(lambda x: kfcomm.jax.all_reduce(x, comm, op="max").sum())(jnp.ones(2))
        with pytest.raises(ValueError, match="ordered"):
            jax.vmap(lambda x: kfcomm.jax.all_reduce(x, comm))(jnp.ones((2, 2)))


def test_an_error_reaches_whoever_called() -> None:
    """What JAX has compiled fails with an error of JAX's; ours is in its text."""

    def rank(comm: Any) -> str:
        compiled = jax.jit(lambda x: kfcomm.jax.all_reduce(x, comm))
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(compiled(jnp.ones(2 + comm.rank)))
        with pytest.raises(KfcommError):
            kfcomm.jax.all_reduce(jnp.ones(2 + comm.rank), comm, name="eager")
        return str(caught.value)

    for said in each(rank, 2):
        assert "CollectiveMismatch" in said
        assert "float32 (2,) on rank 0 and float32 (3,) on rank 1" in said


def test_arrays_are_read_where_they_are() -> None:
    """An eager call copies nothing of what it is given."""
    seen: list[int] = []

    def rank(comm: Any) -> None:
        x = jnp.arange(5000.0)
        verb = comm.all_reduce_many

        def look(given: Any, **options: Any) -> Any:
            seen.extend(map(id, given.values()))
            return verb(given, **options)

        comm.all_reduce_many = look
        kfcomm.jax.all_reduce({"x": x}, comm)
        assert id(x) in seen

    each(rank, 2)
