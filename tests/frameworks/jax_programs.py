"""Programs of the ranks of `test_jax_collectives`: eager ones on threads, compiled ones in their own processes.

Computations with ordered callbacks follow each other on a device, whichever thread of a process has begun them: so
ranks that are threads of one process cannot have compiled collectives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import kfcomm.jax
import kfcomm.sync
from kfcomm.errors import ConfigError
from kfcomm.jax import optimizers
from kfcomm.train import SMA, AdaSGD, Agreement, DiLoCo, ElasticAveraging, LocalSGD, SynchronousSGD


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


def checkpointed(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """A function whose values are computed again in the backward pass, with its collectives."""

    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(kfcomm.jax.all_reduce(x @ w, comm, name="hidden", op="avg"))

    def loss(layer: Any, w: Any, x: Any) -> Any:
        return (layer(w, layer(w, x)) ** 2).sum()

    w, x = jnp.eye(3) + 0.1, jnp.arange(6.0).reshape(2, 3) * (comm.rank + 1) / 10
    found = wrap(jax.grad(partial(loss, jax.checkpoint(layer))))(w, x)
    assert found.tolist() == wrap(jax.grad(partial(loss, layer)))(w, x).tolist()


def devices(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """Ranks with several devices: a call for all of them, and calls of each, in ``shard_map`` and ``pmap``."""
    number = jax.local_device_count()
    assert number > 1
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("local",))
    cut, whole = jax.sharding.PartitionSpec("local"), jax.sharding.PartitionSpec()
    x = jnp.arange(3.0 * number) + comm.rank
    xs = np.stack([np.arange(3.0 * number) + rank for rank in range(comm.size)])

    def shards(call: Any, into: Any = cut, **options: Any) -> Any:
        return wrap(jax.shard_map(call, mesh=mesh, in_specs=cut, out_specs=into, **options))

    of_devices = shards(lambda x: jax.lax.psum(x, "local"), whole)
    found = wrap(lambda x: kfcomm.jax.all_reduce({"x": of_devices(x)}, comm, name="once"))(x)
    same(found, {"x": jnp.asarray(xs.sum(0).reshape(number, 3).sum(0), jnp.float32)})

    def each(x: Any) -> Any:
        tree = kfcomm.jax.all_reduce({"x": x, "twice": 2 * x}, comm, name="each")
        return tree, kfcomm.jax.broadcast(x, comm, 1), kfcomm.jax.all_gather(x, comm, name="all")

    stacked = jax.sharding.PartitionSpec(None, "local")
    for options in ({}, {"check_vma": False}):
        for _ in range(3):
            tree, sent, gathered = shards(each, (cut, cut, stacked), **options)(x)
            same(tree, {"x": jnp.asarray(xs.sum(0), jnp.float32), "twice": jnp.asarray(2 * xs.sum(0), jnp.float32)})
            same((sent, gathered), (jnp.asarray(xs[1], jnp.float32), jnp.asarray(xs, jnp.float32)))
    mapped = jax.pmap(lambda x: kfcomm.jax.all_reduce(x, comm, name="pmap", op="avg"), axis_name="local")
    np.testing.assert_allclose(np.asarray(mapped(x.reshape(number, 3))).ravel(), xs.mean(0))

    def loss(w: Any, options: dict[str, Any]) -> Any:
        def part(w: Any, x: Any) -> Any:
            return jax.lax.pmean(kfcomm.jax.all_reduce((w * x).sum() ** 2, comm, name="loss", op="avg"), "local")

        return jax.shard_map(part, mesh=mesh, in_specs=(whole, cut), out_specs=whole, **options)(w, x)

    wanted = np.mean([2 * 3.0 * (xs[comm.rank].reshape(number, 3).sum(1)) ** 2])
    for options in ({}, {"check_vma": False}):
        np.testing.assert_allclose(wrap(jax.grad(partial(loss, options=options)))(3.0), wanted, rtol=1e-5)
    way = optimizers.pair_averaging(comm)
    state = way.init(jnp.zeros(3))
    with pytest.raises(ConfigError, match="inside shard_map and pmap only"):
        shards(lambda x: way.update(x, state, x)[0])(x)


def processes(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """Meshes of devices of all ranks, which are processes of ``jax.distributed``."""
    jax.distributed.initialize(os.environ["COORDINATOR"], comm.size, comm.rank)
    number = jax.local_device_count()
    by_rank = np.array(jax.devices()).reshape(comm.size, number)
    values = np.arange(3.0 * by_rank.size, dtype=np.float32)
    cut = jax.sharding.PartitionSpec(("one", "other"))

    def laid_out(mesh: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, cut)
        return jax.make_array_from_callback((3 * mesh.size,), sharding, lambda where: values[where])

    def both(x: Any) -> Any:
        slope = jax.grad(lambda x: (kfcomm.jax.all_reduce(x, comm, name="loss") ** 2).sum())
        return kfcomm.jax.all_reduce({"x": x}, comm)["x"], slope(x)

    for is_turned in (False, True):
        mesh = jax.sharding.Mesh(by_rank.T if is_turned else by_rank, ("one", "other"))
        given = values.reshape(*mesh.devices.shape, 3)
        wanted = np.broadcast_to(given.sum(int(is_turned), keepdims=True), given.shape).ravel()
        found, slopes = wrap(jax.shard_map(both, mesh=mesh, in_specs=cut, out_specs=cut))(laid_out(mesh))
        for shard, slope in zip(found.addressable_shards, slopes.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
            np.testing.assert_array_equal(np.asarray(slope.data), 2 * comm.size * wanted[slope.index])
    with pytest.raises(ConfigError, match=f"computation of {mesh.size} devices, which may be of several processes"):
        wrap(lambda x: kfcomm.jax.all_reduce(x, comm))(laid_out(mesh))
    if number > 1:
        mesh = jax.sharding.Mesh(by_rank.reshape(1, -1)[:, :-1], ("one", "other"))
        with pytest.raises(ConfigError, match=f"not {number} of process 0, {number - 1} of process 1"):
            wrap(jax.shard_map(both, mesh=mesh, in_specs=cut, out_specs=cut))(laid_out(mesh))
    local = wrap(lambda x: kfcomm.jax.all_reduce(x, comm))(jnp.arange(3.0) + comm.rank)
    assert local.tolist() == [1, 3, 5]
    jax.distributed.shutdown()


def errors(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """A failure in compiled code raises an error of JAX, with the text of ours."""
    said = r"CollectiveMismatch: 'tree/0' \(many\) differs between ranks"
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.block_until_ready(wrap(lambda x: kfcomm.jax.all_reduce(x, comm))(jnp.ones(2 + comm.rank)))


RATE = np.float32(0.2)
SGD = optimizers.Transformation(
    lambda params: (), lambda updates, state, params=None: (jax.tree.map(lambda g: -RATE * g, updates), state)
)


def chained(*parts: Any) -> optimizers.Transformation:
    """Chain transformations, as ``optax.chain`` does."""

    def update(updates: Any, states: Any, params: Any = None) -> Any:
        found = []
        for part, state in zip(parts, states, strict=True):
            updates, after = part.update(updates, state, params)
            found.append(after)
        return updates, tuple(found)

    return optimizers.Transformation(lambda params: tuple(part.init(params) for part in parts), update)


AGREEMENTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Agreement]]] = {
    "synchronous": (
        lambda comm: chained(optimizers.synchronous_sgd(comm, name="ssgd"), SGD),
        lambda comm, _: SynchronousSGD(comm),
    ),
    "adasum": (
        lambda comm: chained(optimizers.synchronous_sgd(comm, op="adasum", name="adasum"), SGD),
        lambda comm, _: SynchronousSGD(comm, op="adasum"),
    ),
    "sma": (lambda comm: chained(SGD, optimizers.sma(comm, 0.3, name="sma")), lambda comm, _: SMA(comm, 0.3)),
    "elastic": (
        lambda comm: chained(SGD, optimizers.elastic_averaging(comm, 0.2, every=2, name="elastic")),
        lambda comm, tree: ElasticAveraging(comm, tree, 0.2, every=2),
    ),
    "local": (
        lambda comm: chained(SGD, optimizers.local_sgd(comm, 3, name="local")),
        lambda comm, _: LocalSGD(comm, 3),
    ),
    "diloco": (
        lambda comm: chained(SGD, optimizers.diloco(comm, every=2, lr=0.5, name="diloco")),
        lambda comm, tree: DiLoCo(comm, tree, every=2, lr=0.5),
    ),
    "adasgd": (
        lambda comm: optimizers.adasgd(comm, SGD, 0.3, after=3, name="adasgd"),
        lambda comm, _: AdaSGD(comm, 0.3, after=3),
    ),
}


def trained(comm: Any, wrap: Callable[[Any], Any], optimizer: Any, num_steps: int = 6) -> tuple[Any, Any]:
    """The model in the end, and the last state; a gradient is x minus the number of the rank and of the step."""
    model = {"w": jnp.ones((3, 2)), "b": [-jnp.ones(2)]}
    state = optimizer.init(model)

    def step(model: Any, state: Any, target: Any) -> Any:
        updates, state = optimizer.update(jax.tree.map(lambda x: x - target, model), state, model)
        return jax.tree.map(lambda x, u: x + u, model, updates), state

    compiled = wrap(step)
    for number in range(num_steps):
        model, state = compiled(model, state, jnp.float32(comm.rank + number))
    return model, state


def agreements(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """Transformations come to what the loop of `kfcomm.train` comes to."""
    for make, way_of in AGREEMENTS.values():
        found, _ = trained(comm, wrap, make(comm))
        model = {"w": np.ones((3, 2), np.float32), "b": [-np.ones(2, np.float32)]}
        way = way_of(comm, model)
        for number in range(6):
            pending = way.parameters(model)
            given = {
                "w": model["w"] - np.float32(comm.rank + number),
                "b": [model["b"][0] - np.float32(comm.rank + number)],
            }
            agreed, model = way.gradients(given).wait(), pending.wait()
            model = {"w": model["w"] - RATE * agreed["w"], "b": [model["b"][0] - RATE * agreed["b"][0]]}
        np.testing.assert_allclose(found["w"], model["w"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["b"][0], model["b"][0], rtol=1e-4, atol=1e-5)


def adaalter(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """By hand: two local steps, a meeting, one more step."""
    found, state = trained(comm, wrap, optimizers.local_adaalter(comm, SGD, 2, epsilon=0.5, name="adaalter"), 3)
    xs, own = np.ones(comm.size), np.ones(comm.size)
    shared, ranks = 1.0, np.arange(comm.size)
    for number in range(3):
        gradients, before = xs - (ranks + number), xs
        step = -0.2 * gradients / np.sqrt(shared + (number % 2 + 1) * 0.25)
        own = own + gradients**2
        if number == 1:
            before, shared = np.full(comm.size, xs.mean()), own.mean()
            own = np.full(comm.size, shared)
        xs = before + step
    np.testing.assert_allclose(np.asarray(found["w"]), xs[comm.rank], rtol=1e-5)
    assert int(state.count) == 3
    np.testing.assert_allclose(np.asarray(state.own["w"]), own[comm.rank], rtol=1e-5)


def changed(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """An optimizer with a velocity and a count of its own: models are equal when the ranks have changed to S-SGD."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, before = state
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, before, updates)
        return jax.tree.map(lambda v: -RATE * v, velocity), (count + 1, velocity)

    inner = optimizers.Transformation(lambda params: (jnp.int32(0), jax.tree.map(jnp.zeros_like, params)), update)
    for num_steps, is_equal in ((3, False), (8, True)):
        optimizer = optimizers.adasgd(comm, inner, 0.3, after=3, name=f"changed/{num_steps}")
        model, state = trained(comm, wrap, optimizer, num_steps)
        for x in (model["w"], state.inner[1]["w"]):
            spread = np.ptp(np.asarray(comm.all_gather(np.asarray(x), "spread")), axis=0).max()
            assert (spread < 1e-5) == is_equal
        assert int(state.inner[0]) == num_steps


