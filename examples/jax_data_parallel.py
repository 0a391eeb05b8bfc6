"""Data-parallel training in JAX on CPUs, without pmap: each rank compiles its own step, with an all_reduce in it.

::

    kfcomm run -n 4 python examples/jax_data_parallel.py

The whole step is one compiled function: the loss of this rank's part of the batch, its gradient, the average over all
ranks, and the update.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import jax
    from jax import numpy as jnp
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[jax]"') from None
import numpy as np

import kfcomm
import kfcomm.jax

STEPS = 300
SAMPLES_PER_RANK = 128
RATE = 0.5
WIDTHS = (2, 32, 1)

Weights = list[dict[str, Any]]


def initial(seed: int) -> Weights:
    """Of a perceptron."""
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    return [
        {"w": jax.random.normal(key, (wide, narrow)) / jnp.sqrt(wide), "b": jnp.zeros(narrow)}
        for key, wide, narrow in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def scores(weights: Weights, x: jax.Array) -> jax.Array:
    """Positive where a point is taken to lie inside."""
    for layer in weights[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ weights[-1]["w"] + weights[-1]["b"])[:, 0]


def loss_of(weights: Weights, x: jax.Array, inside: jax.Array) -> jax.Array:
    """Logistic loss."""
    return jnp.logaddexp(0.0, jnp.where(inside, -1.0, 1.0) * scores(weights, x)).mean()


def main() -> bool:
    """Learn where points lie within a circle; returns whether all replicas are the same, and good."""
    with kfcomm.sync.init() as comm:
        x = jax.random.uniform(jax.random.key(100 + comm.rank), (SAMPLES_PER_RANK, 2), minval=-1.0, maxval=1.0)
        inside = (x**2).sum(axis=1) < 0.6
        weights = kfcomm.jax.broadcast(initial(comm.rank), comm, name="initial")

        @jax.jit
        def step(weights: Weights) -> tuple[jax.Array, Weights]:
            loss, gradients = jax.value_and_grad(loss_of)(weights, x, inside)
            loss, gradients = kfcomm.jax.all_reduce((loss, gradients), comm, name="step", op="avg")
            return loss, jax.tree.map(lambda one, gradient: one - RATE * gradient, weights, gradients)

        for number in range(1, STEPS + 1):
            loss, weights = step(weights)
            if number % 100 == 0 and comm.rank == 0:
                print(f"step {number}: loss {loss:.3f}")

        right = comm.all_reduce(((scores(weights, x) > 0) == inside).mean(), name="accuracy", op="avg")
        same = comm.consensus([np.asarray(one) for one in jax.tree.leaves(weights)], name="replicas")
        if comm.rank == 0:
            print(f"accuracy {right:.3f}; {'bit-identical' if same else 'DIFFERENT'} on {comm.size} ranks")
        return bool(same) and bool(right > 0.9)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
