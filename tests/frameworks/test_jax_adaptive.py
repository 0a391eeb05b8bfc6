"""A training of JAX arrays whose optimizer exchanges through a `Training`, compiled or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Context, GuardSteps, Policy
from kfcomm.elastic import ElasticSampler
from kfcomm.errors import ConfigError
from kfcomm.testing import run_threads, sync_world
from kfcomm.train import Algorithm, Training

jax = pytest.importorskip("jax")
jnp = jax.numpy

import kfcomm.jax.optimizers as optimizers  # noqa: E402

SAMPLES, BATCH, RATE = 96, 12, 0.05
INPUTS = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
OUTPUTS = (INPUTS @ np.array([1.0, -2.0, 3.0])).astype(np.float32)


class Momentum:
    """An optimizer as optax has them."""

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = jax.tree.map(lambda v, g: 0.9 * v + g, state, updates)
        return jax.tree.map(lambda v: -RATE * v, state), state


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return ((x @ params["w"] + params["b"][0] - y) ** 2).mean()


def start() -> Any:
    return {"w": jnp.zeros(3), "b": [jnp.zeros(())]}


def numbers(params: Any) -> list[float]:
    return [*params["w"].tolist(), float(params["b"][0])]


def train(comm: Any, *, is_compiled: bool, bad: tuple[int, ...] = (), **options: Any) -> tuple[list[float], list[int]]:
    inner = Momentum()
    training = Training(comm, start(), state={"inner": inner.init(start())}, learning_rate=RATE, **options)
    transformation = optimizers.adaptive(training, inner)

    def step(params: Any, state: Any, x: Any, y: Any, scale: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        gradients = jax.tree.map(lambda one: one * scale, gradients)
        updates, state = transformation.update(gradients, state, params, loss=loss)
        return jax.tree.map(jnp.add, params, updates), state

    run = jax.jit(step) if is_compiled else step
    voids = []
    for number, one in enumerate(training.steps(ElasticSampler(SAMPLES, batch=BATCH), passes=3)):
        scale = np.float32(np.nan if number in bad and comm.rank == 1 else 1)
        training.model, training.state.inner = run(
            training.model, training.state.inner, INPUTS[one.indices], OUTPUTS[one.indices], scale
        )
        jax.block_until_ready(training.model)
        if training.is_void:
            voids.append(number)
    return numbers(training.model), voids


def by_hand(transformation: Any, comm: Any, *, is_last: bool = False) -> list[float]:
    """The same with a transformation of one algorithm, before the optimizer or after it."""
    params, inner = start(), Momentum()
    first, second = transformation.init(params), inner.init(params)
    sampler = ElasticSampler(SAMPLES, batch=BATCH)
    while len(batch := sampler.take_until(3)):
        mine = np.array_split(batch, comm.size)[comm.rank]
        gradients = jax.grad(loss_of)(params, INPUTS[mine], OUTPUTS[mine])
        if is_last:
            updates, second = inner.update(gradients, second)
            updates, first = transformation.update(updates, first, params)
        else:
            updates, first = transformation.update(gradients, first, params)
            updates, second = inner.update(updates, second)
        params = jax.tree.map(jnp.add, params, updates)
    return numbers(params)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_elastic", [False, True])
def test_gradients_are_averaged_as_by_synchronous_sgd(is_compiled: bool, is_elastic: bool) -> None:
    with sync_world(2, elastic=is_elastic) as comms:
        found = run_threads(list(comms), lambda comm: train(comm, is_compiled=is_compiled, policies=[GuardSteps()])[0])
    with sync_world(2) as comms:
        wanted = run_threads(comms, lambda comm: by_hand(optimizers.synchronous_sgd(comm), comm))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)


KINDS = {
    "adasum": (Algorithm("adasum"), lambda comm: optimizers.synchronous_sgd(comm, op="adasum")),
    "sma": (Algorithm("sma", alpha=0.3), lambda comm: optimizers.sma(comm, 0.3)),
    "ea-sgd": (Algorithm("ea-sgd", alpha=0.3), lambda comm: optimizers.elastic_averaging(comm, 0.3)),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_algorithms_are_those_of_the_transformations(kind: str, is_compiled: bool) -> None:
    algorithm, make = KINDS[kind]
    with sync_world(2) as comms:
        found = run_threads(comms, lambda comm: train(comm, is_compiled=is_compiled, algorithm=algorithm)[0])
    with sync_world(2) as comms:
        wanted = run_threads(comms, lambda comm: by_hand(make(comm), comm, is_last=kind != "adasum"))
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_void_steps_leave_params_and_the_optimizers_state(is_compiled: bool) -> None:
    def main(comm: Any) -> tuple[list[float], list[int]]:
        return train(comm, is_compiled=is_compiled, policies=[GuardSteps()], bad=(0, 5, 6))

    with sync_world(2) as comms:
        found = run_threads(comms, main)
    for params, voids in found:
        assert voids == [0, 5, 6]
        assert np.allclose(params[:3], [1, -2, 3], atol=1.5)
    assert found[0][0] == found[1][0]


class LowerRate(Policy):
    """Stops learning after some steps."""

    def after_step(self, ctx: Context) -> None:
        if ctx.step == 3:
            ctx.set_learning_rate(0.0)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_updates_follow_the_learning_rate_of_policies(is_compiled: bool) -> None:
    def main(comm: Any) -> list[list[float]]:
        inner, seen = Momentum(), []
        training = Training(
            comm, start(), state={"inner": inner.init(start())}, learning_rate=RATE, policies=[LowerRate()]
        )
        transformation = optimizers.adaptive(training, inner)
        update = jax.jit(transformation.update) if is_compiled else transformation.update
        for one in training.steps(ElasticSampler(SAMPLES, batch=BATCH)):
            gradients = jax.grad(loss_of)(training.model, INPUTS[one.indices], OUTPUTS[one.indices])
            updates, training.state.inner = update(gradients, training.state.inner, training.model)
            training.model = jax.tree.map(jnp.add, training.model, updates)
            seen.append(numbers(training.model))
        return seen

    with sync_world(2) as comms:
        for seen in run_threads(comms, main):
            assert seen[3] != seen[4]
            assert seen[5] == seen[6] == seen[7]


def test_update_without_params_or_step_is_refused() -> None:
    def main(comm: Any) -> None:
        inner = Momentum()
        training = Training(comm, start())
        transformation = optimizers.adaptive(training, inner)
        with pytest.raises(ConfigError, match="needs params"):
            transformation.update(start(), inner.init(start()))
        with pytest.raises(ConfigError, match="exchanged in a step"):
            transformation.update(start(), inner.init(start()), start())

    with sync_world(1) as comms:
        run_threads(comms, main)