def pairs(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """Models that begin alike, and are drawn apart, come together in pairs."""
    optimizer = optimizers.pair_averaging(comm, seed=1, name="pairs")
    model = {"w": jnp.zeros(3)}
    state = optimizer.init(model)
    model = {"w": jnp.full(3, comm.rank, jnp.float32)}
    update = wrap(optimizer.update)
    for _ in range(40):
        updates, state = update({"w": jnp.zeros(3)}, state, model)
        model = {"w": model["w"] + updates["w"]}
    spread = np.ptp(np.asarray(comm.all_gather(np.asarray(model["w"]), "spread")), axis=0)
    assert spread.max() < 0.2


def left(comm: Any, wrap: Callable[[Any], Any]) -> None:
    """The program leaves while what it has begun goes on; the last of `PROGRAMS`."""
    step = wrap(lambda x: kfcomm.jax.all_reduce(x, comm, name="left"))
    for _ in range(20 * (comm.rank + 1)):
        jnp.ones((200, 200)) @ jnp.ones((200, 200))
    found = step(jnp.full(4, comm.rank, jnp.float32))
    comm.close()
    np.testing.assert_array_equal(np.asarray(found), sum(range(comm.size)))


PROGRAMS = {
    one.__name__: one
    for one in (
        trees,
        gradients,
        other_gradients,
        many,
        loops,
        checkpointed,
        devices,
        processes,
        errors,
        agreements,
        adaalter,
        changed,
        pairs,
        left,
    )
}

if __name__ == "__main__":
    with kfcomm.sync.init() as world:
        for chosen in sys.argv[1:]:
            PROGRAMS[chosen](world, jax.jit)
            print(chosen)
